"""Train and use Exemplar VAEs: python launch.py --config=experiments/mnist_vae.py --workdir=runs/mnist_vae"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from exvae import config as configs
from exvae import huge_pages
from exvae.errors import Diverged, UserError

# JAX and the modules that use it are imported by the functions below, so that --help and a mistake answer at once.
TASKS = {"evaluate": "exvae.evaluation.evaluate.main", "augment": "exvae.uses.augment.main"}  # on the folder of a run
TASKS_WITH_OUT = {
    "sample": "exvae.uses.gallery.sample_task",
    "interpolate": "exvae.uses.gallery.interpolate_task",
    "iterate": "exvae.uses.gallery.iterate_task",
    "represent": "exvae.uses.represent.main",
}
CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file, with :key=value arguments")
WORKDIR = flags.DEFINE_string("workdir", "", "folder of the run; default: runs/<name of the experiment>")
TASK = flags.DEFINE_enum("task", "train", ["train", *TASKS, *TASKS_WITH_OUT], "what to do")
DISTRIBUTED = flags.DEFINE_bool("distributed", False, "this is one of several processes that train one run together")
COORDINATOR = flags.DEFINE_string("coordinator", "", "distributed: HOST:PORT of process 0; '': set by SLURM or a pod")
NUM_PROCESSES = flags.DEFINE_integer("num_processes", -1, "distributed: number of processes")
PROCESS_ID = flags.DEFINE_integer("process_id", -1, "distributed: number of this process, from 0")
OUT = flags.DEFINE_string("out", "", f"{', '.join(TASKS_WITH_OUT)}: FILE.npz, or a folder for single PNGs")
SWEEP_OPTIONS = ("workers", "executor", "slurm")
SWEEP = flags.DEFINE_string("sweep", "", "grid of runs: 'seed=0,1,2;optim.learning_rate=1e-3,5e-4'")
SWEEP_WORKERS = flags.DEFINE_integer("sweep_workers", 1, "sweep: points that run at the same time", lower_bound=1)
SWEEP_EXECUTOR = flags.DEFINE_enum("sweep_executor", "local", ["local", "slurm"], "sweep: where points run")
SWEEP_SLURM = flags.DEFINE_string("sweep_slurm", "", "sweep: parameters of submitit: 'partition=gpu;timeout_min=600'")


def experiment() -> tuple[str, str]:
    """Return the file and the arguments of a --config such as 'experiments/mnist_vae.py:prior=vamp'."""
    path, _, arguments = config_flags.get_config_filename(flags.FLAGS["config"]).partition(":")
    return path, arguments


def default_workdir() -> str:
    """Return runs/mnist_vae, or runs/mnist_vae-prior=vamp if there are arguments: each baseline has its own folder."""
    path, arguments = experiment()
    return f"runs/{Path(path).stem}" + (f"-{arguments}" if arguments else "")


def parse(argv: list[str]) -> None:
    """Parse the command line. Any mistake in it raises a UserError."""
    configs.check_fields([word.lstrip("-").split("=")[0] for word in argv if word.lstrip("-").startswith("config.")])
    app.define_help_flags()
    try:
        rest = flags.FLAGS(argv)[1:]
    except flags.Error as error:
        # For an error in an experiment file, the text is a traceback. Its message is at the end.
        raise UserError(str(error).rpartition("UserError: ")[2]) from error
    if CONFIG.value is None:
        raise UserError("no experiment given: use --config=experiments/quickstart.py or another file of that folder")
    path = Path(experiment()[0])
    if not path.is_file():
        experiments = [str(file) for file in path.parent.glob("*.py")]
        raise UserError(f"--config={path}: no such file{configs.nearest_name(str(path), experiments)}")
    if rest:
        raise UserError(f"unexpected argument {rest[0]!r}: options begin with --")


def join_processes() -> None:
    """With --distributed, connect to the other processes. Only the first process prints."""
    if not DISTRIBUTED.value:
        if COORDINATOR.value or NUM_PROCESSES.value >= 0 or PROCESS_ID.value >= 0:
            raise UserError("--coordinator, --num_processes and --process_id need --distributed")
        return
    if TASK.value not in ("train", "evaluate"):
        raise UserError(f"--distributed goes with --task=train or evaluate, not with {TASK.value}")
    from exvae.scale import processes, sharding

    processes.join(COORDINATOR.value, NUM_PROCESSES.value, PROCESS_ID.value)
    if not sharding.is_main():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # also hides the output of libraries


def imported(name: str) -> Callable[..., None]:
    """Import the function with this dotted name."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def perform(task: str, config: ConfigDict, workdir: Path, out: str) -> None:
    """Run one task."""
    if out and task not in TASKS_WITH_OUT:
        raise UserError(f"--out goes with --task={', '.join(TASKS_WITH_OUT)}, not with {task}")
    imported("exvae.runs.compiled.keep")(config)
    if config.model.architecture == configs.PARZEN:
        if task not in ("train", "evaluate"):
            raise UserError(f"--task={task}: a Parzen window on pixels can only be evaluated")
        imported("exvae.evaluation.pixels.main")(config, workdir)
        return
    if task == "train":
        imported("exvae.training.loop.main")(config, workdir)
        return
    from exvae.runs import outputs
    from exvae.runs.trained import open_run

    if task in TASKS:
        imported(TASKS[task])(open_run(config, workdir))
    else:
        outputs.check(out, folder=task != "represent")
        imported(TASKS_WITH_OUT[task])(open_run(config, workdir), out)


def is_sweep() -> bool:
    """Return whether the command line has --sweep."""
    if not flags.FLAGS["sweep"].present and any(flags.FLAGS[f"sweep_{name}"].present for name in SWEEP_OPTIONS):
        raise UserError(f"--sweep_{', --sweep_'.join(SWEEP_OPTIONS)} need --sweep")
    return bool(flags.FLAGS["sweep"].present)


def run_sweep(argv: list[str]) -> None:
    """With --sweep, train every point of a grid, each in its own process."""
    if TASK.value != "train":
        raise UserError(f"--sweep goes with --task=train, not with {TASK.value}")
    if DISTRIBUTED.value or OUT.value:
        raise UserError("--sweep cannot be combined with --distributed or --out")
    from exvae.sweeps import sweep

    workdir = Path(WORKDIR.value or f"{default_workdir()}-sweep")
    workers, executor, slurm = SWEEP_WORKERS.value, SWEEP_EXECUTOR.value, SWEEP_SLURM.value
    sweep.main(CONFIG.value, workdir, argv, SWEEP.value, workers=workers, executor=executor, slurm=slurm)


def main(argv: list[str]) -> int:
    """Run the command and return its exit code: 2 for a mistake of the user, 1 for any other failure."""
    try:
        try:
            parse(argv)
        except SystemExit:  # after --help
            return 0
        if is_sweep():
            run_sweep(argv)
            return 0
        join_processes()
        perform(TASK.value, CONFIG.value, Path(WORKDIR.value or default_workdir()), OUT.value)
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (Diverged, FloatingPointError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except RuntimeError as error:  # a JaxRuntimeError is one
        reason = str(error).partition("\n")[0]
        if "RESOURCE_EXHAUSTED" not in reason:
            raise
        smaller = "config.train.batch_size, retrieval.num_neighbours, model.channels or data.image_size"
        print(f"error: out of memory; a smaller {smaller} needs less ({reason})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    huge_pages.use()
    try:
        code = main(sys.argv)
    except BaseException:
        traceback.print_exc()
        code = 1
    # Exit at once. A normal exit would print tracebacks of background writers if the disk is full. With several
    # processes, a failed one would wait for the others.
    if code == 1 or (code and "jax" in sys.modules and sys.modules["jax"].distributed.is_initialized()):
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
