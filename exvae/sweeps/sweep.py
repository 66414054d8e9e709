"""A grid of runs: python launch.py --config=experiments/mnist_vae.py --sweep='seed=0,1;optim.learning_rate=1e-3,5e-4'

Every point is a separate process of `launch.py` with its own folder, on this machine or as a job of Slurm. The state of
a point is read from its folder, so a sweep can be killed, repeated and extended.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import csv
import dataclasses
import fcntl
import io
import itertools
import json
import operator
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from exvae import config as configs
from exvae import files
from exvae.errors import UserError
from exvae.runs.progress import clock
from exvae.sweeps import child

ROOT = Path(__file__).resolve().parents[2]
OWN_FLAGS = ("sweep", "sweep_workers", "sweep_executor", "sweep_slurm", "workdir")
AUTOMATIC = (("prior", "num_exemplars"), ("retrieval", "rebuild_steps"))  # a run computes these fields if they are 0
MORE_TO_DO = (
    "train.epochs",
    "train.patience",
    "eval.",
)  # may change on resume, but then a finished run must continue
FIGURES = ("best_epoch", "valid_elbo", "test_elbo", "test_log_likelihood", "seconds")
STATUSES = ("done", "failed", "waiting")
END = "sweep: "  # beginning of the last line in the log of a failed point
POLL_SECONDS = 0.2


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of the grid."""

    values: dict[str, str]  # the swept fields, as typed
    config: ConfigDict
    folder: Path

    @property
    def log(self) -> Path:
        """The file with the output of its processes."""
        return self.folder / "log.txt"


def split(text: str, mark: str) -> list[str]:
    """Split text at a mark, but not inside parentheses."""
    return [part.strip() for part in re.split(rf"{mark}(?![^()]*\))", text)]


def parse(text: str) -> dict[str, list[str]]:
    """Parse 'seed=0,1;augment.lambdas=(1,0.4),(1,0)' to {'seed': ['0', '1'], 'augment.lambdas': ['(1,0.4)', ...]}."""
    grid: dict[str, list[str]] = {}
    names = [name.removeprefix("config.") for name in configs.field_names()]
    for part in filter(None, split(text, ";")):
        field, _, values = part.partition("=")
        field = field.strip().removeprefix("config.")
        if field not in names:
            raise UserError(f"--sweep: {field!r} is not a config field{configs.nearest_name(field, names)}")
        if field in grid:
            raise UserError(f"--sweep: {field} occurs twice: give all its values in one list")
        grid[field] = split(values, ",")
        if not all(grid[field]):
            raise UserError(f"--sweep: {part!r} must be FIELD=VALUE,VALUE,... with no value empty")
    if not grid:
        raise UserError(f"--sweep={text!r} must be FIELD=VALUE,VALUE,...;FIELD=...")
    return grid


def _configure(config: ConfigDict, values: dict[str, str]) -> ConfigDict:
    """Copy the config and set these fields. They are parsed in the same way as in the process of the point."""
    words = ["", *(f"--config.{field}={value}" for field, value in values.items())]
    own = flags.FlagValues()
    config_flags.DEFINE_config_dict("config", copy.deepcopy(config), flag_values=own, sys_argv=words)
    own(words)
    configs.validate(own.config)
    return own.config


def _folder_name(values: dict[str, str]) -> str:
    """'seed=0,optim.learning_rate=1e-3'. If characters are replaced or cut off, a checksum keeps names unique."""
    text = ",".join(f"{field}={value}" for field, value in values.items())
    safe = re.sub(r"[^\w.=,()+-]", "_", text, flags=re.ASCII)[:200]
    return safe if safe == text else f"{safe}-{zlib.crc32(text.encode()):08x}"


def make_points(config: ConfigDict, grid: dict[str, list[str]], workdir: Path) -> list[Point]:
    """Make the points of the grid and check their configs. The first field varies slowest."""
    points: dict[Any, Point] = {}  # by their typed values
    for texts in itertools.product(*grid.values()):
        values = dict(zip(grid, texts, strict=True))
        name = _folder_name(values)
        try:
            point = Point(values, _configure(config, values), workdir / name)
        except (flags.Error, UserError) as error:
            raise UserError(f"--sweep: {name}: {error}") from error
        typed = operator.itemgetter(*grid)(configs.flat(point.config))
        if typed in points:
            raise UserError(f"--sweep: {name} and {points[typed].folder.name} are the same: give each value once")
        points[typed] = point
    return list(points.values())


def common_words(argv: Sequence[str], fields: Iterable[str]) -> list[str]:
    """The words of the command line that all points share, without the options of the sweep and the swept fields."""
    # A tuple flag that occurs twice collects the values of both, so a swept field must not be among these words.
    own = {*OWN_FLAGS, *(f"config.{field}" for field in fields)}
    kept, rest = [], collections.deque(flags.FLAGS.read_flags_from_files(list(argv[1:])))
    while rest:
        word = rest.popleft()
        name, equals, _ = word.lstrip("-").partition("=")
        if not word.startswith("-") or name not in own:
            kept.append(word)
        elif not equals and rest and not re.match("--?[a-z]", rest[0]):
            rest.popleft()
    return kept


def child_command(words: Sequence[str], point: Point) -> list[str]:
    """The command of one point. It runs in the folder of the sweep, so relative paths mean the same."""
    fields = [f"--config.{field}={value}" for field, value in point.values.items()]
    return [sys.executable, str(ROOT / "launch.py"), *words, *fields, f"--workdir={point.folder}"]


def same_config(new: dict[str, Any], old: dict[str, Any]) -> bool:
    """Whether a finished run with the config `old` (of results.json) is also a finished run of `new`."""
    new = copy.deepcopy(new)
    for group, name in AUTOMATIC:
        new[group][name] = new[group][name] or old[group][name]
    now, then, default = map(configs.flat, (new, old, configs.get_config()))
    then = {**default, **then}  # an old run lacks newer fields, which had their defaults
    agrees = all(now[field] == then[field] for field in now if field.startswith(MORE_TO_DO))
    return agrees and not configs.differences(new, old)


def finished(point: Point) -> dict[str, Any] | None:
    """The contents of results.json if it has a log-likelihood and the config of the point; else None."""
    try:
        results = json.loads((point.folder / "results.json").read_text())
        is_whole = results["test"]["log_likelihood"] is not None
        return results if is_whole and same_config(point.config.to_dict(), results["config"]) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def failure(point: Point) -> str:
    """'exit code 2: error: ...': how a point failed, and its last line of output; '' if it did not fail."""
    try:
        lines = [line for line in point.log.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        return ""
    *said, last = lines or [""]
    if not last.startswith(END) or finished(point):
        return ""
    is_silent = not said or said[-1].startswith("$ ")  # only the line with the command
    return last.removeprefix(END) + ("" if is_silent else f": {said[-1]}")


def best_valid(folder: Path) -> dict[str, Any]:
    """The line of metrics.jsonl with the best validation ELBO; {} if there is none."""
    lines = []
    with contextlib.suppress(OSError):
        for text in (folder / "metrics.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):  # an incomplete line, left by a kill
                lines.append(json.loads(text))
    return max((line for line in lines if line["split"] == "valid"), key=lambda line: line["elbo"], default={})


def summary(points: Sequence[Point]) -> list[dict[str, Any]]:
    """A row for each point, the best validation ELBO first. Failed and waiting points are at the end."""
    rows = []
    for point in points:
        results, valid = finished(point) or {}, best_valid(point.folder)
        status = "done" if results else "failed" if failure(point) else "waiting"
        test = results.get("test", {})
        figures = (valid.get("epoch"), valid.get("elbo"), test.get("elbo"), test.get("log_likelihood"))
        named = dict(zip(FIGURES, (*figures, results.get("seconds")), strict=True))
        rows.append({**point.values, "status": status, **named, "folder": str(point.folder)})
    return sorted(rows, key=lambda row: (STATUSES.index(row["status"]), -(row["valid_elbo"] or -float("inf"))))


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    return f"{value:.0f}" if name in ("best_epoch", "seconds") else f"{value:.2f}"


def as_text(rows: Sequence[dict[str, Any]]) -> str:
    """The table as text with aligned columns."""
    columns = []
    for name in rows[0]:
        header = name.replace("_", " ") if name in FIGURES else name
        cells = [header, *(_cell(name, row[name]) for row in rows)]
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if name in FIGURES else cell.ljust(width) for cell in cells])
    return "".join("  ".join(line).rstrip() + "\n" for line in zip(*columns, strict=True))


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """The table as CSV with all digits. Missing values are empty."""
    file = io.StringIO()
    writer = csv.DictWriter(file, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def write_summary(points: Sequence[Point]) -> str:
    """Write sweep.csv, and sweep.txt with failures below the table. Return the text."""
    rows, workdir = summary(points), points[0].folder.parent
    failed = [f"failed  {point.folder.name}  {failure(point)}  ({point.log})\n" for point in points if failure(point)]
    text = as_text(rows) + "".join(failed)
    files.write_text(workdir / "sweep.txt", text)
    files.write_text(workdir / "sweep.csv", as_csv(rows))
    return text


def devices(visible: str, worker: int, workers: int) -> str:
    """A worker's part of CUDA_VISIBLE_DEVICES: neighbours in the list. If there are too few, workers share them."""
    names = visible.split(",")
    if workers > len(names):
        return names[worker % len(names)]
    return ",".join(names[worker * len(names) // workers : (worker + 1) * len(names) // workers])


def start(point: Point, words: Sequence[str], *, worker: int = 0, workers: int = 1) -> subprocess.Popen:
    """Start the process of a point. Its output is appended to its log."""
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
    }  # otherwise output may appear after a later error
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        environment["CUDA_VISIBLE_DEVICES"] = devices(visible, worker, workers)
    command = child_command(words, point)
    point.folder.mkdir(parents=True, exist_ok=True)
    with open(point.log, "a") as log:
        print(f"$ {shlex.join(command)}", file=log, flush=True)
        return subprocess.Popen(
            child.command(command), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
        )


def finish(points: Sequence[Point], point: Point, code: int) -> None:
    """Note a failure in the log of a point whose process has ended, and update the table."""
    if not finished(point):
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        with open(point.log, "a") as log:
            print(f"\n{END}{how}", file=log)
    write_summary(points)


def stop(processes: Sequence[subprocess.Popen]) -> None:
    """Terminate the processes and wait until they have ended."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.wait()


def run_local(points: Sequence[Point], words: Sequence[str], workers: int) -> None:
    """Run the unfinished points, `workers` at a time. If one fails, the others still run."""
    todo = collections.deque(point for point in points if not finished(point))
    print(f"points: {len(points)}, finished before: {len(points) - len(todo)}, at a time: {workers}", flush=True)
    free, seconds = list(range(workers)), list[float]()
    running: dict[subprocess.Popen, tuple[Point, int, float]] = {}
    try:
        while todo or running:
            while todo and free:
                point, worker = todo.popleft(), free.pop(0)
                print(f"started  {point.folder.name}  ({point.log})", flush=True)
                running[start(point, words, worker=worker, workers=workers)] = (point, worker, time.monotonic())
            time.sleep(POLL_SECONDS)
            for process in [process for process in running if process.poll() is not None]:
                point, worker, began = running.pop(process)
                free.append(worker)
                finish(points, point, process.returncode)
                if reason := failure(point):
                    outcome = f"failed   {point.folder.name}  {reason}"
                else:
                    seconds.append(time.monotonic() - began)
                    elbo = _cell("valid_elbo", best_valid(point.folder).get("elbo"))
                    outcome = f"done     {point.folder.name}  valid elbo {elbo}"
                left = len(todo) + len(running)
                about = f", about {clock(left / workers * sum(seconds) / len(seconds))}" if seconds and left else ""
                print(f"{outcome}  ({point.log}); {left} left{about}", flush=True)
    finally:
        stop(list(running))


@contextlib.contextmanager
def lock(folder: Path, option: str, what: str) -> Iterator[None]:
    """Hold a lock on a folder, so only one sweep (or other `what`) runs in it. It is released when the process ends.

    Args:
      option: the command line option of the folder, for messages.
      what: the name of the work, such as "sweep".
    """
    files.make_writable(folder, option)
    with open(folder / f".{what}.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{option}={folder}: another {what} is running in this folder") from error
        yield


def main(
    config: ConfigDict, workdir: Path, argv: Sequence[str], text: str, *, workers: int, executor: str, slurm: str
) -> None:
    """Check the whole grid, run its unfinished points, and print the table.

    Args:
      argv: the command line.
      text: the value of --sweep.

    Raises:
      UserError: the grid is wrong.
      ChildProcessError: at the end, if a point failed.
    """
    if slurm and executor != "slurm":
        raise UserError(f"--sweep_slurm needs --sweep_executor=slurm, not {executor}")
    grid = parse(text)
    points, words = make_points(config, grid, workdir), common_words(argv, grid)
    with lock(workdir, "--workdir", "sweep"):
        if executor == "slurm":
            from exvae.sweeps.slurm import run as run_slurm  # here, because `slurm` imports this module

            run_slurm(points, words, workers, slurm, (config, grid, workdir))
        else:
            run_local(points, words, workers)
        print(write_summary(points), end="")
    failed = sum(map(bool, map(failure, points)))
    if failed and executor == "local":
        raise ChildProcessError(f"{failed} of {len(points)} points failed; run the same command again to retry them")
