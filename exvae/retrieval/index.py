"""An index of the table of means on the host, rebuilt in the background while training goes on.

The index itself is a library's: a new one is a file with `require` and `choose_shape`, and a line in `INDEXES`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.retrieval import NOBODY, scann

Table = Float[np.ndarray, "N D"]
NICE = 10  # lowers the priority of the thread that builds an index
RECALL_QUERIES = 50
RECALL_ROWS = 100_000  # rows that the exact search for the recall scores at a time


class Index(Protocol):
    """An index over a snapshot of the table."""

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Neighbours of these rows, nearest first, the row itself among them; NOBODY where too few were found."""
        ...


class Shape(Protocol):
    """What an index is made of, chosen once for a run."""

    def build(self, table: Table) -> Index:
        """The index of a table. The same table must always give the same index, or a resumed run would differ."""
        ...

    def describe(self) -> str: ...

    def advice(self) -> str:
        """What to change in the config where the index finds too few neighbours."""
        ...


class Library(Protocol):
    """A library of nearest neighbour search."""

    def require(self) -> None:
        """Raise a UserError if it is not installed."""
        ...

    def choose_shape(self, config: ConfigDict, num_train: int) -> Shape: ...


INDEXES: dict[str, Library] = {"scann": scann}  # by config.retrieval.search


class Indices:
    """The index in use, and the next one, which is built in the background.

    Every `rebuild_steps` steps the next index is put to use, and another one of the table as it is then is begun: an
    index is between one and two such periods old. The swap has its fixed step, however long the build takes, so that a
    run does not depend on the speed of the machine. If the build is not done by then, training waits and says so.
    """

    def __init__(self, shape: Shape, num_neighbours: int, min_recall: float):
        self._shape, self._num_neighbours, self._min_recall = shape, num_neighbours, min_recall

    def start(self, indexed: Table, pending: Table | None) -> None:
        """From the two tables of a state; None: both are the same."""
        self._used = in_background(self._build, indexed)
        self._next = self._used if pending is None else in_background(self._build, pending)

    def swap(self, table: Table) -> None:
        """Use the next index, and begin another one."""
        began = time.monotonic()
        self._used = self._next
        self._used.result()
        if (waited := time.monotonic() - began) > 1.0:
            print(f"waited {waited:.0f} s for the index: a larger config.retrieval.rebuild_steps leaves it more time")
        self._next = in_background(self._build, table)

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        return self._used.result()[0].search(index)

    @property
    def recall(self) -> float:
        """Of the index in use, against an exact search of the same table."""
        return self._used.result()[1]

    def _build(self, table: Table) -> tuple[Index, float]:
        index = self._shape.build(table)
        found = recall(index, table, self._num_neighbours)
        if found < self._min_recall:
            print(
                f"warning: the index finds {100 * found:.0f} % of the {self._num_neighbours} nearest exemplars, less "
                f"than config.retrieval.min_recall={self._min_recall}; {self._shape.advice()}"
            )
        return index, found


def recall(index: Index, table: Table, k: int) -> float:
    """The fraction of the k nearest rows (without the row itself) that an index finds, over rows drawn at random."""
    rows = np.random.default_rng(0).integers(len(table), size=RECALL_QUERIES)
    found = index.search(rows)
    k = min(k, len(table) - 1, found.shape[1] - 1)
    if k < 1:
        return 1.0
    found = np.where(found == rows[:, None], NOBODY, found)
    first = np.argsort(found == NOBODY, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(found, first, axis=1)
    squares = np.sum(np.square(table[found] - table[rows][:, None]), axis=-1)
    # By distance and not by number: rows that are equally far can stand in for each other.
    reached = squares <= _kth_square(table, rows, k)[:, None] * (1 + 1e-4)
    return float(np.mean(reached & (found != NOBODY)))


def _kth_square(table: Table, rows: Int[np.ndarray, " Q"], k: int) -> Float[np.ndarray, " Q"]:
    """Squared distance of the k-th nearest other row, in blocks of rows."""
    queries, nearest = table[rows], np.full((len(rows), k), np.inf, np.float32)
    norms = np.sum(np.square(queries), axis=1)[:, None]
    for start in range(0, len(table), RECALL_ROWS):
        block = table[start : start + RECALL_ROWS]
        squares = norms - 2.0 * queries @ block.T + np.sum(np.square(block), axis=1)
        inside = (rows >= start) & (rows < start + len(block))
        squares[np.flatnonzero(inside), rows[inside] - start] = np.inf
        nearest = np.partition(np.concatenate([nearest, squares], axis=1), k - 1, axis=1)[:, :k]
    return np.max(nearest, axis=1)


def in_background(function: Callable, *args: Any) -> Future:
    """In a thread of low priority. The program does not wait for it when it ends."""
    future: Future = Future()

    def work() -> None:
        with contextlib.suppress(AttributeError, OSError):  # only Linux has priorities of threads
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            future.set_result(function(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
