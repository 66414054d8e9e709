"""Layers of an autoregressive decoder. Pixels are in raster order: row by row from the top, each from left to right.

A layer works in two modes. If all pixel values are known, it computes all pixels at once. In sampling, it computes one
pixel after another. The layer is the same in both modes. Only its input windows differ: `all_windows` or
`Pixel.next_window`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from exvae.arrays import Array
from exvae.models.conv import conv2d, uniform_init
from exvae.models.conv_cpu import NO_PADDING

# The taps of a kernel: three pixels in the row above and the pixel to the left. `INCLUSIVE` adds the pixel itself.
# Differs from the authors' code: every kernel has these taps. There, shifted convolutions hide some earlier pixels.
ABOVE_AND_LEFT = ((1, 1, 1), (1, 0, 0))
INCLUSIVE = ((1, 1, 1), (1, 1, 0))
ONE = ((1,),)  # only the pixel itself: a 1x1 kernel
ROWS, COLUMNS = 2, 3  # size of a window
# Attention computes the queries of one chunk of pixels at a time. Each chunk is compiled separately.
CHUNKS, SMALLEST_CHUNK = 7, 32  # number of chunks, and their smallest size in pixels
ATTENTION = "attention"  # name of the results that the backward pass keeps
# Memory for the scores of a chunk. It limits the number of images at a time. On a CPU the scores fit into the cache.
SCORE_BYTES, ACCELERATOR_SCORE_BYTES = 2**22, 2**28

Maps = Float[Array, "B H W C"]
Windows = Float[Array, "B h w c"]  # maps with a border
Here = Float[Array, "B 1 1 C"]  # maps of one pixel


class WeightNormConv(nn.Module):
    """Convolution with the kernel g v / ||v|| (Salimans & Kingma, 2016), masked by `mask`."""

    features: int
    mask: tuple[tuple[int, ...], ...] = ONE

    @nn.compact
    def __call__(self, windows: Windows) -> Float[Array, "B H W F"]:
        mask = np.array(self.mask, np.float32)[:, :, None, None]
        shape = (*mask.shape[:2], windows.shape[-1], self.features)
        init = uniform_init((int(mask.sum()), 1, shape[2], shape[3]))
        direction = self.param("direction", init, shape) * mask
        # Initially g = ||v||, so the kernel is v.
        length = jnp.sqrt(jnp.sum(jnp.square(direction), axis=(0, 1, 2)))
        gain = self.param("gain", lambda _: lax.stop_gradient(length))
        bias = self.param("bias", init, shape[-1:])
        return conv2d(windows, direction * (gain / length), padding=NO_PADDING) + bias


def all_windows(h: Maps) -> Windows:
    """Add a border to maps, wide enough for the window of every pixel."""
    return jnp.pad(h, ((0, 0), (ROWS - 1, 0), (COLUMNS // 2, COLUMNS // 2), (0, 0)))


def without_border(maps: Windows) -> Maps:
    """Remove the border that `all_windows` adds."""
    return maps[:, ROWS - 1 :, COLUMNS // 2 : -(COLUMNS // 2)]


class Pixel:
    """A pixel position, and maps with a border that hold the layers' inputs at the pixels before it."""

    def __init__(self, maps: list[Maps], row: Int[Array, ""], column: Int[Array, ""]):
        self.maps, self._row, self._column, self._next = list(maps), row, column, 0

    def here(self, maps: Maps) -> Here:
        """Return the pixel of maps without a border."""
        return self._slice(maps, 1, 1)

    def window(self, maps: Maps) -> Float[Array, "B 2 3 C"]:
        """Return the window of the pixel in maps with a border."""
        return self._slice(maps, ROWS, COLUMNS)

    def write(self, maps: Maps, h: Here) -> Maps:
        """Set the pixel in maps with a border."""
        at = (0, self._row + ROWS - 1, self._column + COLUMNS // 2, 0)
        return lax.dynamic_update_slice(maps, h, at)

    def next_window(self, h: Here) -> Float[Array, "B 2 3 C"]:
        """Write `h` to the input of the next layer, and return the window of the pixel.

        In sampling this replaces `all_windows`. Layers call it in a fixed order: call i uses map i.
        """
        number, self._next = self._next, self._next + 1
        self.maps[number] = self.write(self.maps[number], h)
        return self.window(self.maps[number])

    def _slice(self, maps: Maps, rows: int, columns: int) -> Float[Array, "B {rows} {columns} C"]:
        return lax.dynamic_slice(maps, (0, self._row, self._column, 0), (len(maps), rows, columns, maps.shape[-1]))


class GatedResidual(nn.Module):
    """h + a sigmoid(b). (a, b) come from two masked convolutions with ELUs, and dropout between them."""

    features: int
    dropout: float

    @nn.compact
    def __call__(self, h: Maps, windows: Callable[[Maps], Windows]) -> Maps:
        y = nn.elu(WeightNormConv(self.features, INCLUSIVE)(windows(nn.elu(h))))
        if self.has_rng("dropout"):
            y = drop_out(self.make_rng("dropout"), y, self.dropout)
        a, b = jnp.split(WeightNormConv(2 * self.features, INCLUSIVE)(windows(y)), 2, axis=-1)
        return h + a * nn.sigmoid(b)


def drop_out(key: Array, h: Maps, rate: float) -> Maps:
    """Set each value to zero with probability `rate`, rounded to 16 bits, and divide the others by 1 - rate."""
    # Two values share the 32 bits of a random number, because drawing random numbers is slow on a CPU.
    pairs = jax.random.bits(key, (*h.shape[:-1], -(-h.shape[-1] // 2)), jnp.uint32)
    bits = lax.bitcast_convert_type(pairs, jnp.uint16).reshape(*h.shape[:-1], -1)[..., : h.shape[-1]]
    threshold = round(rate * 2**16)
    return jnp.where(bits >= threshold, h / (1 - threshold / 2**16), 0.0)


def attend(
    query: Float[Array, "h Q d"], key: Float[Array, "h d K"], value: Float[Array, "h d K"], first: Int[Array, ""] | int
) -> Float[Array, "h Q d"]:
    """Let pixels first, first + 1, ... attend to all pixels before them. The result is zero for pixel 0."""
    # Pixels are the last axis of keys and values, because then no product of the backward pass needs a transpose.
    scores = jnp.einsum("hqd,hdk->hqk", query / np.sqrt(query.shape[-1]), key)
    position = first + jnp.arange(query.shape[1])
    scores = jnp.where(jnp.arange(key.shape[2]) < position[:, None], scores, -1e30)
    most = checkpoint_name(lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)), ATTENTION)
    # One product for the weighted values and for the sum of the weights.
    values = jnp.concatenate([value, jnp.ones_like(value[:, :1])], axis=1)
    sums = checkpoint_name(jnp.einsum("hqk,hdk->hqd", jnp.exp(scores - most), values), ATTENTION)
    return jnp.where((position > 0)[:, None], sums[..., :-1] / sums[..., -1:], 0.0)


def causal_attention(
    query: Float[Array, "B h L d"], key: Float[Array, "B h d L"], value: Float[Array, "B h d L"]
) -> Float[Array, "B h L d"]:
    """Apply `attend` to all pixels. Only the scores of one chunk of a few images are in memory at a time."""
    heads, length = query.shape[1:3]
    size = min(length, max(SMALLEST_CHUNK, -(-length // CHUNKS)))
    keep = jax.checkpoint_policies.save_only_these_names(ATTENTION)

    @functools.partial(jax.checkpoint, static_argnums=3, policy=keep, prevent_cse=False)
    def chunk(q: Array, k: Array, v: Array, start: int) -> Array:
        end = start + size  # slices are taken inside, so no copies are stored
        return attend(q[:, start:end], k[..., :end], v[..., :end], start)

    def image(qkv: tuple[Array, Array, Array]) -> Array:
        return jnp.concatenate([chunk(*qkv, start) for start in range(0, length, size)], axis=1)

    most = SCORE_BYTES if jax.default_backend() == "cpu" else ACCELERATOR_SCORE_BYTES
    images = max(1, most // (4 * heads * size * length))
    return lax.map(image, (query, key, value), batch_size=images if images > 1 else None)
