"""config.json and results.json in the folder of a run. `writer.py` has metrics.jsonl."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from exvae import config as configs
from exvae import files
from exvae.errors import UserError
from exvae.runs.revision import git_revision
from exvae.scale import sharding


def write_json(path: Path, value: object) -> None:
    """Write a JSON file. If there are several processes, only the main one writes."""
    if sharding.is_main():
        files.write_json(path, value)


def open_workdir(workdir: Path, config: dict[str, Any]) -> None:
    """Create the folder and write config.json. If the folder already holds a run, check that it has this config."""
    files.make_writable(workdir, "--workdir")
    git_revision()  # read it now: later commits are not part of this run
    path = workdir / "config.json"
    is_run = path.exists() and any((workdir / name).exists() for name in ("checkpoints", "results.json"))
    if is_run and (found := configs.differences(config, read_config(workdir))):
        raise UserError(f"--workdir={workdir} holds a run with another config ({'; '.join(found)}): choose another")
    write_json(path, config)


def update_results(
    workdir: Path,
    config: ConfigDict,
    best_epoch: int,
    test: dict[str, Any],
    spent: Mapping[str, float | None] | None = None,
) -> dict[str, Any]:
    """Write results.json and return its contents.

    Args:
      test: the values of the test set.
      spent: seconds of training, as "seconds" (elapsed) and "cpu_seconds" (all cores). None: keep those of the file.
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


def read_config(workdir: Path) -> dict[str, Any]:
    """Read a run's config.json."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"--workdir={workdir} holds no run (no config.json): train one first, or choose another folder")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not the config of a run ({error})") from error
