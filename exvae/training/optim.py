"""The optimizer: Adam on normalised gradients, the schedule of its rate, and the average of the parameters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from exvae.arrays import Array
from exvae.once import for_equal_configs

NORM_EPS = 1e-7
AVERAGE_STEPS = 8  # an average of every step would be much the same, and take 5 % of a small step's time


def normalise_gradients() -> optax.GradientTransformation:
    """g <- g / (||g||_2 + 1e-7) for each parameter tensor by itself (Yu et al., 2017)."""

    def update(grads, state, params=None):
        del params
        return jax.tree.map(lambda g: g / (jnp.sqrt(jnp.sum(jnp.square(g))) + NORM_EPS), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def learning_rate(config: Any, total_steps: int) -> optax.Schedule:
    """`config.optim.schedule`: the paper's constant rate, or a linear rise and a cosine decay to a floor."""
    if config.schedule == "constant":
        return optax.constant_schedule(config.learning_rate)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.rise_steps, total_steps // 2),
        decay_steps=total_steps,
        end_value=config.learning_rate * config.floor,
    )


@for_equal_configs
def optimizer(config: Any, total_steps: int) -> optax.GradientTransformation:
    """Adam(0.9, 0.999, 1e-8) on normalised gradients; with `weight_decay` AdamW (Loshchilov & Hutter, 2019)."""
    config = config.optim
    first = normalise_gradients() if config.normalise_gradients else optax.identity()
    decay = [optax.add_decayed_weights(config.weight_decay, mask=_decayed)] if config.weight_decay else []
    rate = optax.scale_by_learning_rate(learning_rate(config, total_steps))
    return optax.chain(first, optax.scale_by_adam(), *decay, rate)


def _decayed(params: dict) -> dict:
    """Matrices and kernels of the networks: no biases, nothing of the prior."""
    return {part: jax.tree.map(lambda p, part=part: part == "model" and p.ndim > 1, params[part]) for part in params}


def update_average(average: Any, params: Any, step: Array, decay: float) -> Any:
    """average <- d average + (1 - d) params, after every AVERAGE_STEPS steps.

    d = min(decay^AVERAGE_STEPS, n / (n + 9)) in the n-th of these updates: at first it is smaller, so that early
    parameters are soon forgotten. Before the first update the average is the newest parameters.

    Args:
      step: steps taken, the one that led to `params` among them.
      decay: of a step.
    """
    n = (step // AVERAGE_STEPS).astype(jnp.float32)

    def take_in(average: Any, params: Any) -> Any:
        rate = 1.0 - jnp.minimum(decay**AVERAGE_STEPS, n / (n + 9.0))
        return jax.tree.map(lambda a, p: a + rate * (p - a), average, params)

    # Without the barrier the compiler computes the new parameters twice.
    params = jax.lax.optimization_barrier(params)
    is_due = (step % AVERAGE_STEPS == 0) | (step < AVERAGE_STEPS)
    return jax.lax.cond(is_due, take_in, lambda average, _: average, average, params)
