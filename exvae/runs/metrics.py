"""A run's folder but for its checkpoints: config.json, metrics.jsonl, results.json, TensorBoard events, progress."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from exvae import config as configs
from exvae.scale import sharding
from exvae.errors import UserError

OUTPUTS = (":(top,exclude)results", ":(top,exclude)docs")  # what finished runs write is no change of the code


def write_json(path: Path, value: Any) -> None:
    """Write so that the file is either the old one or the new one, whole. Of several processes the main one does."""
    if not sharding.is_main():
        return
    temporary = path.with_suffix(path.suffix + ".tmp")
    temporary.write_text(json.dumps(value, indent=2) + "\n")
    os.replace(temporary, path)


def make_writable(folder: Path, option: str) -> None:
    """Make the folder of a command line option, or say in one line that it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option}={folder} cannot be written: {error.strerror}") from error


def open_workdir(workdir: Path, config: dict) -> None:
    """Make the folder and write config.json, or check that the run in it is of this config."""
    make_writable(workdir, "--workdir")
    git_revision()  # a commit while the run goes on is not its code
    path = workdir / "config.json"
    is_run = path.exists() and any((workdir / name).exists() for name in ("checkpoints", "results.json"))
    if is_run and (found := configs.differences(config, read_config(workdir))):
        raise UserError(f"--workdir={workdir} holds a run of another config ({'; '.join(found)}): choose another")
    write_json(path, config)


def update_results(workdir: Path, config: Any, best_epoch: int, test: dict, spent: dict | None = None) -> dict:
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


def append_metrics(workdir: Path, step: int, epoch: int, split: str, values: dict) -> None:
    """One line at the end of metrics.jsonl, whatever else is being written there."""
    if not sharding.is_main():
        return
    with open(workdir / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "epoch": epoch, "split": split, **values}), file=file)


def read_config(workdir: Path) -> dict:
    """config.json of a run."""
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"--workdir={workdir} holds no run (no config.json): train one first, or choose another folder")
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} is not the config of a run ({error})") from error


@functools.cache
def git_revision() -> str | None:
    """The commit of the code when it was first asked for, '+' if code was changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *OUTPUTS)
        return git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None


class MetricsWriter:
    """metrics.jsonl and TensorBoard events. Lines later than the step that a run goes on from are taken back."""

    def __init__(self, workdir: Path, step: int):
        self._path = workdir / "metrics.jsonl"
        if self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if _belongs(line, step)]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(line + "\n" for line in kept))
            os.replace(temporary, self._path)
        self._file = open(self._path, "a")  # noqa: SIM115  (closed by close)
        self._events = SummaryWriter(str(workdir), purge_step=step + 1)

    def write(self, step: int, epoch: int, split: str, values: dict[str, float]) -> None:
        print(json.dumps({"step": step, "epoch": epoch, "split": split, **values}), file=self._file, flush=True)
        for name, value in values.items():
            if isinstance(value, int | float):
                self._events.add_scalar(f"{split}/{name}", value, step)
        self._events.flush()

    def close(self) -> None:
        self._file.close()
        self._events.close()


class NoWriter:
    """Of the processes that leave it to the main one."""

    def write(self, *_: Any) -> None:
        pass

    def close(self) -> None:
        pass


def _belongs(line: str, step: int) -> bool:
    """Whether a line was written by `step`; not so one cut short by a kill, nor test figures: they come anew."""
    try:
        values = json.loads(line)
        return values["step"] <= step and values["split"] != "test"
    except (ValueError, KeyError):
        return False


class Progress:
    """One line that is overwritten on a terminal; in a log file a line per epoch and one a minute within long ones."""

    def __init__(self, total_steps: int, batch_size: int):
        self._total, self._batch = total_steps, batch_size
        self._terminal = sys.stdout.isatty()
        self._shown = time.monotonic()
        self._mark = (0, self._shown)

    def begin(self, step: int) -> None:
        """Before the first step of an epoch: speed is that of the steps, without validation."""
        self._mark = (step, time.monotonic())

    def rate(self, step: int) -> float:
        """Images per second in this epoch so far."""
        first, began = self._mark
        return (step - first) * self._batch / max(time.monotonic() - began, 1e-9)

    def show(self, step: int, epoch: int, elbo: float) -> None:
        """Inside an epoch."""
        now = time.monotonic()
        if now - self._shown < (0.5 if self._terminal else 60.0):
            return
        self._shown = now
        rate = self.rate(step)
        left = clock((self._total - step) * self._batch / max(rate, 1e-9))
        text = f"epoch {epoch}  step {step}  train elbo {elbo:.2f}  {rate:.0f} images/s  {left} left"
        print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", flush=True)

    def epoch(self, text: str) -> None:
        """At an epoch's end."""
        print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)


class Countdown:
    """How far long work is and how long it will take, overwritten on a terminal, once a minute in a log file."""

    def __init__(self, total: int, text: str, *, quiet: bool = False):
        self._total, self._text, self._quiet = total, text, quiet
        self._terminal = sys.stdout.isatty()
        self._start = self._began = self._shown = time.monotonic()
        self._first = 0

    def show(self, done: int) -> None:
        now = time.monotonic()
        if not self._first:  # the first piece of work includes compilation and says nothing of the others
            self._first, self._began = done, now
        if now - self._shown < (0.5 if self._terminal else 60.0) or done == self._first:
            return
        self._shown = now
        rate = (done - self._first) / max(now - self._began, 1e-9)
        left = clock((self._total - done) / rate)
        self._print(f"{done} / {self._total}  {rate:.1f} images/s  {left} left", end="" if self._terminal else "\n")

    def _print(self, text: str, end: str) -> None:
        if not self._quiet:
            print(("\r\x1b[K" if self._terminal else "") + f"{self._text}  {text}", end=end, flush=True)

    def end(self) -> None:
        self._print(f"{self._total} images in {clock(time.monotonic() - self._start)}", end="\n")


def clock(seconds: float) -> str:
    """3725 -> '1h02m', 65 -> '1m05s'."""
    seconds = int(seconds)
    if seconds >= 3600:
        return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
    return f"{seconds // 60}m{seconds % 60:02d}s"
