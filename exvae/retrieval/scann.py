"""Nearest neighbours from a ScaNN index on the host."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator

import numpy as np
from jaxtyping import Array, Float, Int

from exvae.errors import UserError
from exvae.retrieval import NOBODY

BRUTE_FORCE_BELOW = 10_000  # a tree over fewer rows saves nothing


def require() -> None:
    """Say clearly that ScaNN is missing before any work is done."""
    try:
        import scann  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"config.retrieval.search='scann' needs the package scann, which has wheels for Linux only ({error}); "
            "use --config.retrieval.search=exact"
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """ScaNN's C++ core reports every build on standard error, below Python's reach."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def num_candidates(k: int, num_exemplars: int, num_train: int) -> int:
    """How many neighbours to ask for so that K are left after removing the query and what was not drawn.

    Of C neighbours about C M / N are drawn; C is such that three standard deviations fewer are still K + 1 (or 11: with
    a small K the deviation is no measure, and a row that is left with none would have no prior at all).
    """
    p, wanted = num_exemplars / num_train, max(k, 10) + 1
    root = (3 * math.sqrt(1 - p) + math.sqrt(9 * (1 - p) + 4 * wanted)) / 2  # of C p - 3 sqrt(C p (1-p)) = wanted
    return min(num_train, math.ceil(root**2 / p))


class ScannIndex:
    """An index over a snapshot of the table of latent means."""

    def __init__(self, table: Float[np.ndarray, "N D"], num_results: int):
        import scann  # slow to import, and absent where nobody asks for it

        self._table, self._num_results = table, num_results
        builder = scann.scann_ops_pybind.builder(table, num_results, "squared_l2")
        if len(table) >= BRUTE_FORCE_BELOW:
            leaves = int(math.sqrt(len(table)))
            enough = math.ceil(3 * num_results * leaves / len(table))  # leaves that hold three times what is asked for
            # Every row, k-means++ and one thread: the same table always gives the same index, and a resumed run
            # the same neighbours. The default (a random sample, random centres, all threads) does not.
            builder = builder.tree(
                num_leaves=leaves,
                num_leaves_to_search=min(leaves, max(leaves // 10, enough)),
                training_sample_size=len(table),
                random_init=False,
            ).set_n_training_threads(1)
        with _quiet():
            self._searcher = builder.score_brute_force().build()

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Neighbours of rows `index`, nearest first, the row itself among them; NOBODY where too few were found.

        Differs from the paper: the query is the row as the index knows it, not the mean under the newest parameters.
        Both ends of a distance are so of the same age, and the host searches for the next step while the device
        computes this one. It changes which exemplars are retrieved, not that the objective is a bound.
        """
        found, distances = self._searcher.search_batched_parallel(self._table[index])
        # ScaNN marks what it did not find by a distance of NaN, and leaves out columns that are empty in every row.
        neighbours = np.full((len(index), self._num_results), NOBODY, np.int32)
        neighbours[:, : found.shape[1]] = np.where(np.isnan(distances), NOBODY, found.astype(np.int32))
        return neighbours


class Candidates:
    """The index of a run, rebuilt from the table every `rebuild_steps` steps."""

    def __init__(self, num_results: int, rebuild_steps: int):
        self._num_results, self._rebuild_steps = num_results, rebuild_steps
        self._index: ScannIndex | None = None

    def due(self, step: int) -> bool:
        """Whether step number `step` begins with a new index."""
        return step % self._rebuild_steps == 0

    def find(self, step: int, indexed: Float[Array, "N D"], index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Candidates for a batch; `indexed` is the table as of the last step at which a new index was due."""
        if self._index is None or self.due(step):
            self._index = ScannIndex(np.array(indexed), self._num_results)
        return self._index.search(index)
