"""The optimizer: Adam on normalised gradients, the learning rate schedule, and the average of the parameters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Int
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.once import for_equal_configs

NORM_EPS = 1e-7
AVERAGE_STEPS = 8  # steps between two updates of the average. An update in each step would add 5 % to a small step


def normalise_gradients() -> optax.GradientTransformation:
    """g <- g / (||g||_2 + 1e-7), separately for each parameter tensor (Yu et al., 2017)."""

    def update(
        grads: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        del params
        return jax.tree.map(lambda g: g / (jnp.sqrt(jnp.sum(jnp.square(g))) + NORM_EPS), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def learning_rate(options: ConfigDict, total_steps: int) -> optax.Schedule:
    """Return the schedule of the rate: constant as in the paper, or a linear rise and a cosine decay to a floor.

    Args:
      options: config.optim.
    """
    if options.schedule == "constant":
        return optax.constant_schedule(options.learning_rate)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=options.learning_rate,
        warmup_steps=min(options.rise_steps, total_steps // 2),
        decay_steps=total_steps,
        end_value=options.learning_rate * options.floor,
    )


@for_equal_configs("optim")
def optimizer(config: ConfigDict, total_steps: int) -> optax.GradientTransformation:
    """Build Adam(0.9, 0.999, 1e-8) on normalised gradients; with `weight_decay` AdamW (Loshchilov & Hutter, 2019)."""
    options = config.optim
    first = normalise_gradients() if options.normalise_gradients else optax.identity()
    decay = [optax.add_decayed_weights(options.weight_decay, mask=_decayed)] if options.weight_decay else []
    rate = optax.scale_by_learning_rate(learning_rate(options, total_steps))
    # Differs from the authors' code: Adam's epsilon is added after the bias correction. The code adds it before.
    return optax.chain(first, optax.scale_by_adam(), *decay, rate)


def _decayed(params: dict) -> dict:
    """Return True for matrices and kernels of the networks, False for biases and for parameters of the prior."""
    return {part: jax.tree.map(lambda p, part=part: part == "model" and p.ndim > 1, params[part]) for part in params}


def update_average(average: dict, params: dict, step: Int[Array, ""], decay: float) -> dict:
    """average <- d average + (1 - d) params, once every AVERAGE_STEPS steps.

    In update n, d = min(decay^AVERAGE_STEPS, n / (n + 9)). It is smaller in the first updates, so the average forgets
    early parameters quickly. Before the first update the average equals the newest parameters.

    Args:
      step: number of steps taken, including the one that led to `params`.
      decay: decay per step.
    """
    n = (step // AVERAGE_STEPS).astype(jnp.float32)

    def take_in(average: dict, params: dict) -> dict:
        rate = 1.0 - jnp.minimum(decay**AVERAGE_STEPS, n / (n + 9.0))
        return jax.tree.map(lambda a, p: a + rate * (p - a), average, params)

    # Without the barrier the compiler computes the new parameters twice.
    params = jax.lax.optimization_barrier(params)
    is_due = (step % AVERAGE_STEPS == 0) | (step < AVERAGE_STEPS)
    return jax.lax.cond(is_due, take_in, lambda average, _: average, average, params)
