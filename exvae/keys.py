"""Random keys of a run. The key of a stream at time t is fold_in(fold_in(key, stream), t), a function of the seed.

Differs from the authors' code: everything random is a function of the seed. There the initialisation has no seed.
"""

from __future__ import annotations

import jax
from jaxtyping import Int

from exvae.arrays import Array

TRAIN, VALID, TEST, SAMPLES, LIKELIHOOD = range(5)  # the streams


def split_seed(seed: int) -> tuple[Array, Array, Array]:
    """Return three keys: to initialise the networks, to initialise the prior, and for all draws during the run."""
    key_model, key_prior, key_run = jax.random.split(jax.random.key(seed), 3)
    return key_model, key_prior, key_run


def stream(key: Array, name: int, time: Int[Array, ""] | int = 0) -> Array:
    """Return the random key of a stream at time `time`."""
    return jax.random.fold_in(jax.random.fold_in(key, name), time)
