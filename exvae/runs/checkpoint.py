"""Checkpoints of a run: the latest state, to go on from, and the best parameters. The only module that knows orbax."""

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

from exvae.scale import sharding
from exvae.errors import UserError

SLACK_BYTES = 2**20  # for the other files of a run
# A process may be stopped for long while it writes (SIGSTOP), which orbax takes for a failure after 20 minutes. Where
# several wait for each other it stays so.
PAUSE_SECONDS = 24 * 3600


class Checkpoints:
    """`checkpoints/latest` and `checkpoints/best` of a run's folder.

    Orbax writes in a background thread into a temporary folder and renames it when it is whole: a kill at any moment
    leaves the previous checkpoint as it was.
    """

    def __init__(self, workdir: Path):
        # Orbax tells of every file that it writes, and its threads of every one that they cannot.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
        folder = (workdir / "checkpoints").absolute()
        # Two of each: should the newer one turn out to be damaged, the older one is still there.
        self._latest = _manager(folder / "latest", keep=2)
        self._best = _manager(folder / "best", keep=2)

    def save_latest(self, step: int, state: Any, meta: dict) -> None:
        with _plain_errors():
            self._best.wait_until_finished()  # the state knows which epoch was best: those parameters must be there
        _save(self._latest, step, state, meta)

    def save_best(self, step: int, params: Any, meta: dict) -> None:
        _save(self._best, step, params, meta)

    def restore_latest(self, like: Callable[[dict], Any]) -> tuple[Any, dict] | None:
        """The newest readable state, shaped and placed as `like(meta)`, and its meta; None in a fresh folder."""
        restored = _restore(self._latest, like)
        return restored and restored[1:]

    def restore_best(self, like: Any) -> tuple[int, Any, dict] | None:
        """The newest readable parameters, with their step and meta; None if there are none."""
        return _restore(self._best, lambda meta: like)

    def wait(self) -> None:
        """Until everything that was saved is on the disk."""
        with _plain_errors():
            self._latest.wait_until_finished()
            self._best.wait_until_finished()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # what could not be written was said by `wait` or the next save
            self._latest.close()
            self._best.close()


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """What orbax's background threads raise, from this save or the one before it, as one OSError."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        reason = "No space left on device" if "No space left" in reason else reason[:300]
        raise OSError(f"a checkpoint could not be written ({reason}); the ones before it are whole") from error


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=True,
        enable_async_checkpointing=True,
        async_options=ocp.AsyncOptions(timeout_secs=PAUSE_SECONDS) if jax.process_count() == 1 else None,
    )
    return ocp.CheckpointManager(folder, options=options)


def _save(manager: ocp.CheckpointManager, step: int, tree: Any, meta: dict) -> None:
    if step in manager.all_steps():  # written before a kill, and the same bits
        return
    _check_space(manager, tree)
    # The training step donates its buffers while orbax still writes: hand orbax a copy of its own.
    tree = jax.tree.map(jnp.copy, tree)
    args = ocp.args.Composite(state=ocp.args.StandardSave(tree), meta=ocp.args.JsonSave(meta))
    with _plain_errors():
        if not manager.save(step, args=args):
            raise ValueError(f"{manager.directory} holds a later step than {step}: is it another run's?")


def _check_space(manager: ocp.CheckpointManager, tree: Any) -> None:
    """Refuse before orbax begins: its threads meet a full disk with a hundred tracebacks."""
    needed = SLACK_BYTES + 2 * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    free = shutil.disk_usage(manager.directory).free
    if free < needed:
        left, need = free / 2**20, needed / 2**20
        raise OSError(f"disk full: {left:.1f} MiB left and a checkpoint takes {need:.1f}; the ones before it are whole")


def _set_aside(manager: ocp.CheckpointManager, step: int) -> Path:
    """Move a damaged checkpoint out of the way, so that its step can be saved again and nothing is thrown away."""
    folder = Path(manager.directory)
    aside = folder.parent / f"damaged-{folder.name}-{step}-{time.time_ns()}"
    if sharding.is_main():
        (folder / str(step)).rename(aside)
    sharding.anywhere(False)  # the others wait for it
    manager.reload()
    return aside


def _restore_tree(manager: ocp.CheckpointManager, step: int, like: Any) -> Any:
    """The arrays of a checkpoint. It may be older than fields of the dataclass `like`, if they are None."""
    asked, absent = like, {}
    if dataclasses.is_dataclass(like):
        with ocp.StandardCheckpointer() as reader:
            there = reader.metadata(Path(manager.directory) / str(step) / "state").item_metadata
        fields = {field.name: getattr(like, field.name) for field in dataclasses.fields(like)}
        absent = {name: None for name, value in fields.items() if value is None and name not in there}
        if absent:  # to orbax a field that is None is a part of the tree
            asked = {name: value for name, value in fields.items() if name not in absent}
    found = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(asked)))["state"]
    return type(like)(**found, **absent) if absent else found


def _restore(manager: ocp.CheckpointManager, like: Callable[[dict], Any]) -> tuple[int, Any, dict] | None:
    steps = sorted(manager.all_steps(), reverse=True)
    damaged = {}
    for step in steps:
        error = None
        try:
            meta = manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
            state = _restore_tree(manager, step, jax.tree.map(ocp.utils.to_shape_dtype_struct, like(meta)))
        except Exception as raised:  # orbax raises many kinds for a damaged folder
            error = raised
        if sharding.anywhere(error is not None):  # the part of another process may be the damaged one
            damaged[step] = " ".join(str(error).split())[:200]
            continue
        for bad in damaged:  # only now: where none can be read the fault may lie elsewhere, and nothing is moved
            aside = _set_aside(manager, bad)
            print(f"warning: the checkpoint of step {bad} is damaged (moved to {aside}); going back to step {step}")
        return step, state, meta
    if damaged:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
        raise UserError(f"no readable checkpoint in {manager.directory} ({reasons})")
    return None
