"""Exemplar subsampling: M of N without replacement (O2), without ever looking at all N."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax
from jaxtyping import Bool, Int, UInt32

Array = np.ndarray | jnp.ndarray  # everything here is operators on unsigned integers: the host computes the same bits
ROUNDS = 8  # a Feistel network is hard to tell from a random permutation after four


@struct.dataclass
class Draw:
    """The M exemplars of a step: those that a keyed permutation of 0..N-1 sends below M.

    Whether an exemplar is drawn so costs a few operations whatever N is, and device and host agree on it without a
    word. The permutation is a Feistel network over a grid of roughly square shape with at least N cells: coordinates
    take turns being shifted by a hash of the other. What leaves 0..N-1 is sent on until it comes back.
    """

    keys: UInt32[Array, " R"]  # one for each round
    num_train: int = struct.field(pytree_node=False)  # N
    num_exemplars: int = struct.field(pytree_node=False)  # M

    def contains(self, index: Int[Array, "*shape"]) -> Bool[Array, "*shape"]:
        """Whether the exemplars with these numbers are drawn."""
        return self._walk(index, self._forward) < self.num_exemplars

    def members(self) -> Int[np.ndarray, " M"]:
        """The numbers of all that are drawn, on the host."""
        return self._walk(np.arange(self.num_exemplars, dtype=np.int32), self._backward)

    def _walk(self, index, once):
        """The cycles of a permutation of the grid, cut down to 0..N-1, are those of a permutation of 0..N-1."""
        x = once(index.astype(np.uint32))
        if isinstance(x, np.ndarray):
            while (outside := x >= self.num_train).any():
                x = np.where(outside, once(x), x)
        else:
            outside = lambda x: x >= self.num_train  # noqa: E731
            x = lax.while_loop(lambda x: jnp.any(outside(x)), lambda x: jnp.where(outside(x), once(x), x), x)
        return x.astype(np.int32)

    def _forward(self, x):
        rows, columns = _grid(self.num_train)
        row, column = x // columns, x % columns
        for key in _pairs(self.keys):
            row = _add(row, _hash(column, key[0], rows), rows)
            column = _add(column, _hash(row, key[1], columns), columns)
        return row * columns + column

    def _backward(self, x):
        rows, columns = _grid(self.num_train)
        row, column = x // columns, x % columns
        for key in reversed(_pairs(self.keys)):
            column = _add(column, columns - _hash(row, key[1], columns), columns)
            row = _add(row, rows - _hash(column, key[0], rows), rows)
        return row * columns + column


def draw_exemplars(
    key: UInt32[Array, " 2"], step: int | Int[jnp.ndarray, ""], num_train: int, num_exemplars: int
) -> Draw:
    """The draw of a step: a function of the run's key and the step's number, the same on host and devices."""
    number = np.full(1, step, np.uint32) if isinstance(step, int) else step.astype(jnp.uint32)[None]
    rounds = np.arange(ROUNDS, dtype=np.uint32)
    keys = _mix(key[0] ^ _mix(key[1] ^ _mix(number * np.uint32(ROUNDS) + rounds)))
    return Draw(keys, num_train, num_exemplars)


@functools.cache
def _grid(num_cells: int) -> tuple[np.uint32, np.uint32]:
    """Rows and columns of a grid with at least so many cells, as few more as possible: what falls on those walks on."""
    side = math.isqrt(num_cells - 1) + 1
    columns = min(range(side, side + max(1, side // 2)), key=lambda columns: -num_cells % columns)
    return np.uint32(-(-num_cells // columns)), np.uint32(columns)


def _pairs(keys) -> list:
    return [(keys[i], keys[i + 1]) for i in range(0, ROUNDS, 2)]


def _add(a, b, modulus):
    """(a + b) mod modulus of numbers that are at most that: integers are divided slowly."""
    total = a + b
    return total - modulus * (total >= modulus)


def _hash(x, key, size):
    """A number below `size` (at most 2^16), from the upper half of 32 mixed bits."""
    return ((_mix(x ^ key) >> np.uint32(16)) * size) >> np.uint32(16)


def _mix(x):
    """Every bit of the result depends on every bit of x (the finalizer of MurmurHash3)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))
