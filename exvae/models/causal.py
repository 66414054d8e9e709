"""Layers of an autoregressive decoder. Pixels come in rows from the top, each row from the left.

Everything can be computed for all pixels at once, where their values are known, or for one pixel after another, as
sampling does it. A layer does not know which: it is given windows of its input (`all_windows`, `Pixel.next_window`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from exvae.models.conv import NO_PADDING, conv2d, uniform_init

# What a 3x3 kernel may see: the row above and, in its own row, the pixel to the left; with `INCLUSIVE` itself too.
ABOVE_AND_LEFT = ((1, 1, 1), (1, 0, 0))
INCLUSIVE = ((1, 1, 1), (1, 1, 0))
ONE = ((1,),)  # only itself: a 1x1 kernel
ROWS, COLUMNS = 2, 3  # of a window
CHUNKS, SMALLEST_CHUNK = 14, 32  # of the pixels that look at all those before them at a time; each is compiled apart
# Of the scores of a chunk, for as many images as that allows: on a CPU they stay in the cache.
SCORE_BYTES, ACCELERATOR_SCORE_BYTES = 2**22, 2**28

Maps = Float[Array, "B H W C"]


class WeightNormConv(nn.Module):
    """Convolution by g v / ||v||, of what `mask` lets it see of a window (Salimans & Kingma, 2016)."""

    features: int
    mask: tuple[tuple[int, ...], ...] = ONE

    @nn.compact
    def __call__(self, windows: Maps) -> Float[Array, "B h w F"]:
        mask = np.array(self.mask, np.float32)[:, :, None, None]
        shape = (*mask.shape[:2], windows.shape[-1], self.features)
        init = uniform_init((int(mask.sum()), 1, shape[2], shape[3]))
        direction = self.param("direction", init, shape) * mask
        # At the start g = ||v||, so that the kernel is the one that was drawn.
        length = jnp.sqrt(jnp.sum(jnp.square(direction), axis=(0, 1, 2)))
        gain = self.param("gain", lambda _: lax.stop_gradient(length))
        bias = self.param("bias", init, shape[-1:])
        return conv2d(windows, direction * (gain / length), padding=NO_PADDING) + bias


def all_windows(h: Maps) -> Maps:
    """The maps with a border, so that the window of every pixel lies inside."""
    return jnp.pad(h, ((0, 0), (ROWS - 1, 0), (COLUMNS // 2, COLUMNS // 2), (0, 0)))


def without_border(maps: Maps) -> Maps:
    return maps[:, ROWS - 1 :, COLUMNS // 2 : -(COLUMNS // 2)]


class Pixel:
    """One pixel, and maps with a border that remember what the pixels before it had there."""

    def __init__(self, maps: list[Maps], row: Int[Array, ""], column: Int[Array, ""]):
        self.maps, self._row, self._column, self._next = list(maps), row, column, 0

    def here(self, maps: Maps) -> Float[Array, "B 1 1 C"]:
        """The pixel itself in maps without a border."""
        return self._slice(maps, 1, 1)

    def window(self, maps: Maps) -> Float[Array, "B 2 3 C"]:
        return self._slice(maps, ROWS, COLUMNS)

    def write(self, maps: Maps, h: Float[Array, "B 1 1 C"]) -> Maps:
        at = (0, self._row + ROWS - 1, self._column + COLUMNS // 2, 0)
        return lax.dynamic_update_slice(maps, h, at)

    def next_window(self, h: Float[Array, "B 1 1 C"]) -> Float[Array, "B 2 3 C"]:
        """As `all_windows`: layers call it in a fixed order, and each finds its own map and leaves the pixel in it."""
        number, self._next = self._next, self._next + 1
        self.maps[number] = self.write(self.maps[number], h)
        return self.window(self.maps[number])

    def _slice(self, maps: Maps, rows: int, columns: int) -> Maps:
        return lax.dynamic_slice(maps, (0, self._row, self._column, 0), (len(maps), rows, columns, maps.shape[-1]))


class GatedResidual(nn.Module):
    """h + a sigmoid(b) with (a, b) a masked convolution of the ELU of another one, dropout between them."""

    features: int
    dropout: float

    @nn.compact
    def __call__(self, h: Maps, windows: Callable[[Maps], Maps]) -> Maps:
        y = WeightNormConv(self.features, INCLUSIVE)(windows(nn.elu(h)))
        y = nn.Dropout(self.dropout, deterministic=not self.has_rng("dropout"))(nn.elu(y))
        a, b = jnp.split(WeightNormConv(2 * self.features, INCLUSIVE)(windows(y)), 2, axis=-1)
        return h + a * nn.sigmoid(b)


def attend(
    query: Float[Array, "Q h d"], key: Float[Array, "K h d"], value: Float[Array, "K h d"], first: Int[Array, ""] | int
) -> Float[Array, "Q h d"]:
    """Attention of pixels first, first + 1, ... to the pixels before each of them; zero for pixel 0, which has none."""
    scores = jnp.einsum("qhd,khd->hqk", query, key) / np.sqrt(query.shape[-1])
    position = first + jnp.arange(len(query))
    seen = jnp.arange(len(key)) < position[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.where((position > 0)[:, None, None], jnp.einsum("hqk,khd->qhd", weights, value), 0.0)


def causal_attention(
    query: Float[Array, "B L h d"], key: Float[Array, "B L h d"], value: Float[Array, "B L h d"]
) -> Float[Array, "B L h d"]:
    """`attend` for all pixels of all images. Only the scores of a chunk of a few images are ever in memory."""
    length, heads = query.shape[1:3]
    size = min(length, max(SMALLEST_CHUNK, -(-length // CHUNKS)))

    @functools.partial(jax.checkpoint, static_argnums=3)  # slices inside, so that the backward pass keeps no copies
    def chunk(q, k, v, start):
        end = start + size
        return attend(q[start:end], k[:end], v[:end], start)

    def image(qkv):
        return jnp.concatenate([chunk(*qkv, start) for start in range(0, length, size)])

    most = SCORE_BYTES if jax.default_backend() == "cpu" else ACCELERATOR_SCORE_BYTES
    images = max(1, most // (4 * heads * size * length))
    return lax.map(image, (query, key, value), batch_size=images)
