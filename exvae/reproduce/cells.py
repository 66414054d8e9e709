"""The paper's tables, cell by cell: python -m exvae.reproduce [--cells=PATTERN] [--seeds=0,1] [--jobs=2] [--dry_run]

Every cell is a plain `launch.py` command, which `--dry_run` prints. Finished cells are skipped, and a cell that was
killed resumes from its last checkpoint, so the same command continues after any stop. Each finished cell writes
`results/<cell>.json`, and `python -m exvae.results` makes docs/results.md from these files.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import fnmatch
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from exvae import config as configs
from exvae import files
from exvae.errors import UserError
from exvae.reproduce import results
from exvae.runs import folder, revision
from exvae.runs.progress import clock
from exvae.sweeps import child
from exvae.sweeps.sweep import AUTOMATIC, lock, same_config

ROOT = Path(__file__).resolve().parents[2]
RUNS = Path("runs/reproduce")
POLL_SECONDS = 1.0
PROGRESS_SECONDS = 600.0  # between two lines with the remaining time
NICE = 10  # in 0..19: give other programs priority
WHOLE_BY_TRAINING = 1.25  # a guess: time of training and evaluation, divided by that of training
# A program that prints the rate of a float32 matrix product in GFLOP/s, on the cores that it may use.
MATMUL = """
import time, jax, jax.numpy as jnp
a, product, best = jnp.ones((1024, 1024)), jax.jit(jnp.matmul), 1e9
product(a, a).block_until_ready()
for _ in range(40):
    began = time.perf_counter()
    product(a, a).block_until_ready()
    best = min(best, time.perf_counter() - began)
print(2 * 1024**3 / best / 1e9)
"""


@dataclasses.dataclass(frozen=True)
class Plan:
    """One cell: its name, its experiment and its seed."""

    name: str
    experiment: str
    seed: int

    def command(self, runs: Path) -> list[str]:
        """The arguments of python. `runs` is the folder of the run folders."""
        return [
            "launch.py",
            f"--config=experiments/{self.experiment}",
            f"--config.seed={self.seed}",
            f"--workdir={runs / self.name}",
        ]


def plans(seeds: Sequence[int] | None = None) -> Iterator[Plan]:
    """All cells in the order of their runs: the dense rows of the main table, then the ablations.

    Args:
      seeds: the seeds of every cell; None: three for MNIST `vae` with the exemplar prior, one for the others.
    """
    rows = [("mnist", "vae"), ("omniglot", "vae"), ("omniglot", "hvae"), ("mnist", "hvae"), ("fashion_mnist", "vae"),
            ("fashion_mnist", "hvae")]  # fmt: skip
    for data, architecture in rows:
        for prior in results.PRIORS:
            default = (0, 1, 2) if (data, architecture, prior) == ("mnist", "vae", "exemplar") else (0,)
            for seed in seeds or default:
                experiment = f"{data}_{architecture}.py:prior={prior},recipe=fast"
                yield Plan(f"{data}_{architecture}_{prior}_seed{seed}", experiment, seed)
    for seed in seeds or (0,):
        for data in ("mnist", "omniglot"):
            for loo in ("false", "true"):
                experiment = f"ablation_loo.py:data={data},leave_one_out={loo},recipe=fast"
                yield Plan(f"ablation_loo_{data}_{loo}_seed{seed}", experiment, seed)
            # M = N is the row above with leave-one-out, and M = N / 2 is in the main table.
            for fraction in ("0.2", "0.1"):
                experiment = f"ablation_subsampling.py:data={data},fraction={fraction},recipe=fast"
                yield Plan(f"ablation_subsampling_{data}_{fraction}_seed{seed}", experiment, seed)


def config_of(plan: Plan) -> dict[str, Any]:
    """The config of the cell's command."""
    file, _, argument = plan.experiment.partition(":")
    spec = importlib.util.spec_from_file_location("experiment", ROOT / "experiments" / file)
    if spec is None or spec.loader is None:
        raise UserError(f"experiments/{file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config(argument)
    config.seed = plan.seed
    return config.to_dict()


def finished(plan: Plan, folder: Path) -> bool:
    """Whether the cell has a result with its current config. The recipe may have changed since an older result."""
    path = folder / f"{plan.name}.json"
    return path.exists() and same_config(config_of(plan), results.read(path).config)


def choose(pattern: str, seeds: Sequence[int] | None) -> list[Plan]:
    """The cells whose names match a pattern, or one of several patterns with commas between them."""
    every, parts = list(plans(seeds)), pattern.split(",")
    for part in parts:
        if not any(fnmatch.fnmatch(plan.name, part) for plan in every):
            raise UserError(f"--cells={part} matches none of the {len(every)} cells; --dry_run lists them")
    return [plan for plan in every if any(fnmatch.fnmatch(plan.name, part) for part in parts)]


def cores_of(job: int, jobs: int) -> list[int]:
    """The cores of one of several jobs that run at the same time. If there are too few cores, jobs share them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    if jobs > len(cores):
        return [cores[job % len(cores)]]
    return cores[job * len(cores) // jobs : (job + 1) * len(cores) // jobs]


@dataclasses.dataclass
class Job:
    """A cell that is running."""

    plan: Plan
    slot: int
    cores: list[int]
    matmul_gflops: float
    process: subprocess.Popen
    began: float  # when it started
    progress: float  # the progress at the start, in 0..1


def set_aside(plan: Plan, runs: Path) -> None:
    """Rename the folder of the cell if it holds a run with another config, for example of an earlier recipe."""
    workdir = runs / plan.name
    if not (workdir / "config.json").exists():
        return
    old, new = folder.read_config(workdir), config_of(plan)
    for group, name in AUTOMATIC:
        new[group][name] = new[group][name] or old[group][name]
    if configs.differences(new, old):
        aside = workdir.with_name(f"{plan.name}-before-{time.strftime('%Y%m%d-%H%M%S')}")
        workdir.rename(aside)
        print(f"moved    a run with another config to {aside}", flush=True)


def start(plan: Plan, runs: Path, slot: int, jobs: int) -> Job:
    """Start a cell at low priority on its share of the cores. It is killed if this process ends."""
    cores, workdir = cores_of(slot, jobs), runs / plan.name
    set_aside(plan, runs)
    workdir.mkdir(parents=True, exist_ok=True)
    note_revision(workdir)
    matmul = child.command([sys.executable, "-c", MATMUL], NICE, cores)
    rate = subprocess.run(matmul, cwd=ROOT, capture_output=True, text=True, check=True)
    command = child.command([sys.executable, *plan.command(runs)], NICE, cores)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with open(workdir / "log.txt", "a") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return Job(plan, slot, cores, float(rate.stdout), process, time.monotonic(), progress_of(plan, runs))


def collect(job: Job, runs: Path) -> results.Cell:
    """Read the result of a run that has succeeded."""
    workdir = runs / job.plan.name
    found = json.loads((workdir / "results.json").read_text())
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    summaries = [json.loads(path.read_text()) for path in (workdir / "evaluations").glob("*.json")]
    config = found["config"]
    config["data"]["dir"] = ""  # the location of the data files is not part of a result
    seconds = next((s["seconds"] for s in summaries if s["test"] == found["test"]), 0.0)
    return results.Cell(
        name=job.plan.name,
        command=shlex.join(["python", *job.plan.command(RUNS)]),
        test=found["test"],
        best_epoch=found["best_epoch"],
        config=config,
        git=" ".join((workdir / "revisions.txt").read_text().split()),
        train_seconds=round(found["seconds"], 1),
        train_cpu_seconds=found["cpu_seconds"] and round(found["cpu_seconds"], 1),
        evaluation_seconds=round(seconds, 1),
        cores=len(job.cores),
        matmul_gflops=round(job.matmul_gflops, 1),
        valid=[(line["epoch"], round(line["elbo"], 4)) for line in lines if line["split"] == "valid"],
    )


def progress_of(plan: Plan, runs: Path) -> float:
    """The fraction of a cell's training that is done, from its log of epochs."""
    workdir = runs / plan.name
    try:
        epochs = json.loads((workdir / "config.json").read_text())["train"]["epochs"]
        return min(1.0, len(re.findall(r'"split": "train"', (workdir / "metrics.jsonl").read_text())) / epochs)
    except (OSError, ValueError, KeyError):
        return 0.0


def last_line(runs: Path, plan: Plan) -> str:
    """The last line of output of a cell."""
    try:
        lines = [line for line in (runs / plan.name / "log.txt").read_text(errors="replace").splitlines() if line]
    except OSError:
        lines = []
    return lines[-1] if lines else "no output"


def check_tree() -> str:
    """Return the current git revision.

    Raises:
      UserError: there is none, or the code has uncommitted changes.
    """
    revision.git_revision.cache_clear()
    found = revision.git_revision()
    if found is None or found.endswith("+"):
        what = "is not a git checkout" if found is None else "has uncommitted changes"
        raise UserError(f"this folder {what}, but results record their revision: run it from a clean clone")
    return found


def note_revision(workdir: Path) -> None:
    """Add the revision to revisions.txt. A run may resume with newer code, so its result lists all revisions."""
    path, found = workdir / "revisions.txt", check_tree()
    known = path.read_text().split() if path.exists() else []
    if found not in known:
        path.write_text("".join(f"{line}\n" for line in [*known, found]))


def _end(job: Job, runs: Path, folder: Path) -> results.Cell:
    """Write and return the result of a process that has ended.

    Raises:
      ChildProcessError: the process failed.
    """
    code = job.process.returncode
    if code:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise ChildProcessError(f"{how}: {last_line(runs, job.plan)}")
    cell = collect(job, runs)
    results.write(folder, cell)
    if folder.resolve() == results.RESULTS:
        results.main([])
    return cell


def run(chosen: Sequence[Plan], runs: Path, folder: Path, jobs: int) -> int:
    """Run the unfinished cells, `jobs` at a time, and return the number of cells that failed.

    If `folder` is the project's own folder of results, docs/results.md is updated too.
    """
    todo = collections.deque(plan for plan in chosen if not finished(plan, folder))
    print(f"cells: {len(chosen)}, finished before: {len(chosen) - len(todo)}, at a time: {jobs}", flush=True)
    free, failed = list(range(jobs)), 0
    running: list[Job] = []
    took: list[float] = []
    shown = time.monotonic()
    try:
        while todo or running:
            while todo and free:
                plan, slot = todo.popleft(), free.pop(0)
                try:
                    running.append(start(plan, runs, slot, jobs))
                    print(f"started  {plan.name}  ({runs / plan.name / 'log.txt'})", flush=True)
                except Exception as error:  # only this cell fails, the others run
                    failed += 1
                    free.append(slot)
                    print(f"failed   {plan.name}  {_one_line(error)}", flush=True)
            time.sleep(POLL_SECONDS)
            for job in [job for job in running if job.process.poll() is not None]:
                running.remove(job)
                free.append(job.slot)
                try:
                    cell = _end(job, runs, folder)
                    took.append(cell.train_seconds + cell.evaluation_seconds)
                    print(f"done     {cell.name}  log-likelihood {cell.test['log_likelihood']:.2f}", flush=True)
                except Exception as error:  # only this cell fails, the others continue
                    failed += 1
                    print(f"failed   {job.plan.name}  {_one_line(error)}", flush=True)
            if time.monotonic() - shown > PROGRESS_SECONDS:
                shown = time.monotonic()
                print(_left(running, todo, runs, took, jobs), flush=True)
    finally:
        for job in running:
            job.process.terminate()
        for job in running:
            job.process.wait()
    return failed


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _left(running: Sequence[Job], todo: Sequence[Plan], runs: Path, took: list[float], jobs: int) -> str:
    """The progress of the running cells, and the remaining time of all cells."""
    progress = [progress_of(job.plan, runs) for job in running]
    text = "running  " + ", ".join(f"{job.plan.name} {100 * p:.0f} %" for job, p in zip(running, progress, strict=True))
    whole = took or [
        WHOLE_BY_TRAINING * (time.monotonic() - job.began) / (p - job.progress)
        for job, p in zip(running, progress, strict=True)
        if p > job.progress
    ]
    if not whole:
        return text
    typical = sum(whole) / len(whole)
    rest = sum(typical * (1 - p / WHOLE_BY_TRAINING) for p in progress) + typical * len(todo)
    return f"{text}; {len(todo)} waiting; about {clock(rest / jobs)} left"


def show(chosen: Sequence[Plan], runs: Path, folder: Path) -> None:
    """Print the commands, and which of them are finished."""
    try:
        for plan in chosen:
            text = shlex.join(["python", *plan.command(runs)])
            print(f"{'finished' if finished(plan, folder) else 'to do   '}  {text}", flush=True)
    except BrokenPipeError:  # as in `--dry_run | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m exvae.reproduce", description="The paper's tables, cell by cell.")
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="names: 'mnist_vae_*', or several with commas")
    parser.add_argument(
        "--seeds", default="", metavar="0,1,...", help="seeds of every cell; default: those of docs/results.md"
    )
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time, each on its share of the cores")
    parser.add_argument("--runs", type=Path, default=RUNS, metavar="FOLDER", help="folder of the run folders")
    parser.add_argument(
        "--results",
        type=Path,
        default=results.RESULTS,
        metavar="FOLDER",
        help="folder of the results of finished cells",
    )
    parser.add_argument("--dry_run", action="store_true", help="print the commands and what is finished, run nothing")
    options = parser.parse_args(argv)
    try:
        if not re.fullmatch(r"(\d+(,\d+)*)?", options.seeds):
            raise UserError(f"--seeds={options.seeds} must be whole numbers with commas between them")
        if options.jobs < 1:
            raise UserError(f"--jobs={options.jobs} must be at least 1")
        seeds = [int(seed) for seed in options.seeds.split(",")] if options.seeds else None
        if seeds and len(set(seeds)) < len(seeds):
            raise UserError(f"--seeds={options.seeds} lists a seed twice")
        chosen = choose(options.cells, seeds)
        if options.dry_run:
            show(chosen, options.runs, options.results)
            return 0
        check_tree()
        files.make_writable(options.results, "--results")
        with lock(options.runs, "--runs", "reproduction"):
            failed = run(chosen, options.runs.absolute(), options.results.absolute(), options.jobs)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return 130
    if failed:
        print(
            f"error: {failed} of {len(chosen)} cells failed; run the same command again to retry them", file=sys.stderr
        )
    return 1 if failed else 0
