"""Nearest neighbour search with a ScaNN index on the host."""

from __future__ import annotations

import contextlib
import ctypes
import math
from types import ModuleType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.errors import UserError
from exvae.retrieval import NOBODY
from exvae.retrieval.slots import num_candidates

BRUTE_FORCE_BELOW = 10_000  # with fewer rows a tree saves no time
LEAVES_SEARCHED = 25  # or more. Of sqrt(N) leaves, 25 hold 97 % of the 40 nearest for N = 50,000 to 10^6
CODES_FROM = 500_000  # with at least so many rows, 4-bit codes save time (40 dimensions)
REORDERED = 5  # rows scored again exactly, as a multiple of the candidates
TRAINING_ROWS = 100_000  # largest number of rows that k-means is trained on
SET_MIN_LOG_LEVEL = "_ZN4absl12lts_2025012714SetMinLogLevelENS0_18LogSeverityAtLeastE"  # symbol in scann 1.4.2
WARNING = 1  # absl's number of this level


def require() -> None:
    """Raise a UserError if ScaNN is not installed."""
    try:
        import scann  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"config.retrieval.search='scann' needs the package scann, which has wheels for Linux only ({error}): "
            "pip install -r requirements.txt there, or use --config.retrieval.search=exact"
        ) from error


class Shape(NamedTuple):
    """The settings of an index."""

    num_results: int  # C, candidates for each query
    leaves: int  # leaves of the tree; 0: no tree, every row is scored
    searched: int  # leaves that a query searches
    reorder: int  # rows scored again exactly after a first score with 4-bit codes; 0: no codes

    def describe(self) -> str:
        """Describe the settings in a few words, for the log."""
        tree = f"{self.leaves} leaves, {self.searched} searched" if self.leaves else "no leaves, every row scored"
        return (
            f"{tree}, {f'{self.reorder} scored again' if self.reorder else 'no codes'}, {self.num_results} candidates"
        )

    def advice(self) -> str:
        """Advise what to change in the config if the index finds too few neighbours."""
        return (
            f"a larger config.retrieval.leaves_searched (now {self.searched} of {self.leaves}) finds more"
            if self.leaves
            else "a larger config.retrieval.reorder scores more rows exactly"
        )

    def build(self, table: Float[np.ndarray, "N D"]) -> ScannIndex:
        """Build the index of a table."""
        return ScannIndex(table, self)


def choose_shape(config: ConfigDict, num_train: int) -> Shape:
    """Choose the settings of the index for N rows and K neighbours. Nonzero fields of config.retrieval take precedence.

    The tree has sqrt(N) leaves, which balances the cost of finding leaves and of scoring rows. A query searches 25
    leaves, or as many as hold three times the candidates. The time of a query grows with sqrt(N). From 500,000 rows on,
    rows are scored with 4-bit codes first, and the best (five times the number of candidates) are scored again exactly.
    """
    options = config.retrieval
    num_results = num_candidates(options.num_neighbours, config.prior.num_exemplars, num_train)
    if num_train < BRUTE_FORCE_BELOW and not options.leaves:
        return Shape(num_results, 0, 0, 0)
    leaves = min(options.leaves or math.isqrt(num_train), num_train)
    enough = math.ceil(3 * num_results * leaves / num_train)
    searched = min(leaves, options.leaves_searched or max(LEAVES_SEARCHED, enough))
    reorder = options.reorder or (REORDERED * num_results if num_train >= CODES_FROM else 0)
    return Shape(num_results, leaves, searched, 0 if reorder <= 0 else max(reorder, num_results))


class ScannIndex:
    """An index of a snapshot of the table of latent means."""

    def __init__(self, table: Float[np.ndarray, "N D"], shape: Shape):
        import scann  # imported here: it is slow to import and need not be installed for other searches

        _quiet(scann)
        self._table, self._num_results = table, shape.num_results
        builder = scann.scann_ops_pybind.builder(table, shape.num_results, "squared_l2").set_n_training_threads(1)
        if shape.leaves:
            # k-means++ and one thread make the build deterministic, so a resumed run finds the same neighbours. The
            # default (random centres, all threads) is not deterministic and would slow down training.
            builder = builder.tree(
                num_leaves=shape.leaves,
                num_leaves_to_search=shape.searched,
                training_sample_size=min(len(table), TRAINING_ROWS),
                random_init=False,
            )
        builder = builder.score_ah(2).reorder(shape.reorder) if shape.reorder else builder.score_brute_force()
        self._searcher = builder.build()

    def search(self, index: Int[np.ndarray, " B"]) -> Int[np.ndarray, "B C"]:
        """Find neighbours of rows `index`, nearest first, including the row itself; NOBODY if too few are found.

        Differs from the paper: the query is the row of the indexed table, not the mean under the newest parameters.
        Query and neighbours are then equally old, and the host can search for the next step while the device computes
        this one. This changes which exemplars are retrieved. The objective is still a lower bound.
        """
        found, distances = self._searcher.search_batched_parallel(self._table[index])
        # ScaNN marks missing results with a distance of NaN. It omits columns that are empty in all rows.
        neighbours = np.full((len(index), self._num_results), NOBODY, np.int32)
        neighbours[:, : found.shape[1]] = np.where(np.isnan(distances), NOBODY, found.astype(np.int32))
        return neighbours


def _quiet(scann: ModuleType) -> None:
    """Hide the two lines that ScaNN's C++ code logs to standard error in each build. Warnings and errors remain.

    ScaNN has no setting for this. In versions without the symbol, the lines appear.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(scann.scann_ops_pybind.scann_pybind.__file__)[SET_MIN_LOG_LEVEL](WARNING)
