"""The compiled training step: Algorithm 1, the average of the parameters, and the sums of the training metrics."""

from __future__ import annotations

from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float
from ml_collections import ConfigDict

from exvae.algorithm import Batch, Problem, algorithm_1
from exvae.arrays import Array
from exvae.once import for_equal_configs
from exvae.scale import sharding
from exvae.state import TrainState, state_shardings
from exvae.training import optim

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, Float[Array, ""]]]


@for_equal_configs("model", "prior", "retrieval", "objective", "optim")
def make_train_step(
    config: ConfigDict,
    model: nn.Module,
    mesh: Mesh,
    optimizer: optax.GradientTransformation,
    *,
    num_train: int,
    steps_per_epoch: int,
) -> TrainStep:
    """Compile the function (state, batch) -> (state, mean ELBO). It reuses the memory of the old state.

    The ELBO is NaN if the loss or any gradient is not finite.
    """
    problem = Problem(
        config=config,
        model=model,
        mesh=mesh,
        optimizer=optimizer,
        num_train=num_train,
        steps_per_epoch=steps_per_epoch,
    )

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Float[Array, ""]]:
        with sharding.context(mesh):
            state, info = algorithm_1(problem, state, batch)
        metrics = {**jax.tree.map(jnp.mean, info.elbo)._asdict(), "loss": info.loss}
        state = state.replace(sums=jax.tree.map(jnp.add, state.sums, metrics))
        if state.average is not None:
            average = optim.update_average(state.average, state.params, state.step, config.optim.ema)
            state = state.replace(average=average)
        finite = jnp.isfinite(info.loss) & jnp.isfinite(optax.tree.norm(info.grads))
        return state, jnp.where(finite, metrics["elbo"], jnp.nan)

    # A second trace would mean a slow compilation in the middle of a run, so chex raises an error.
    chex.clear_trace_counter()
    out = (state_shardings(mesh), sharding.whole(mesh))
    return jax.jit(chex.assert_max_traces(train_step, n=1), donate_argnums=0, out_shardings=out)
