"""Checkpoints of a run: the latest state, for resuming, and the best parameters. Only this module uses orbax.

`exvae/state.py` defines the state, and `_meta` in `exvae/training/loop.py` the metadata.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from exvae.errors import UserError
from exvae.scale import sharding

SLACK_BYTES = 2**20  # space for the other files of a run
# A process may be paused for a long time while it writes (SIGSTOP). By default, orbax fails after 20 minutes. If
# there are several processes, they keep this default, because they wait for each other.
PAUSE_SECONDS = 24 * 3600

Meta = dict[str, Any]  # metadata, saved as JSON beside the arrays


class Checkpoints:
    """The folders `checkpoints/latest` and `checkpoints/best` of a run.

    Orbax writes into a temporary folder in a background thread, and renames the folder when it is complete. A kill at
    any time leaves the previous checkpoint intact.
    """

    def __init__(self, workdir: Path):
        # Otherwise these loggers report every file that orbax writes or fails to write.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        folder = (workdir / "checkpoints").absolute()
        # Keep two of each: if the newer one is damaged, the older one is used.
        self._latest = _manager(folder / "latest", keep=2)
        self._best = _manager(folder / "best", keep=2)

    def save_latest(self, step: int, state: PyTree, meta: Meta) -> None:
        """Start to save the state of a step, and return before the files are written."""
        with _plain_errors():
            self._best.wait_until_finished()  # the state refers to the best epoch, so its parameters must exist
        _save(self._latest, step, state, meta)

    def save_best(self, step: int, params: PyTree, meta: Meta) -> None:
        """Start to save the best parameters, and return before the files are written."""
        _save(self._best, step, params, meta)

    def restore_latest(self, like: Callable[[Meta], PyTree]) -> tuple[PyTree, Meta] | None:
        """Return the newest readable state and its metadata, or None if there is no checkpoint.

        Args:
          like: returns a tree with the shapes and shardings to restore, given the metadata of the checkpoint.
        """
        restored = _restore(self._latest, like)
        return restored and restored[1:]

    def restore_best(self, like: PyTree) -> tuple[int, PyTree, Meta] | None:
        """Return the step, parameters and metadata of the newest readable best checkpoint, or None if there is none."""
        return _restore(self._best, lambda meta: like)

    def wait(self) -> None:
        """Wait until all saved checkpoints are on the disk."""
        with _plain_errors():
            self._latest.wait_until_finished()
            self._best.wait_until_finished()

    def close(self) -> None:
        """Stop the background threads."""
        with contextlib.suppress(Exception):  # `wait` or the next save has already reported a failed write
            self._latest.close()
            self._best.close()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn anything that orbax's background threads raise, for this save or the previous one, into one OSError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        reason = "No space left on device" if "No space left" in reason else reason[:300]
        raise OSError(f"a checkpoint could not be written ({reason}); earlier checkpoints are intact") from error


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(timeout_secs=PAUSE_SECONDS) if jax.process_count() == 1 else None,
    )
    return ocp.CheckpointManager(folder, options=options)


def _save(manager: ocp.CheckpointManager, step: int, tree: PyTree, meta: Meta) -> None:
    if step in manager.all_steps():  # saved before a kill, with the same values
        return
    _check_space(manager, tree)
    # Save a copy: the next training step overwrites the buffers while orbax is still writing.
    tree = _copy(tree)
    args = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(meta))
    with _plain_errors():
        if not manager.save(step, args=args):
            raise ValueError(f"{manager.directory} holds a later step than {step}: does it belong to another run?")


@jax.jit  # one compilation instead of one per shape
def _copy(tree: PyTree) -> PyTree:
    return jax.tree.map(jnp.copy, tree)


def _check_space(manager: ocp.CheckpointManager, tree: PyTree) -> None:
    """Check the free space first: on a full disk, the threads of orbax print a hundred tracebacks."""
    needed = SLACK_BYTES + 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(manager.directory).free
    if free < needed:
        left, need = free / 2**20, needed / 2**20
        raise OSError(f"disk full: {left:.1f} MiB left, a checkpoint needs {need:.1f}; earlier checkpoints are intact")


def _set_aside(manager: ocp.CheckpointManager, step: int) -> Path:
    """Rename the folder of a damaged checkpoint, so its step can be saved again and nothing is deleted."""
    folder = Path(manager.directory)
    aside = folder.parent / f"damaged-{folder.name}-{step}-{time.time_ns()}"
    if sharding.is_main():
        (folder / str(step)).rename(aside)
    sharding.anywhere(False)  # the other processes wait for the rename
    manager.reload()
    return aside


def _restore_tree(manager: ocp.CheckpointManager, step: int, like: PyTree) -> PyTree:
    """Read the arrays of a checkpoint. Fields of the dataclass `like` that are None may be missing in an old one."""
    asked, absent = like, dict[str, None]()
    if dataclasses.is_dataclass(like):
        with ocp.StandardCheckpointer() as reader:
            there = reader.metadata(Path(manager.directory) / str(step) / "state").item_metadata
        fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
        absent = {name: None for name, value in fields.items() if value is None and name not in there}
        if absent:  # orbax treats a field that is None as part of the tree
            asked = {name: value for name, value in fields.items() if name not in absent}
    found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(asked)))["state"]
    return type(like)(**found, **absent) if absent else found


def _restore(manager: ocp.CheckpointManager, like: Callable[[Meta], PyTree]) -> tuple[int, PyTree, Meta] | None:
    steps = sorted(manager.all_steps(), reverse=True)
    damaged: dict[int, str] = {}
    for step in steps:
        error = None
        try:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            state = _restore_tree(manager, step, jax.tree.map(ocp.utils.to_shape_dtype_struct, like(meta)))
        except Exception as raised:  # orbax raises many kinds of errors for a damaged folder
            error = raised
        if sharding.anywhere(error is not None):  # perhaps only the part of another process is damaged
            damaged[step] = " ".join(str(error).split())[:200]
            continue
        for bad in damaged:  # only now: if no checkpoint can be read, there may be another cause, so nothing is moved
            aside = _set_aside(manager, bad)
            print(f"warning: the checkpoint of step {bad} is damaged (moved to {aside}); using step {step} instead")
        return step, state, meta
    if damaged:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(f"no readable checkpoint in {manager.directory} ({reasons})")
    return None
