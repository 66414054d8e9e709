"""Random keys of a run. A stream draws at time t with fold_in(fold_in(key, stream), t): a function of the seed."""

from __future__ import annotations

import jax
from jaxtyping import Array, Int

TRAIN, VALID, TEST, SAMPLES, LIKELIHOOD = range(5)  # the streams


def split_seed(seed: int) -> tuple[Array, Array, Array]:
    """The keys that initialise the networks and the prior, and the key of everything drawn during the run."""
    key_model, key_prior, key_run = jax.random.split(jax.random.key(seed), 3)
    return key_model, key_prior, key_run


def stream(key: Array, name: int, time: Int[Array, ""] | int = 0) -> Array:
    """The random key of one stream at one time."""
    return jax.random.fold_in(jax.random.fold_in(key, name), time)
