"""The host's part of a training step: which images it is about, and, where they are on the host, their bytes.

The host is a step ahead: the devices compute one step while it prepares the next. Only an exact search for images that
are on the host has to wait, because a step's neighbours follow from its parameters.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from exvae import objectives
from exvae.data.store import Store
from exvae.priors import PRIORS, exemplar
from exvae.priors.types import Batch
from exvae.retrieval import NOBODY, scann, select
from exvae.retrieval.draw import draw_exemplars
from exvae.scale import sharding
from exvae.training import step
from exvae.training.step import TrainState


def uses_exemplars(config: Any) -> bool:
    return PRIORS[config.prior.name].USES_EXEMPLARS


def uses_table(config: Any) -> bool:
    return uses_exemplars(config) and config.retrieval.search != "none"


def uses_scann(config: Any) -> bool:
    return uses_exemplars(config) and config.retrieval.search == "scann"


class Feeder:
    """Makes the Batch of every step, and keeps the ScaNN index that it looks into."""

    def __init__(self, config: Any, model: nn.Module, mesh: Mesh, store: Store, state: TrainState):
        """
        Args:
          state: the one that training goes on from.
        """
        self._config, self._mesh, self._store = config, mesh, store
        self._indices = self._start_indices(state) if uses_scann(config) else None
        self._key = np.asarray(jax.random.key_data(step.split_seed(config.seed)[2]))
        self._rows = sharding.own_rows(mesh, config.train.batch_size)
        self._find = _make_find(config, model, mesh)

    def __call__(self, state: TrainState, number: int, index: Int[np.ndarray, " B"]) -> Batch:
        """The batch of step `number`. `state` is only looked at by an exact search for images on the host."""
        own = index[self._rows]
        batch = Batch(sharding.join_rows(self._mesh, own, len(index)), store=self._store.whole)
        if self._store.on_host:
            batch = batch._replace(images=self._store.take(own))
        if not uses_exemplars(self._config):
            return batch
        draw = draw_exemplars(self._key, number, len(self._store), self._config.prior.num_exemplars)
        batch = batch._replace(draw=draw.replace(keys=sharding.replicate(self._mesh, draw.keys)))
        if self._config.retrieval.search == "none":
            members = draw.members()
            pad = sharding.round_up(len(members), self._mesh) - len(members)
            slots = np.pad(members, (0, pad), constant_values=NOBODY)
            slots = slots[sharding.own_rows(self._mesh, len(slots))]
        elif self._config.retrieval.search == "scann":
            leave_out = own if self._config.prior.leave_one_out else None
            candidates = self._indices.search(own)
            slots = select.cut(candidates, self._config.retrieval.num_neighbours, draw=draw, leave_out=leave_out)
            slots = slots.reshape(-1)
        elif self._store.on_host:
            found = sharding.fetch(self._find(state, batch))
            slots = found[sharding.own_rows(self._mesh, len(found))]
        else:
            return batch
        batch = batch._replace(slots=sharding.join_rows(self._mesh, slots, len(slots) * jax.process_count()))
        return batch._replace(slot_images=self._store.take(slots)) if self._store.on_host else batch

    def swap_index(self, state: TrainState, number: int) -> TrainState:
        """Before step `number`, if it is due: the next index comes into use, and one of the table as it is is begun."""
        if not self._indices or not number or number % self._config.retrieval.rebuild_steps:
            return state
        snapshot = jnp.copy(state.table)
        self._indices.swap(self._on_host(snapshot))
        return state.replace(indexed=(state.indexed[1], snapshot))

    @property
    def figures(self) -> dict[str, float]:
        """For the log: how many of the nearest exemplars the index finds."""
        return {"recall": self._indices.recall} if self._indices else {}

    def _start_indices(self, state: TrainState) -> scann.Indices:
        options = self._config.retrieval
        shape = scann.choose_shape(self._config, len(self._store))
        print(f"index of {shape.describe()}, rebuilt every {options.rebuild_steps} steps", flush=True)
        indices = scann.Indices(shape, options.num_neighbours, options.min_recall)
        used, pending = map(self._on_host, state.indexed)
        indices.start(used, None if int(state.step) <= options.rebuild_steps else pending)  # the same until a swap
        return indices

    def _on_host(self, table: Float[Array, "R D"]) -> Float[np.ndarray, "N D"]:
        """A copy: the next step reuses the table's memory."""
        return np.array(sharding.fetch(table)[: len(self._store)])


def _make_find(config: Any, model: nn.Module, mesh: Mesh):
    """The compiled search of search = exact by itself: (state, batch) -> slots, the same that the step would find."""

    @jax.jit
    def find(state: TrainState, batch: Batch) -> Int[Array, " U"]:
        terms, _ = objectives.training_terms(step.step_key(state), config, model, state.params, batch)
        means = terms.q.mean[:: config.objective.samples]
        return exemplar.find_slots(config, mesh, batch, means, state.table)

    return find
