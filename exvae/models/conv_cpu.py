"""Convolutions on a CPU, as matrix products.

XLA's convolution is slow on CPUs, especially in the gradients. There are three ways to write one as products of
matrices. `_choose` selects one by the shapes. `python -m benchmarks.conv` measures them.

winograd        stride 1, and many channels on both sides. The product of two small polynomials needs fewer
                multiplications if both are evaluated at a few points first (Winograd, 1980; Lavin & Gray, 2016). A
                tile of 2x2 outputs of a 3x3 kernel takes 16 for each pair of channels instead of 36.
input patches   a stride, or few input channels. One product of all patches of the images with the kernel.
output patches  few output channels. The other way round: each pixel is multiplied with the whole kernel, and the
                results are added to patches of the output.

A few images at a time pass through all layers of a stack, so that the factors of the products stay in the cache. The
backward pass computes these factors again.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from exvae.arrays import Array
from exvae.models.layers import RESULT

# Memory of the factors and results of the products of one piece of a batch. The products of smaller pieces are too
# small for full speed. Larger pieces do not stay in the cache. For Winograd it is the memory of 16 products or more.
PATCH_BYTES, TILE_BYTES = 4 * 2**20, 6 * 2**20
# A product has at least this many rows, because each piece reads the whole kernel and adds to its whole gradient.
ROWS = 512
MANY_CHANNELS = 16  # with fewer, transforming the tiles takes longer than the multiplications that it saves
SMALL = 4  # results of this height or width have too few tiles for the time that transforming the kernel takes
TILE = 2  # outputs of a tile in each direction. Larger tiles are rarely faster, and round four times as much
# Points of the transform, in this order; the last is infinity. These are the most accurate ones for kernels of five.
POINTS = (0, 1, -1, 2, Fraction(-1, 2))
LARGEST = len(POINTS) + 2 - TILE  # kernel with enough points

Images = Float[Array, "B H W C"]
Kernel = Float[Array, "k l C F"]
Outputs = Float[Array, "B h w F"]
Padding = tuple[tuple[int, int], tuple[int, int]]  # zeros above and below, left and right
NO_PADDING: Padding = ((0, 0), (0, 0))
Weights = tuple[Float[Array, "C F"], ...]  # of Winograd: one matrix for each point
Both = tuple[Weights, tuple[Float[Array, "F C"], ...]]  # of a kernel, and of the kernel turned around


class Layer(NamedTuple):
    """A convolution, and a function (params, result) that is applied to its result. Stride and padding are static."""

    kernel: Kernel
    params: Any
    stride: int
    padding: Padding
    finish: Callable[[Any, Outputs], Outputs] | None

    def output(self, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        """Return the shape of the result for images of shape `x`."""
        h, w = output_size(x.shape[1:], self.kernel, self.stride, self.padding)
        y = jax.ShapeDtypeStruct((len(x), h, w, self.kernel.shape[-1]), x.dtype)
        return y if self.finish is None else jax.eval_shape(self.finish, self.params, y)


class Products(NamedTuple):
    """A convolution as matrix products."""

    weights: Any  # the kernel in the form that the products need
    apply: Callable[[Any, Images], Outputs]  # (weights, images) -> result
    piece: int  # number of images to process at a time


def convolve(layers: Sequence[Layer], x: Images) -> Outputs:
    """Apply layers one after another. A piece of the batch passes through all of them while it is in the cache."""
    products, shape = [], jax.ShapeDtypeStruct(x.shape, x.dtype)
    for layer in layers:
        products.append(_choose(shape.shape[1:], layer.kernel, layer.stride, layer.padding))
        shape = layer.output(shape)

    def pass_through(arrays: list[tuple[Any, Any]], x: Images) -> Outputs:
        for layer, product, (weights, params) in zip(layers, products, arrays, strict=True):
            y = product.apply(weights, x)
            x = y if layer.finish is None else layer.finish(params, checkpoint_name(y, RESULT))
        return x

    # Only results that `finish` needs are kept for the backward pass.
    pass_through = jax.checkpoint(pass_through, policy=jax.checkpoint_policies.save_only_these_names(RESULT))
    arrays = [(product.weights, layer.params) for product, layer in zip(products, layers, strict=True)]
    size = _divisor(len(x), min(product.piece for product in products))
    if size == len(x):
        return pass_through(arrays, x)
    y = lax.map(functools.partial(pass_through, arrays), _pieces(x, size))
    return y.reshape(-1, *y.shape[2:])[: len(x)]


def _choose(image: tuple[int, ...], kernel: Kernel, stride: int, padding: Padding) -> Products:
    k, l, channels, features = kernel.shape  # noqa: E741
    if (k, l) == (1, 1) and padding == NO_PADDING:
        return Products(kernel[0, 0], lambda matrix, x: x[:, ::stride, ::stride] @ matrix, sys.maxsize)
    if stride > 1:
        return input_patches(image, kernel, stride, padding)
    within = max(*padding[0], *padding[1]) < min(k, l)  # each result depends on a pixel of the image
    fits = min(k, l) >= 2 and max(k, l) <= LARGEST and min(output_size(image, kernel, 1, padding)) > SMALL
    if within and fits and min(channels, features) >= MANY_CHANNELS:
        return winograd(image, kernel, padding)
    if within and features < channels:
        return output_patches(image, kernel, padding)
    return input_patches(image, kernel, stride, padding)


def output_size(image: tuple[int, ...], kernel: Kernel, stride: int, padding: Padding) -> tuple[int, int]:
    """Return height and width of the result."""
    sizes = (n + sum(p) - k for n, p, k in zip(image[:2], padding, kernel.shape[:2], strict=True))
    h, w = (size // stride + 1 for size in sizes)
    return h, w


def _piece(bytes_per_image: int, rows_per_image: int, most_bytes: int) -> int:
    """Return the number of images of a piece."""
    return max(1, most_bytes // bytes_per_image, ROWS // rows_per_image)


def _divisor(num_images: int, most: int) -> int:
    """Return a divisor of `num_images` if there is one between most / 2 and `most`, to avoid padding."""
    most = max(1, min(num_images, most))
    return next((n for n in range(most, most // 2, -1) if num_images % n == 0), most)


def _pieces(x: Images, size: int) -> Float[Array, "P size H W C"]:
    """Cut a batch into pieces. Images of zeros pad the last one. They add nothing to any gradient."""
    missing = -len(x) % size
    if missing:
        x = jnp.pad(x, ((0, missing), (0, 0), (0, 0), (0, 0)))
    return x.reshape(-1, size, *x.shape[1:])


# Patches ------------------------------------------------------------------------------------------------------------


def input_patches(image: tuple[int, ...], kernel: Kernel, stride: int, padding: Padding) -> Products:
    """y = patches(x) @ kernel."""
    k, l, _, features = kernel.shape  # noqa: E741

    def apply(matrix: Float[Array, "klC F"], x: Images) -> Outputs:
        rows = _patches(x, (k, l), stride, padding)
        return (rows.reshape(-1, len(matrix)) @ matrix).reshape(*rows.shape[:3], features)

    h, w = output_size(image, kernel, stride, padding)
    matrix = kernel.reshape(-1, features)
    return Products(matrix, apply, _piece(4 * h * w * sum(matrix.shape), h * w, PATCH_BYTES))


def output_patches(image: tuple[int, ...], kernel: Kernel, padding: Padding) -> Products:
    """The transpose of `input_patches`: the input is the gradient of a convolution of the output."""
    (height, width, channels), (k, l, _, features) = image, kernel.shape  # noqa: E741
    h, w = output_size(image, kernel, 1, padding)
    back = _turned((k, l), padding)

    def apply(matrix: Float[Array, "klF C"], x: Images) -> Outputs:
        outputs = jax.ShapeDtypeStruct((len(x), h, w, features), x.dtype)
        add = jax.linear_transpose(lambda y: _patches(y, (k, l), 1, back), outputs)
        return add((x.reshape(-1, channels) @ matrix.T).reshape(*x.shape[:3], -1))[0]

    matrix = kernel[::-1, ::-1].transpose(0, 1, 3, 2).reshape(-1, channels)
    return Products(matrix, apply, _piece(4 * height * width * len(matrix), height * width, PATCH_BYTES))


def _patches(x: Images, size: tuple[int, int], stride: int, padding: Padding) -> Float[Array, "B h w klC"]:
    """Cut out the k x l patch of each output position, in the order of the rows of kernel.reshape(-1, F)."""
    k, l = size  # noqa: E741
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    height, width = x.shape[1] - k + 1, x.shape[2] - l + 1
    # Columns first, then rows: k + l slices compile faster than k * l, especially for k = 7.
    x = jnp.concatenate([x[:, :, j : j + width : stride] for j in range(l)], -1)
    return jnp.concatenate([x[:, i : i + height : stride] for i in range(k)], -1)


# Winograd -----------------------------------------------------------------------------------------------------------


class Transform(NamedTuple):
    """The matrices of `taps` weights g and a window d: the TILE outputs of the convolution are A ((G g) * (B d))."""

    output: Float[np.ndarray, "m n"]  # A
    weights: Float[np.ndarray, "n r"]  # G
    window: Float[np.ndarray, "n n"]  # B


@functools.cache
def transform(taps: int) -> Transform:
    """Return the transform of Toom and Cook: evaluate two polynomials at n points, multiply, and interpolate.

    That computes a product of polynomials. A convolution is its transpose, so the window is interpolated (B), and the
    results are evaluated (A).
    """
    n = TILE + taps - 1
    points = [Fraction(point) for point in POINTS[: n - 1]]
    assert len(points) == n - 1, f"no points for a kernel of {taps}"
    others = [points[:i] + points[i + 1 :] for i in range(len(points))]
    window = [[*_polynomial(roots), Fraction(0)] for roots in others] + [_polynomial(points)]
    scales = [math.prod(point - root for root in roots) for point, roots in zip(points, others, strict=True)] + [1]
    powers = [[point**i for i in range(n)] for point in points]
    output = [*(row[:TILE] for row in powers), _last(TILE)]
    weights = [*(row[:taps] for row in powers), _last(taps)]
    return Transform(
        output=np.array(output, np.float64).T,
        weights=np.array(weights, np.float64) / np.array(scales, np.float64)[:, None],
        window=np.array(window, np.float64),
    )


def _last(size: int) -> list[int]:
    """The value of a polynomial at infinity: its last coefficient."""
    return [0] * (size - 1) + [1]


def _polynomial(roots: Sequence[Fraction]) -> list[Fraction]:
    """The coefficients of prod_i (x - roots_i), the constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return coefficients


def winograd(image: tuple[int, ...], kernel: Kernel, padding: Padding) -> Products:
    """A (G g G^T * B d B^T) A^T for each tile. All tiles of a piece share one product for each of the points.

    The gradient of the images is a convolution of the gradient of the result, with the kernel turned around. That is
    faster than the transpose of cutting out windows.
    """
    (height, width, channels), (k, l, _, features) = image, kernel.shape  # noqa: E741
    h, w = output_size(image, kernel, 1, padding)
    around = kernel[::-1, ::-1].swapaxes(2, 3)

    @jax.custom_vjp
    def apply(weights: Both, x: Images) -> Outputs:
        return _tiles(weights[0], x, (k, l), padding, (h, w))

    def forward(weights: Both, x: Images) -> tuple[Outputs, tuple]:
        return apply(weights, x), (weights, x)

    def backward(saved: tuple, dy: Outputs) -> tuple:
        (weights, back), x = saved
        dx = _tiles(back, dy, (k, l), _turned((k, l), padding), (height, width))
        (d_weights,) = jax.linear_transpose(lambda weights: _tiles(weights, x, (k, l), padding, (h, w)), weights)(dy)
        return (d_weights, jax.tree.map(jnp.zeros_like, back)), dx

    apply.defvjp(forward, backward)
    num_tiles = -(-h // TILE) * -(-w // TILE)
    num_points = (TILE + k - 1) * (TILE + l - 1)
    size = _piece(4 * num_tiles * num_points * (channels + features), num_tiles, TILE_BYTES)
    return Products((_at_points(kernel), _at_points(around)), apply, size)


def _turned(size: tuple[int, int], padding: Padding) -> Padding:
    """Return the padding of the results that gives images: the transpose of a convolution is a convolution."""
    (k, l), ((top, bottom), (left, right)) = size, padding  # noqa: E741
    return (k - 1 - top, k - 1 - bottom), (l - 1 - left, l - 1 - right)


def _at_points(kernel: Kernel) -> Weights:
    """Evaluate the polynomials of the kernel at all points: G g G^T."""
    k, l, channels, features = kernel.shape  # noqa: E741
    both = np.einsum("ik,jl->ijkl", transform(k).weights, transform(l).weights).astype(kernel.dtype)
    return tuple(jnp.einsum("ijkl,klcf->ijcf", both, kernel).reshape(-1, channels, features))


def _tiles(weights: Weights, x: Images, size: tuple[int, int], padding: Padding, output: tuple[int, int]) -> Outputs:
    """Apply a kernel whose polynomials were evaluated at all points."""
    (vertical, horizontal), (h, w), n = map(transform, size), output, len(transform(size[1]).window)
    tiles = -(-h // TILE), -(-w // TILE)
    more = [(a, b + TILE * t - s) for (a, b), t, s in zip(padding, tiles, output, strict=True)]
    # Without barriers, the compiler would compute the first half of each transform again in every second half.
    rows = _combine(vertical.window, _windows(jnp.pad(x, ((0, 0), *more, (0, 0))), 1, tiles[0], size[0]))
    rows = lax.optimization_barrier(rows)
    points = [part for row in rows for part in _combine(horizontal.window, _windows(row, 2, tiles[1], size[1]))]
    flat = [part.reshape(-1, x.shape[-1]) @ weight for part, weight in zip(points, weights, strict=True)]
    points = [part.reshape(-1, *tiles, part.shape[-1]) for part in flat]
    halves = [_combine(horizontal.output, points[i : i + n]) for i in range(0, len(points), n)]
    columns = lax.optimization_barrier([_interleave(half, 2) for half in halves])
    return _interleave(_combine(vertical.output, columns), 1)[:, :h, :w]


def _windows(x: Images, axis: int, tiles: int, taps: int) -> list[Array]:
    """Return element i of the window of every tile, for each i. Windows of neighbouring tiles overlap."""
    last = TILE * (tiles - 1) + 1
    return [lax.slice_in_dim(x, i, i + last, TILE, axis) for i in range(TILE + taps - 1)]


def _combine(matrix: Float[np.ndarray, "n m"], parts: list[Array]) -> list[Array]:
    """Return matrix @ parts, without the products with 0, 1 and -1."""
    terms = ([_times(float(c), part) for c, part in zip(row, parts, strict=True) if c] for row in matrix)
    return [functools.reduce(jnp.add, row) for row in terms]


def _times(factor: float, part: Array) -> Array:
    return part if factor == 1 else -part if factor == -1 else factor * part


def _interleave(parts: list[Array], axis: int) -> Array:
    """Join element i of every tile, for each i, to whole rows or columns."""
    y = jnp.stack(parts, axis + 1)
    return y.reshape(*y.shape[:axis], -1, *y.shape[axis + 2 :])
