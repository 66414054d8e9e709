"""The files of a run's folder that describe it: config.json, results.json. `writer.py` has metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from ml_collections import ConfigDict

from exvae import config as configs
from exvae import files
from exvae.errors import UserError
from exvae.runs.revision import git_revision
from exvae.scale import sharding


def write_json(path: Path, value: object) -> None:
    """Of several processes, the main one writes the file."""
    if sharding.is_main():
        files.write_json(path, value)


def open_workdir(workdir: Path, config: dict) -> None:
    """Make the folder and write config.json, or check that the run in it is of this config."""
    files.make_writable(workdir, "--workdir")
    git_revision()  # a commit while the run goes on is not its code
    path = workdir / "config.json"
    is_run = path.exists() and any((workdir / name).exists() for name in ("checkpoints", "results.json"))
    if is_run and (found := configs.differences(config, read_config(workdir))):
        raise UserError(f"--workdir={workdir} holds a run of another config ({'; '.join(found)}): choose another")
    write_json(path, config)


def update_results(workdir: Path, config: ConfigDict, best_epoch: int, test: dict, spent: dict | None = None) -> dict:
    """Write results.json and return it.

    Args:
      spent: seconds of training, on the clock and of all cores; None: those of the file, if there is one, stay.
    """
    path = workdir / "results.json"
    if spent is None:
        spent = {}
        with contextlib.suppress(OSError, ValueError, TypeError):
            spent = dict(json.loads(path.read_text()))
    results = {
        "test": test,
        "best_epoch": best_epoch,
        "config": config.to_dict(),
        "git": git_revision(),
        "seconds": spent.get("seconds"),
        "cpu_seconds": spent.get("cpu_seconds"),
    }
    write_json(path, results)
    return json.loads(json.dumps(results))


def read_config(workdir: Path) -> dict:
    """config.json of a run."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"--workdir={workdir} holds no run (no config.json): train one first, or choose another folder")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not the config of a run ({error})") from error
