"""The host's part of a training step: the images of the batch, and the exemplars as far as the host chooses them.

The host works one step ahead of the devices. Only an exact search over images that stay on the host has to wait for the
step before, because it needs the newest parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Int
from ml_collections import ConfigDict

from exvae import keys
from exvae.algorithm import Batch, training_terms
from exvae.arrays import Array
from exvae.data.store import Store
from exvae.priors import PRIORS
from exvae.retrieval import NOBODY, slots, table
from exvae.retrieval.draw import draw_exemplars
from exvae.retrieval.index import INDEXES, Indices
from exvae.scale import sharding
from exvae.state import TrainState, step_key


def uses_exemplars(config: ConfigDict) -> bool:
    return PRIORS[config.prior.name].USES_EXEMPLARS


def uses_table(config: ConfigDict) -> bool:
    return uses_exemplars(config) and config.retrieval.search != "none"


def uses_index(config: ConfigDict) -> bool:
    return uses_exemplars(config) and config.retrieval.search in INDEXES


class Feeder:
    """Makes the Batch of every step, and keeps the index that it looks into."""

    def __init__(self, config: ConfigDict, model: nn.Module, mesh: Mesh, store: Store, state: TrainState):
        """
        Args:
          state: the one that training starts from or goes on from.
        """
        self._config, self._mesh, self._store = config, mesh, store
        self._indices = self._start_indices(state) if uses_index(config) else None
        self._key = np.asarray(jax.random.key_data(keys.split_seed(config.seed)[2]))
        self._rows = sharding.own_rows(mesh, config.train.batch_size)
        self._find = _make_find(config, model, mesh, len(store))

    def __call__(self, state: TrainState, number: int, index: Int[np.ndarray, " B"]) -> Batch:
        """The batch of step `number`. Only an exact search over images on the host looks at `state`."""
        own = index[self._rows]
        batch = Batch(sharding.join_rows(self._mesh, own, len(index)), store=self._store.whole)
        if self._store.on_host:
            batch = batch.replace(images=self._store.take(own))
        if not uses_exemplars(self._config):
            return batch
        chosen = self._choose(state, batch, number, own)
        if chosen is None:
            return batch
        batch = batch.replace(chosen=sharding.join_rows(self._mesh, chosen, len(chosen) * jax.process_count()))
        return batch.replace(chosen_images=self._store.take(chosen)) if self._store.on_host else batch

    def swap_index(self, state: TrainState, number: int) -> TrainState:
        """Before step `number`, if it is due: put the next index to use, and begin one of the table as it is now."""
        if not self._indices or not number or number % self._config.retrieval.rebuild_steps:
            return state
        assert state.table is not None and state.indexed is not None  # an index has them
        snapshot = jnp.copy(state.table)
        self._indices.swap(table.on_host(snapshot, len(self._store)))
        return state.replace(indexed=(state.indexed[1], snapshot))

    @property
    def figures(self) -> dict[str, float]:
        """For the log: the fraction of the nearest exemplars that the index finds."""
        return {"recall": self._indices.recall} if self._indices else {}

    def _choose(
        self, state: TrainState, batch: Batch, number: int, own: Int[np.ndarray, " b"]
    ) -> Int[np.ndarray, " u"] | None:
        """This process's exemplar slots; None: the step finds them."""
        draw = draw_exemplars(self._key, number, len(self._store), self._config.prior.num_exemplars)
        chosen = slots.choose_on_host(self._config, draw, own, self._indices)
        if chosen is None and not self._store.on_host:
            return None
        if self._indices is not None:
            return chosen  # of this process's own images
        if chosen is None:
            chosen = sharding.fetch(self._find(state, batch))
        pad = sharding.round_up(len(chosen), self._mesh) - len(chosen)
        chosen = np.pad(chosen, (0, pad), constant_values=NOBODY)
        return chosen[sharding.own_rows(self._mesh, len(chosen))]

    def _start_indices(self, state: TrainState) -> Indices:
        options = self._config.retrieval
        shape = INDEXES[options.search].choose_shape(self._config, len(self._store))
        print(f"index of {shape.describe()}, rebuilt every {options.rebuild_steps} steps", flush=True)
        indices = Indices(shape, options.num_neighbours, options.min_recall)
        assert state.indexed is not None  # filled before the first step
        used, pending = (table.on_host(part, len(self._store)) for part in state.indexed)
        # Up to the first swap, both tables are the one that was filled before the first step.
        is_first = int(state.step) <= options.rebuild_steps
        indices.start(used, None if is_first else pending)
        return indices


def _make_find(
    config: ConfigDict, model: nn.Module, mesh: Mesh, num_train: int
) -> Callable[[TrainState, Batch], Int[Array, " U"]]:
    """The compiled search of search = exact by itself: it finds the slots that the step itself would find."""

    @jax.jit
    def find(state: TrainState, batch: Batch) -> Int[Array, " U"]:
        assert state.table is not None  # this search has one
        draw = draw_exemplars(state.key, state.step, num_train, config.prior.num_exemplars)
        terms, _ = training_terms(step_key(state), config, model, state.params, batch)
        queries = terms.q.mean[:: config.objective.samples]
        return slots.nearest(config, mesh, draw, batch.index, queries=queries, table=state.table)

    return find
