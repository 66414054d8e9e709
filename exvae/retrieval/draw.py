"""Exemplar subsampling: M of N without replacement (O2), in time that does not depend on N.

Differs from the authors' code: draws are without replacement, as in the paper. The code draws with replacement.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Bool, Int, UInt32

from exvae.arrays import Record

Array = jax.Array | np.ndarray  # all functions here use only unsigned integers, so host and devices compute equal bits
if TYPE_CHECKING:
    Number = Array
else:
    Number = Array | np.uint32  # an element of a numpy array is a scalar, not an array
ROUNDS = 8  # of the Feistel network; its output already looks random after four


class Draw(Record):
    """The M exemplars of a step: those that a keyed permutation of 0..N-1 maps below M.

    Checking whether an exemplar is drawn takes a few operations for any N. Host and devices get the same answer without
    communication. The permutation is a Feistel network over a grid with at least N cells: each round shifts one
    coordinate by a hash of the other. The network is applied again to results outside 0..N-1 (cycle walking).
    """

    keys: UInt32[Array, " R"]  # one key for each round
    num_train: int = struct.field(pytree_node=False)  # N
    num_exemplars: int = struct.field(pytree_node=False)  # M

    def contains(self, index: Int[Array, ...]) -> Bool[Array, ...]:
        """Return whether each of these exemplars is drawn."""
        return self._walk(index, self._forward) < self.num_exemplars

    def members(self) -> Int[np.ndarray, " M"]:
        """Return the indices of all drawn exemplars, computed on the host."""
        members = self._walk(np.arange(self.num_exemplars, dtype=np.int32), self._backward)
        assert isinstance(members, np.ndarray), "members are computed with keys on the host"
        return members

    def _walk(self, index: Array, once: Callable[[Number], Number]) -> Array:
        """Apply a permutation of the grid until the result is in 0..N-1. The result is a permutation of 0..N-1."""
        x = once(index.astype(np.uint32))
        if isinstance(x, np.ndarray):
            while (outside := x >= self.num_train).any():
                x = np.where(outside, once(x), x)
        else:

            def is_outside(x: jax.Array) -> jax.Array:
                return x >= self.num_train

            x = lax.while_loop(lambda x: jnp.any(is_outside(x)), lambda x: jnp.where(is_outside(x), once(x), x), x)
        return x.astype(np.int32)

    def _forward(self, x: Number) -> Number:
        rows, columns = _grid(self.num_train)
        row, column = x // columns, x % columns
        for key in _pairs(self.keys):
            row = _add(row, _hash(column, key[0], rows), rows)
            column = _add(column, _hash(row, key[1], columns), columns)
        return row * columns + column

    def _backward(self, x: Number) -> Number:
        rows, columns = _grid(self.num_train)
        row, column = x // columns, x % columns
        for key in reversed(_pairs(self.keys)):
            column = _add(column, columns - _hash(row, key[1], columns), columns)
            row = _add(row, rows - _hash(column, key[0], rows), rows)
        return row * columns + column


def draw_exemplars(
    key: UInt32[Array, " 2"], step: int | Int[jax.Array, ""], num_train: int, num_exemplars: int
) -> Draw:
    """Return the draw of a step: a function of the run's key and the step number, equal on host and devices."""
    number = np.full(1, step, np.uint32) if isinstance(step, int) else step.astype(jnp.uint32)[None]
    rounds = np.arange(ROUNDS, dtype=np.uint32)
    keys = _mix(key[0] ^ _mix(key[1] ^ _mix(number * np.uint32(ROUNDS) + rounds)))
    return Draw(keys, num_train, num_exemplars)


@functools.cache
def _grid(num_cells: int) -> tuple[np.uint32, np.uint32]:
    """Return rows and columns of a roughly square grid with at least `num_cells` cells and hardly more."""
    side = math.isqrt(num_cells - 1) + 1
    columns = min(range(side, side + max(1, side // 2)), key=lambda columns: -num_cells % columns)
    return np.uint32(-(-num_cells // columns)), np.uint32(columns)


def _pairs(keys: UInt32[Array, "R ..."]) -> list[tuple[Number, Number]]:
    return [(keys[i], keys[i + 1]) for i in range(0, ROUNDS, 2)]


def _add(a: Number, b: Number, modulus: np.uint32) -> Number:
    """(a + b) mod modulus for a, b <= modulus, without a slow integer division."""
    total = a + b
    return total - modulus * (total >= modulus)


def _hash(x: Number, key: Number, size: np.uint32) -> Number:
    """Return a number below `size` (at most 2^16), from the upper 16 of 32 mixed bits."""
    return ((_mix(x ^ key) >> np.uint32(16)) * size) >> np.uint32(16)


def _mix(x: Number) -> Number:
    """The finalizer of MurmurHash3: each bit of the result depends on every bit of x."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
