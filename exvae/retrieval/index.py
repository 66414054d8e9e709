"""A search index of the table of means on the host, rebuilt in the background during training.

A library such as ScaNN does the search. To add one, write a module that implements `Library` and add it to `INDEXES`.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, Protocol, TypeVar, runtime_checkable

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.retrieval import NOBODY, scann

P = ParamSpec("P")
T = TypeVar("T")
Table = Float[np.ndarray, "N D"]
NICE = 10  # niceness of the thread that builds an index
RECALL_QUERIES = 50  # rows whose neighbours are compared to measure the recall
RECALL_ROWS = 100_000  # rows that the exact search scores at a time to measure the recall


@runtime_checkable
class Index(Protocol):
    """An index of a snapshot of the table."""

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Find neighbours of these rows, nearest first, including the row itself; NOBODY if too few are found."""
        ...


@runtime_checkable
class Shape(Protocol):
    """The settings of an index, chosen once for a run."""

    def build(self, table: Table) -> Index:
        """Build the index of a table. Equal tables must give equal indices, otherwise a resumed run would differ."""
        ...

    def describe(self) -> str:
        """Describe the settings in a few words, for the log."""
        ...

    def advice(self) -> str:
        """Advise what to change in the config if the index finds too few neighbours."""
        ...


@runtime_checkable
class Library(Protocol):
    """A library for nearest neighbour search."""

    def require(self) -> None:
        """Raise a UserError if it is not installed."""
        ...

    def choose_shape(self, config: ConfigDict, num_train: int) -> Shape:
        """Choose the settings of the index for a config and the number of exemplars."""
        ...


INDEXES: dict[str, Library] = {"scann": scann}  # by config.retrieval.search


class Indices:
    """The current index, and the next one, which is built in the background.

    Every `rebuild_steps` steps the next index becomes the current one, and a new build starts from the current table.
    The table of the index in use is therefore one to two such periods old. The swap happens at a fixed step, so the
    result does not depend on the speed of the machine. If the build has not finished by then, training waits for it.

    Differs from the paper: the index holds a copy of the table. In the paper every search sees the newest table.
    """

    def __init__(self, shape: Shape, num_neighbours: int, min_recall: float):
        self._shape, self._num_neighbours, self._min_recall = shape, num_neighbours, min_recall

    def start(self, indexed: Table, pending: Table | None) -> None:
        """Build both indices from the two tables of a state. `pending` is None if the tables are equal."""
        self._used = in_background(self._build, indexed)
        self._next = self._used if pending is None else in_background(self._build, pending)

    def swap(self, table: Table) -> None:
        """Switch to the next index, and start to build another one from `table`."""
        began = time.monotonic()
        self._used = self._next
        self._used.result()
        if (waited := time.monotonic() - began) > 1.0:
            print(f"waited {waited:.0f} s for the index: a larger config.retrieval.rebuild_steps gives it more time")
        self._next = in_background(self._build, table)

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Find neighbours of these rows in the current index."""
        return self._used.result()[0].search(index)

    @property
    def recall(self) -> float:
        """Recall of the current index, relative to an exact search of the same table."""
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
    """Return the fraction of the k nearest other rows that an index finds, averaged over random rows."""
    rows = np.random.default_rng(0).integers(len(table), size=RECALL_QUERIES)
    found = index.search(rows)
    k = min(k, len(table) - 1, found.shape[1] - 1)
    if k < 1:
        return 1.0
    found = np.where(found == rows[:, None], NOBODY, found)
    first = np.argsort(found == NOBODY, axis=1, kind="stable")[:, :k]
    found = np.take_along_axis(found, first, axis=1)
    squares = np.sum(np.square(table[found] - table[rows][:, None]), axis=-1)
    # Compare distances instead of row numbers: rows at equal distance are equally good.
    reached = squares <= _kth_square(table, rows, k)[:, None] * (1 + 1e-4)
    return float(np.mean(reached & (found != NOBODY)))


def _kth_square(table: Table, rows: Int[np.ndarray, " Q"], k: int) -> Float[np.ndarray, " Q"]:
    """Return the squared distance to the k-th nearest other row."""
    queries, nearest = table[rows], np.full((len(rows), k), np.inf, np.float32)
    norms = np.sum(np.square(queries), axis=1)[:, None]
    for start in range(0, len(table), RECALL_ROWS):
        block = table[start : start + RECALL_ROWS]
        squares = norms - 2.0 * queries @ block.T + np.sum(np.square(block), axis=1)
        inside = (rows >= start) & (rows < start + len(block))
        squares[np.flatnonzero(inside), rows[inside] - start] = np.inf
        nearest = np.partition(np.concatenate([nearest, squares], axis=1), k - 1, axis=1)[:, :k]
    return np.max(nearest, axis=1)


def in_background(function: Callable[P, T], *args: P.args, **options: P.kwargs) -> Future[T]:
    """Call a function in a thread of low priority. The program does not wait for the thread when it exits."""
    future: Future[T] = Future()

    def work() -> None:
        with contextlib.suppress(AttributeError, OSError):  # only Linux has thread priorities
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future
