"""The state of training: everything that a step changes. A resumed run repeats the same steps, bit for bit.

Differs from the authors' code: there a resumed run repeats epochs and loses its random state.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt32
from ml_collections import ConfigDict

from exvae import keys, models
from exvae.arrays import Array, Record
from exvae.priors import PRIORS
from exvae.scale import sharding


class EarlyStopping(NamedTuple):
    """The best validation ELBO so far, and the epochs since then. `exvae/training/stopping.py` has the rule."""

    best_elbo: Float[Array, ""]
    best_epoch: Int[Array, ""]
    bad_epochs: Int[Array, ""]

    @classmethod
    def start(cls) -> EarlyStopping:
        """Return the record before the first validation."""
        return cls(jnp.float32(-jnp.inf), jnp.int32(0), jnp.int32(0))


class TrainState(Record):
    """The contents of a checkpoint. The fields are saved under their names."""

    step: Int[Array, ""]  # number of steps taken
    params: dict  # {"model": ..., "prior": ...}; with batch norm also "batch_stats", the running statistics
    average: dict | None  # moving average of `params`; None if optim.ema is 0
    opt_state: optax.OptState
    key: UInt32[Array, " 2"]  # raw data of the run's key; constant, because each step folds in its number
    # RAT: the latent mean of each exemplar when it was last encoded (`exvae/retrieval/table.py`).
    table: Float[Array, "R D"] | None
    # ScaNN: the table that the current index was built from, and the table of the index under construction.
    indexed: tuple[Float[Array, "R D"], Float[Array, "R D"]] | None
    sums: dict[str, Float[Array, ""]]  # sums of the training metrics over the steps of this epoch
    stopping: EarlyStopping

    @property
    def best_guess(self) -> dict:
        """The parameters to validate and to use: the moving average if there is one."""
        return self.params if self.average is None else self.average


def init_params(config: ConfigDict, model: nn.Module) -> dict:
    """Initialise the parameters of the networks and the prior, and the networks' running statistics."""
    key_model, key_prior, _ = keys.split_seed(config.seed)
    params, statistics = models.init(key_model, model)
    prior = PRIORS[config.prior.name].init(key_prior, config.prior, model.image_shape)
    return {"model": params, "prior": prior, **statistics}


def learned(params: dict) -> dict:
    """Return the parameters that the optimizer updates: everything except running statistics."""
    return {name: params[name] for name in ("model", "prior")}


def init_state(config: ConfigDict, model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """Return the state before the first step, without a table of means. `training.setup.start` adds the table."""
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
    """Return the sharding of each field: tables are split over the devices, every device has all other fields."""
    fields: dict[str, Any] = dict.fromkeys(TrainState.__dataclass_fields__, sharding.whole(mesh))
    fields |= dict.fromkeys(("table", "indexed"), sharding.part(mesh))
    return TrainState(**fields)


def step_key(state: TrainState) -> Array:
    """Return the random key of the next step."""
    return keys.stream(jax.random.wrap_key_data(state.key), keys.TRAIN, state.step)
