"""Exemplar subsampling: M of N without replacement (O2)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool


def draw_exemplars(key: Array, num_train: int, num_exemplars: int) -> Bool[Array, " N"]:
    """A uniformly random subset of size M as a mask.

    The subset holds the M smallest of N random 32-bit keys. Their M-th smallest is found bit by bit, 32 counts of N
    comparisons: sorting the keys would take longer than the rest of a training step on a CPU.
    """
    if num_exemplars == num_train:
        return jnp.ones(num_train, bool)
    keys = jax.random.bits(key, (num_train,), jnp.uint32)

    def set_bit(bit, threshold):
        higher = threshold | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(jnp.sum(keys < higher) < num_exemplars, higher, threshold)

    threshold = lax.fori_loop(0, 32, set_bit, jnp.uint32(0))  # the M-th smallest key
    drawn = keys <= threshold
    # Two equal keys at the threshold (once in about 10^5 draws) would make it M + 1: leave one of them out.
    tie = jnp.argmax(keys == threshold)
    return drawn.at[tie].set(jnp.sum(drawn) == num_exemplars)
