"""Nearest neighbours from a ScaNN index on the host."""

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

BRUTE_FORCE_BELOW = 10_000  # a tree over fewer rows saves nothing
LEAVES_SEARCHED = 25  # at the least; with sqrt(N) leaves about 97 % of the 40 nearest lie in them at N = 50,000 to 10^6
CODES_FROM = 500_000  # rows from which 4-bit codes save more time than they cost (40 dimensions)
REORDERED = 5  # rows scored again exactly for each candidate
TRAINING_ROWS = 100_000  # rows that k-means sees at most; all rows are then assigned to its centres
SET_MIN_LOG_LEVEL = "_ZN4absl12lts_2025012714SetMinLogLevelENS0_18LogSeverityAtLeastE"  # of the absl in scann 1.4.2
WARNING = 1  # absl's number


def require() -> None:
    """Say clearly that ScaNN is missing before any work is done."""
    try:
        import scann  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"config.retrieval.search='scann' needs the package scann, which has wheels for Linux only ({error}): "
            "pip install -r requirements.txt there, or use --config.retrieval.search=exact"
        ) from error


def num_candidates(k: int, num_exemplars: int, num_train: int) -> int:
    """How many neighbours to ask for so that K are left after removing the query and what was not drawn.

    Of C neighbours about C M / N are drawn; C is such that three standard deviations fewer are still K + 1 (or 11: with
    a small K the deviation is no measure, and a row that is left with none would have no prior at all).
    """
    p, wanted = num_exemplars / num_train, max(k, 10) + 1
    root = (3 * math.sqrt(1 - p) + math.sqrt(9 * (1 - p) + 4 * wanted)) / 2  # of C p - 3 sqrt(C p (1-p)) = wanted
    return min(num_train, math.ceil(root**2 / p))


class Shape(NamedTuple):
    """What an index is made of."""

    num_results: int  # C, candidates for each query
    leaves: int  # of the tree; 0: no tree, every row is scored
    searched: int  # leaves that a query looks into
    reorder: int  # rows scored again exactly after a first score from 4-bit codes; 0: no codes

    def describe(self) -> str:
        tree = f"{self.leaves} leaves, {self.searched} searched" if self.leaves else "no leaves, every row scored"
        return (
            f"{tree}, {f'{self.reorder} scored again' if self.reorder else 'no codes'}, {self.num_results} candidates"
        )

    def advice(self) -> str:
        return (
            f"more config.retrieval.leaves_searched (now {self.searched} of {self.leaves}) finds more"
            if self.leaves
            else "its codes lose them: a larger config.retrieval.reorder scores more rows exactly"
        )

    def build(self, table: Float[np.ndarray, "N D"]) -> ScannIndex:
        return ScannIndex(table, self)


def choose_shape(config: ConfigDict, num_train: int) -> Shape:
    """The index for N rows and K neighbours; fields of config.retrieval that are not 0 overrule the rule.

    sqrt(N) leaves, so that finding leaves and scoring rows grow alike; of them 25 are searched, or as many as hold
    three times the candidates: time grows with sqrt(N). From half a million rows on, rows are scored by 4-bit codes
    first, and five times as many as there are candidates are scored again exactly.
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
    """An index over a snapshot of the table of latent means."""

    def __init__(self, table: Float[np.ndarray, "N D"], shape: Shape):
        import scann  # slow to import, and absent where nobody asks for it

        _quiet(scann)
        self._table, self._num_results = table, shape.num_results
        builder = scann.scann_ops_pybind.builder(table, shape.num_results, "squared_l2").set_n_training_threads(1)
        if shape.leaves:
            # k-means++ and one thread: the same table always gives the same index, and a resumed run the same
            # neighbours. The default (random centres, all threads) does not, and would take the cores from training.
            builder = builder.tree(
                num_leaves=shape.leaves,
                num_leaves_to_search=shape.searched,
                training_sample_size=min(len(table), TRAINING_ROWS),
                random_init=False,
            )
        builder = builder.score_ah(2).reorder(shape.reorder) if shape.reorder else builder.score_brute_force()
        self._searcher = builder.build()

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


def _quiet(scann: ModuleType) -> None:
    """Leave of what its C++ core logs on standard error only warnings and errors, not two lines for every build.

    ScaNN has no setting for it and reads none from the environment. Where the call is missing, the lines appear.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(scann.scann_ops_pybind.scann_pybind.__file__)[SET_MIN_LOG_LEVEL](WARNING)
