"""Convolutions in NHWC layout that are fast on CPUs and accelerators.

XLA's CPU convolution is slow, especially in the gradient of the kernel. On a CPU a convolution is therefore a matrix
product of image patches and the kernel. The patches of a whole batch do not fit into the cache, so a few images are
processed at a time. The backward pass builds the patches again instead of storing them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float

from exvae.arrays import Array

# Size of the patches and outputs of one piece of a batch. The matrix products of smaller pieces are too small for full
# speed. The patches of larger pieces do not stay in the cache.
PIECE_BYTES = 4 * 2**20

Images = Float[Array, "B H W C"]
Kernel = Float[Array, "k l C F"]
Padding = tuple[tuple[int, int], tuple[int, int]]  # zeros above and below, left and right
NO_PADDING: Padding = ((0, 0), (0, 0))


def conv2d(x: Images, kernel: Kernel, *, stride: int = 1, padding: Padding | None = None) -> Float[Array, "B h w F"]:
    """Convolve images with a kernel.

    Args:
      padding: zeros around the images. By default h = ceil(H / stride) and w = ceil(W / stride), and the kernel must
        have an odd height and width.
    """
    if padding is None:
        k, l = kernel.shape[:2]  # noqa: E741
        if k % 2 == 0 or l % 2 == 0:
            raise ValueError(f"kernel.shape={kernel.shape} must start with two odd numbers")
        padding = ((k // 2, k // 2), (l // 2, l // 2))
    if kernel.shape[:2] == (1, 1) and padding == NO_PADDING:
        return x[:, ::stride, ::stride] @ kernel[0, 0]
    # Only on a single device: with several, a loop over the batch would first gather it on each of them.
    if jax.default_backend() == "cpu" and jax.device_count() == 1:
        return _conv_by_patches(x, kernel, stride, padding)
    return lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


# How a 5x5 kernel acts on an image of doubled size. An output in an even row (first matrix) or an odd row (second
# matrix) depends on three rows of the small image. The weight of each is a sum of kernel rows.
_DOUBLED = np.array(
    [
        [[1, 1, 0, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]],
        [[1, 0, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 1]],
    ],
    np.float32,
)


def conv2d_of_doubled(x: Images, kernel: Float[Array, "5 5 C F"]) -> Float[Array, "B 2*H 2*W F"]:
    """Double each pixel of `x` in both directions, then apply conv2d, with 9 instead of 25 products per output.

    The result is one convolution of the small image with four 3x3 kernels, one for each place in a 2x2 block of the
    output.
    """
    b, h, w, c = x.shape
    f = kernel.shape[-1]
    small = jnp.einsum("pik,qjl,klcf->ijcpqf", _DOUBLED, _DOUBLED, kernel).reshape(3, 3, c, 4 * f)
    y = conv2d(x, small).reshape(b, h, w, 2, 2, f)
    return y.transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * h, 2 * w, f)


def gated_conv(
    x: Images,
    kernel: Kernel,
    bias: Float[Array, " F"],
    gate_kernel: Kernel,
    gate_bias: Float[Array, " F"],
    *,
    stride: int = 1,
) -> Float[Array, "B h w F"]:
    """(W * x + b) sigmoid(V * x + c), where * is the convolution. Both kernels share one convolution."""
    y = conv2d(x, jnp.concatenate([kernel, gate_kernel], -1), stride=stride)
    value, gate = jnp.split(y, 2, -1)
    return (value + bias) * jax.nn.sigmoid(gate + gate_bias)


class GatedConv(nn.Module):
    """Gated convolution. Value and gate have separate parameters."""

    features: int
    kernel_size: int
    stride: int = 1

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B h w F"]:
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        init = uniform_init(shape)
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, shape[-1:])
        gate_kernel = self.param("gate_kernel", init, shape)
        gate_bias = self.param("gate_bias", init, shape[-1:])
        return gated_conv(x, kernel, bias, gate_kernel, gate_bias, stride=self.stride)


class Conv(nn.Module):
    """Plain convolution. If `double`, each pixel is doubled in both directions first."""

    features: int
    kernel_size: int = 1
    stride: int = 1
    double: bool = False
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Images) -> Float[Array, "B h w F"]:
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        init = uniform_init(shape)
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, shape[-1:]) if self.use_bias else 0.0
        return (conv2d_of_doubled(x, kernel) if self.double else conv2d(x, kernel, stride=self.stride)) + bias


def uniform_init(kernel_shape: tuple[int, int, int, int]) -> Callable[[Array, tuple[int, ...]], Array]:
    """Return the initialiser U(-1/sqrt(fan_in), 1/sqrt(fan_in)) of kernel and bias, with fan_in = k l C."""
    bound = math.prod(kernel_shape[:3]) ** -0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


# The CPU path -------------------------------------------------------------------------------------------------------


def _patches(x: Images, size: tuple[int, ...], stride: int, padding: Padding) -> Float[Array, "B h w klC"]:
    """Cut out the k x l patch of each output position, in the order of the rows of kernel.reshape(-1, F)."""
    k, l = size  # noqa: E741
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    height, width = x.shape[1] - k + 1, x.shape[2] - l + 1
    # Columns first, then rows: k + l slices compile faster than k * l, especially for k = 7.
    x = jnp.concatenate([x[:, :, j : j + width : stride] for j in range(l)], -1)
    return jnp.concatenate([x[:, i : i + height : stride] for i in range(k)], -1)


def _images_per_piece(num_images: int, bytes_per_image: int) -> int:
    """Return how many images take about PIECE_BYTES: a divisor of `num_images` if possible, to avoid padding."""
    most = max(1, min(num_images, PIECE_BYTES // bytes_per_image))
    return next((n for n in range(most, most // 2, -1) if num_images % n == 0), most)


def _pieces(a: Float[Array, "B ..."], size: int) -> Float[Array, "P size ..."]:
    """Cut a batch into pieces. Pad the last one with images of zeros, which add nothing to any gradient."""
    missing = -a.shape[0] % size
    if missing:
        a = jnp.pad(a, [(0, missing)] + [(0, 0)] * (a.ndim - 1))
    return a.reshape(-1, size, *a.shape[1:])


def _map(f: Callable[[Array], Array], pieces: Float[Array, "P ..."]) -> Float[Array, "P ..."]:
    """Apply lax.map, but without a loop if there is only one piece."""
    return lax.map(f, pieces) if len(pieces) > 1 else f(pieces[0])[None]


class _Sizes(NamedTuple):
    """The sizes of a convolution by patches."""

    window: tuple[int, ...]  # (k, l)
    stride: int
    padding: Padding
    image: tuple[int, ...]  # (H, W, C)
    out: tuple[int, ...]  # (h, w, F)
    piece: int  # images of a piece


def _conv_by_patches(x: Images, kernel: Kernel, stride: int, padding: Padding) -> Float[Array, "B h w F"]:
    """y = patches(x) @ kernel, one piece of the batch at a time, forward and backward."""
    window, (c, f) = kernel.shape[:2], kernel.shape[2:]
    b, height, width, _ = x.shape
    h, w = (-(-(n + sum(p) - k + 1) // stride) for n, p, k in zip((height, width), padding, window, strict=True))
    piece = _images_per_piece(b, 4 * h * w * (math.prod(window) * c + f))
    return _conv_in_pieces(_Sizes(window, stride, padding, (height, width, c), (h, w, f), piece), x, kernel)


def _patch_rows(sizes: _Sizes, x: Images) -> Float[Array, "rows klC"]:
    rows = _patches(x, sizes.window, sizes.stride, sizes.padding)
    return rows.reshape(-1, rows.shape[-1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _conv_in_pieces(sizes: _Sizes, x: Images, kernel: Kernel) -> Float[Array, "B h w F"]:
    matrix = kernel.reshape(-1, sizes.out[-1])
    y = _map(lambda piece: _patch_rows(sizes, piece) @ matrix, _pieces(x, sizes.piece))
    return y.reshape(-1, *sizes.out)[: len(x)]


def _forward(sizes: _Sizes, x: Images, kernel: Kernel) -> tuple[Array, tuple[Array, Array]]:
    return _conv_in_pieces(sizes, x, kernel), (x, kernel)


def _backward(sizes: _Sizes, saved: tuple[Array, Array], dy: Float[Array, "B h w F"]) -> tuple[Array, Array]:
    x, kernel = saved
    f = sizes.out[-1]
    matrix, dy_pieces = kernel.reshape(-1, f), _pieces(dy, sizes.piece)

    def add_kernel_gradient(total: Array | float, piece: tuple[Array, Array]) -> tuple[Array, None]:
        x_piece, dy_piece = piece
        return total + _patch_rows(sizes, x_piece).T @ dy_piece.reshape(-1, f), None

    # Two loops instead of one: if x needs no gradient, as in a first layer, the compiler removes the second loop.
    pieces = (_pieces(x, sizes.piece), dy_pieces)
    if len(dy_pieces) > 1:
        d_matrix, _ = lax.scan(add_kernel_gradient, jnp.zeros_like(matrix), pieces)
    else:
        d_matrix, _ = add_kernel_gradient(0.0, jax.tree.map(lambda a: a[0], pieces))
    one_piece = jax.ShapeDtypeStruct((sizes.piece, *sizes.image), x.dtype)
    to_images = jax.linear_transpose(functools.partial(_patch_rows, sizes), one_piece)
    dx = _map(lambda dy_piece: to_images(dy_piece.reshape(-1, f) @ matrix.T)[0], dy_pieces)
    return dx.reshape(-1, *sizes.image)[: len(x)], d_matrix.reshape(kernel.shape)


_conv_in_pieces.defvjp(_forward, _backward)
