"""The host's part of a training step: it prepares the images of the batch and, for some searches, the exemplars.

The host works one step ahead of the devices. The exception is an exact search with images on the host: it needs the
newest parameters and waits for the step before.
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

from exvae.algorithm import Batch, training_terms
from exvae.arrays import Array
from exvae.data.store import Store
from exvae.priors import PRIORS
from exvae.retrieval import NOBODY, slots, table
from exvae.retrieval.draw import draw_exemplars
from exvae.retrieval.index import INDEXES, Indices
from exvae.runs import progress
from exvae.scale import sharding
from exvae.state import TrainState, step_key


def uses_exemplars(config: ConfigDict) -> bool:
    """Return whether the prior is built from training images."""
    return PRIORS[config.prior.name].USES_EXEMPLARS


def uses_table(config: ConfigDict) -> bool:
    """Return whether training searches a table of latent means."""
    return uses_exemplars(config) and config.retrieval.search != "none"


def uses_index(config: ConfigDict) -> bool:
    """Return whether training searches an index on the host."""
    return uses_exemplars(config) and config.retrieval.search in INDEXES


class Feeder:
    """An object that prepares the Batch of each step, and owns the search index if there is one."""

    def __init__(self, config: ConfigDict, model: nn.Module, mesh: Mesh, store: Store, state: TrainState):
        """
        Args:
          state: the initial state, or the restored one.
        """
        self._config, self._mesh, self._store = config, mesh, store
        self._indices = self._start_indices(state) if uses_index(config) else None
        self._key = np.array(state.key)  # a new key would wait until the table is encoded, behind it in the queue
        self._rows = sharding.own_rows(mesh, config.train.batch_size)
        self._find = _make_find(config, model, mesh, len(store))

    def __call__(self, state: TrainState, number: int, index: Int[np.ndarray, " B"]) -> Batch:
        """Prepare the batch of step `number`. Only an exact search with images on the host uses `state`."""
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
        """Switch to the next index if it is due before step `number`, and start to build one of the current table."""
        if not self._indices or not number or number % self._config.retrieval.rebuild_steps:
            return state
        assert state.table is not None and state.indexed is not None, "an index needs a table"
        snapshot = jnp.copy(state.table)
        self._indices.swap(table.on_host(snapshot, len(self._store)))
        return state.replace(indexed=(state.indexed[1], snapshot))

    @property
    def metrics(self) -> dict[str, float]:
        """The recall of the index, if there is one, for the log."""
        return {"recall": self._indices.recall} if self._indices else {}

    def _choose(
        self, state: TrainState, batch: Batch, number: int, own: Int[np.ndarray, " b"]
    ) -> Int[np.ndarray, " u"] | None:
        """Choose the exemplar slots of this process. Return None if the compiled step finds them."""
        draw = draw_exemplars(self._key, number, len(self._store), self._config.prior.num_exemplars)
        chosen = slots.choose_on_host(self._config, draw, own, self._indices)
        if chosen is None and not self._store.on_host:
            return None
        if self._indices is not None:
            return chosen  # the search already used only this process's images
        if chosen is None:
            chosen = sharding.fetch(self._find(state, batch))
        pad = sharding.round_up(len(chosen), self._mesh) - len(chosen)
        chosen = np.pad(chosen, (0, pad), constant_values=NOBODY)
        return chosen[sharding.own_rows(self._mesh, len(chosen))]

    def _start_indices(self, state: TrainState) -> Indices:
        assert state.indexed is not None, "an index needs a table"
        options = self._config.retrieval
        shape = INDEXES[options.search].choose_shape(self._config, len(self._store))
        print(f"index: {shape.describe()}, rebuilt every {options.rebuild_steps} steps", flush=True)
        indices = Indices(shape, options.num_neighbours, options.min_recall)
        with progress.phase(f"encoding {len(self._store):,} images"):
            used, pending = (table.on_host(part, len(self._store)) for part in state.indexed)
        # Until the first swap both tables are equal to the initial one.
        is_first = int(state.step) <= options.rebuild_steps
        indices.start(used, None if is_first else pending)
        return indices


def _make_find(
    config: ConfigDict, model: nn.Module, mesh: Mesh, num_train: int
) -> Callable[[TrainState, Batch], Int[Array, " U"]]:
    """Compile the search of search = exact on its own. It finds the same slots as the training step would."""

    @jax.jit
    def find(state: TrainState, batch: Batch) -> Int[Array, " U"]:
        assert state.table is not None, "search = exact needs the table of latent means"
        draw = draw_exemplars(state.key, state.step, num_train, config.prior.num_exemplars)
        with sharding.context(mesh):
            terms, _ = training_terms(step_key(state), config, model, state.params, batch)
        queries = terms.q.mean[:: config.objective.samples]
        return slots.nearest(config, mesh, draw, batch.index, queries=queries, table=state.table)

    return find
