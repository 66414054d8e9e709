"""Everything that training changes. A run that goes on from a saved state takes the same steps, bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32
from ml_collections import ConfigDict

from exvae import keys, models
from exvae.priors import PRIORS
from exvae.scale import sharding


class EarlyStopping(NamedTuple):
    """The best validation ELBO so far, and the epochs since then. The rule is in `exvae/training/stopping.py`."""

    best_elbo: Float[Array, ""]
    best_epoch: Int[Array, ""]
    bad_epochs: Int[Array, ""]

    @classmethod
    def start(cls) -> EarlyStopping:
        return cls(jnp.float32(-jnp.inf), jnp.int32(0), jnp.int32(0))


class TrainState(struct.PyTreeNode):
    """Saved in every checkpoint, by the names of its fields."""

    step: Int[Array, ""]  # steps taken
    params: dict  # {"model": ..., "prior": ...}, and with batch norm "batch_stats": its running statistics
    average: dict | None  # of the parameters and statistics over past steps; None without optim.ema
    opt_state: optax.OptState
    key: UInt32[Array, " 2"]  # key data of the run's key; it never changes, steps fold their number into it
    # RAT: the latent mean of every exemplar, as of when it was last encoded (`exvae/retrieval/table.py`).
    table: Float[Array, "R D"] | None
    # ScaNN: the table as of when the index in use was built, and of the one that is being built.
    indexed: tuple[Float[Array, "R D"], Float[Array, "R D"]] | None
    sums: dict[str, Float[Array, ""]]  # training figures of this epoch so far
    stopping: EarlyStopping

    @property
    def best_guess(self) -> dict:
        """The parameters to validate and to use: the average if there is one."""
        return self.params if self.average is None else self.average


def init_params(config: ConfigDict, model: nn.Module) -> dict:
    """Fresh parameters of networks and prior, and the networks' running statistics."""
    key_model, key_prior, _ = keys.split_seed(config.seed)
    params, statistics = models.init(key_model, model)
    prior = PRIORS[config.prior.name].init(key_prior, config.prior, model.image_shape)
    return {"model": params, "prior": prior, **statistics}


def learned(params: dict) -> dict:
    """The part of the parameters that the optimizer changes: all but running statistics."""
    return {name: params[name] for name in ("model", "prior")}


def init_state(config: ConfigDict, model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. The table of means is filled later, from the images."""
    params = init_params(config, model)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        average=jax.tree.map(jnp.copy, params) if config.optim.ema else None,
        opt_state=optimizer.init(learned(params)),
        key=jax.random.key_data(keys.split_seed(config.seed)[2]),
        table=None,
        indexed=None,
        sums={name: jnp.float32(0) for name in ("elbo", "reconstruction", "kl", "loss")},
        stopping=EarlyStopping.start(),
    )


def state_shardings(mesh: Mesh) -> TrainState:
    """Tables are split over the devices; every device has all the rest."""
    whole, part = sharding.whole(mesh), sharding.part(mesh)
    others = dict.fromkeys(TrainState.__dataclass_fields__, whole)
    return TrainState(**{**others, "table": part, "indexed": part})


def step_key(state: TrainState) -> Array:
    """The random key of the step that follows this state."""
    return keys.stream(jax.random.wrap_key_data(state.key), keys.TRAIN, state.step)
