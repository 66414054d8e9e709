"""Run the points of a sweep as one job array of Slurm, with the submitit library."""

from __future__ import annotations

import ast
import itertools
import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from exvae import files
from exvae.errors import UserError
from exvae.sweeps import sweep

MadeFrom = tuple[ConfigDict, dict[str, list[str]], Path]  # the arguments of `sweep.make_points`


class SlurmJob:
    """The job of one point, which submitit runs on a node. The node makes its own points, so the pickle is small."""

    def __call__(self, number: int, words: Sequence[str], *made_from: Any) -> None:
        """Run the point with this number, and update the table."""
        points = sweep.make_points(*made_from)
        process = sweep.start(points[number], words)
        try:
            code = process.wait()
        finally:
            sweep.stop([process])
        sweep.finish(points, points[number], code)
        if reason := sweep.failure(points[number]):
            raise ChildProcessError(reason)  # Slurm shows the job as failed

    def checkpoint(self, *arguments: Any) -> Any:
        """Submit the job again when time is up or it is preempted. The new job resumes from the run's checkpoint."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self, *arguments)


def parameters_of(text: str) -> dict[str, Any]:
    """Parse 'partition=gpu;timeout_min=600' to {'slurm_partition': 'gpu', 'slurm_timeout_min': 600}."""
    parameters: dict[str, Any] = {}
    for part in filter(None, sweep.split(text, ";")):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not (name and value):
            raise UserError(f"--sweep_slurm: {part!r} must be NAME=VALUE")
        try:
            number = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            number = None
        parameters[f"slurm_{name.removeprefix('slurm_')}"] = number if isinstance(number, int | float) else value
    return parameters


def _in_queue(jobs: dict[str, str]) -> set[str]:
    """The jobs that are waiting or running. Their points must not be submitted again."""
    if not jobs:
        return set()
    command = ["squeue", "--me", "--noheader", "--array", "--format=%i"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"{shlex.join(command)}: {done.stderr}")
    return set(done.stdout.split()) & set(jobs.values())


def _submit(todo: Sequence[int], folder: Path, parameters: dict[str, Any], arguments: Sequence[Any]) -> list[str]:
    """Submit one job array for the points with these numbers, and return the ids of the jobs."""
    try:
        import submitit
    except ImportError as error:
        raise UserError("--sweep_executor=slurm needs submitit: pip install -r requirements-slurm.txt") from error
    if not parameters.keys() & {"slurm_timeout_min", "slurm_time"}:
        raise UserError("--sweep_slurm needs timeout_min=MINUTES, the time limit of a job (submitit's default is 5)")
    try:
        executor = submitit.AutoExecutor(folder, cluster="slurm")
        executor.update_parameters(**parameters)
        jobs = executor.map_array(SlurmJob(), todo, *map(itertools.repeat, arguments))
    except (NameError, ValueError, TypeError) as error:  # an unknown parameter, or a wrong value
        raise UserError(f"--sweep_slurm: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:  # Slurm is not installed, or sbatch fails
        raise ChildProcessError(f"--sweep_executor=slurm: {error}") from error
    return [job.job_id for job in jobs]


def run(points: Sequence[sweep.Point], words: Sequence[str], workers: int, options: str, made_from: MadeFrom) -> None:
    """Submit the unfinished points that are not in the queue, without waiting for them.

    Args:
      words: the words of the command line that all points share.
      workers: jobs that may run at the same time.
      options: the value of --sweep_slurm.
      made_from: the arguments of `sweep.make_points`.
    """
    folder = points[0].folder.parent / "slurm"
    ids = folder / "jobs.json"
    jobs = json.loads(ids.read_text()) if ids.exists() else {}
    queue = _in_queue(jobs)
    waiting = [jobs.get(point.folder.name) in queue for point in points]
    todo = [n for n, point in enumerate(points) if not (waiting[n] or sweep.finished(point))]
    parameters = {
        "slurm_array_parallelism": workers,
        "slurm_job_name": "exvae",
        "slurm_setup": [f"export PYTHONPATH={shlex.quote(str(sweep.ROOT))}:$PYTHONPATH"],  # jobs import exvae
    } | parameters_of(options)
    print(f"points: {len(points)}, in the queue: {len(queue)}, to submit now: {len(todo)}, at a time: {workers}")
    if todo:
        new = dict(zip(todo, _submit(todo, folder, parameters, (words, *made_from)), strict=True))
        for n, job in new.items():
            print(f"job {job}  {points[n].folder.name}  ({points[n].log})")
        jobs |= {points[n].folder.name: job for n, job in new.items()}
        files.write_json(ids, jobs)
        print(f"logs of the jobs: {folder}\nevery job updates the table when it ends: cat {folder.parent}/sweep.txt")
