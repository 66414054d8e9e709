"""Everything that training changes, and the compiled step that changes it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from exvae import models, objectives
from exvae.once import for_equal_configs
from exvae.priors import PRIORS
from exvae.priors.types import Batch
from exvae.retrieval import select
from exvae.scale import sharding
from exvae.training import optim

TRAIN, VALID, TEST, SAMPLES, LIKELIHOOD = range(5)  # streams of randomness
STEPS_AHEAD = 2  # the host may queue so many steps before it looks at the result of the oldest


@struct.dataclass
class TrainState:
    """Everything. Restored after a kill, the next step is bit for bit the one that would have come."""

    step: Int[Array, ""]  # steps taken
    params: dict  # {"model": ..., "prior": ...}, and where there is batch norm "batch_stats": what it remembers
    average: dict | None  # of the parameters and statistics over past steps; None without optim.ema
    opt_state: optax.OptState
    key: Array  # key data, never changes: what a stream draws at time t is fold_in(fold_in(key, stream), t)
    # Latent means of all exemplars, each as of when it was last encoded (RAT). Rows are split over the devices: R is N
    # rounded up to a multiple of their number.
    table: Float[Array, "R D"] | None
    # The table as of when the ScaNN index in use was begun, and the one that is being built.
    indexed: tuple[Float[Array, "R D"], Float[Array, "R D"]] | None
    sums: dict[str, Float[Array, ""]]  # training figures of this epoch so far
    stopping: optim.EarlyStopping

    @property
    def best_guess(self) -> dict:
        """The parameters to validate and to use: the average where there is one."""
        return self.params if self.average is None else self.average


def split_seed(seed: int) -> tuple[Array, Array, Array]:
    """The keys of the model's and of the prior's initialisation, and of everything that is drawn during the run."""
    return tuple(jax.random.split(jax.random.key(seed), 3))


def stream(key: Array, name: int, time: Int[Array, ""] | int = 0) -> Array:
    """The random key of one moment of one stream."""
    return jax.random.fold_in(jax.random.fold_in(key, name), time)


def init_params(config: Any, model: nn.Module) -> dict:
    """Fresh parameters of model and prior, and the model's running statistics."""
    key_model, key_prior, _ = split_seed(config.seed)
    params, statistics = models.init(key_model, model)
    return {
        "model": params,
        "prior": PRIORS[config.prior.name].init(key_prior, config, model.image_shape),
        **statistics,
    }


def learned(params: dict) -> dict:
    """What the optimizer changes: all but running statistics."""
    return {name: params[name] for name in ("model", "prior")}


def init_state(config: Any, model: nn.Module, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step, with an empty table."""
    params = init_params(config, model)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        average=jax.tree.map(jnp.copy, params) if config.optim.ema else None,
        opt_state=optimizer.init(learned(params)),
        key=jax.random.key_data(split_seed(config.seed)[2]),
        table=None,
        indexed=None,
        sums={name: jnp.float32(0) for name in ("elbo", "reconstruction", "kl", "loss")},
        stopping=optim.EarlyStopping.start(),
    )


def state_shardings(mesh: Mesh) -> TrainState:
    """Tables are split over the devices, everything else is on each of them."""
    whole, part = sharding.whole(mesh), sharding.part(mesh)
    others = dict.fromkeys(TrainState.__dataclass_fields__, whole)
    return TrainState(**{**others, "table": part, "indexed": part})


def step_key(state: TrainState) -> Array:
    """Of everything that the step after this state draws."""
    return stream(jax.random.wrap_key_data(state.key), TRAIN, state.step)


@for_equal_configs
def make_train_step(
    config: Any, model: nn.Module, mesh: Mesh, optimizer: optax.GradientTransformation, steps_per_epoch: int
):
    """The compiled step: (state, batch) -> (state, mean ELBO). The old state's memory is reused.

    The ELBO is NaN where the loss or any gradient is not finite.
    """

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Float[Array, ""]]:
        key = step_key(state)
        beta = optim.kl_weight(state.step, steps_per_epoch, config.optim.kl_warmup_epochs)

        params = learned(state.params)

        def loss_fn(params):
            whole = {**state.params, **params}
            elbo, exemplars, statistics = objectives.training_elbo(key, config, model, mesh, whole, batch, state.table)
            loss = -jnp.mean(elbo.reconstruction - beta * elbo.kl)
            return loss, (jax.tree.map(jnp.mean, elbo)._asdict(), exemplars, statistics)

        (loss, (means_of, exemplars, statistics)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, state.opt_state, params)
        table = state.table
        for part in exemplars if table is not None else ():
            table = select.update(mesh, table, part.index, part.means)
        params = {**optax.apply_updates(params, updates), **statistics}
        average = state.average
        if average is not None:
            average = optim.update_average(average, params, state.step + 1, config.optim.ema)
        finite = jnp.isfinite(loss) & jnp.isfinite(optax.tree.norm(grads))
        state = state.replace(
            step=state.step + 1,
            params=params,
            average=average,
            opt_state=opt_state,
            table=table,
            sums=jax.tree.map(jnp.add, state.sums, {**means_of, "loss": loss}),
        )
        return state, jnp.where(finite, means_of["elbo"], jnp.nan)

    return jax.jit(train_step, donate_argnums=0, out_shardings=(state_shardings(mesh), sharding.whole(mesh)))
