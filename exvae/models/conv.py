"""Convolutions in NHWC layout that are fast on CPUs (`conv_cpu.py`) and accelerators (XLA's convolution)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Float

from exvae.arrays import Array
from exvae.models import conv_cpu
from exvae.models.conv_cpu import Images, Kernel, Layer, Outputs, Padding
from exvae.models.layers import RESULT


def conv2d(x: Images, kernel: Kernel, *, stride: int = 1, padding: Padding | None = None) -> Outputs:
    """Convolve images with a kernel.

    Args:
      padding: zeros around the images. By default h = ceil(H / stride) and w = ceil(W / stride), and the kernel must
        have an odd height and width.
    """
    return convolve([Layer(kernel, None, stride, _same(kernel) if padding is None else padding, None)], x)


def convolve(layers: Sequence[Layer], x: Images) -> Outputs:
    """Apply several convolutions one after another."""
    mesh = jax.sharding.get_abstract_mesh()
    # Without a mesh, the devices that hold the images are unknown. A loop over them would gather them on every device.
    if jax.default_backend() == "cpu" and not (mesh.empty and jax.device_count() > 1):
        y = _on_each_device(conv_cpu.convolve, layers, x)
    else:
        y = plain(layers, x)
    return y if layers[-1].finish else checkpoint_name(y, RESULT)


def plain(layers: Sequence[Layer], x: Images) -> Outputs:
    """Apply the layers with XLA's convolution."""
    for kernel, params, stride, padding, finish in layers:
        y = lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = y if finish is None else finish(params, checkpoint_name(y, RESULT))
    return x


def _on_each_device(convolve: Callable[..., Outputs], layers: Sequence[Layer], x: Images) -> Outputs:
    """Split the images over the devices of the context (`scale.sharding.context`)."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto)
    if not axes or mesh.size == 1 or len(x) % mesh.size:
        return convolve(layers, x)

    def local(arrays: list[tuple[Kernel, Any]], x: Images) -> Outputs:
        pairs = zip(arrays, layers, strict=True)
        return convolve([layer._replace(kernel=kernel, params=params) for (kernel, params), layer in pairs], x)

    part = PartitionSpec(axes)
    split = jax.shard_map(local, mesh=mesh, in_specs=(PartitionSpec(), part), out_specs=part, check_vma=False)
    return split([(layer.kernel, layer.params) for layer in layers], x)


def _same(kernel: Kernel) -> Padding:
    """Return the padding that keeps the size of the images."""
    k, l = kernel.shape[:2]  # noqa: E741
    if k % 2 == 0 or l % 2 == 0:
        raise ValueError(f"kernel.shape={kernel.shape} must start with two odd numbers")
    return (k // 2, k // 2), (l // 2, l // 2)


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


class GatedConv(nn.Module):
    """(W * x + b) sigmoid(V * x + c), where * is the convolution. Value and gate have separate parameters."""

    features: int
    kernel_size: int
    stride: int = 1

    def __call__(self, x: Images) -> Outputs:
        return chain([self], x)

    @nn.compact
    def layer(self, x: jax.ShapeDtypeStruct) -> Layer:
        """Return the layer for images of this shape. Both kernels share one convolution."""
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        init = uniform_init(shape)
        kernel = self.param("kernel", init, shape)
        bias = self.param("bias", init, shape[-1:])
        gate_kernel = self.param("gate_kernel", init, shape)
        gate_bias = self.param("gate_bias", init, shape[-1:])
        both = jnp.concatenate([kernel, gate_kernel], -1)
        return Layer(both, (bias, gate_bias), self.stride, _same(both), _gate)


def _gate(biases: tuple[Float[Array, " F"], Float[Array, " F"]], y: Float[Array, "B h w 2*F"]) -> Outputs:
    value, gate = jnp.split(y, 2, -1)
    return (value + biases[0]) * jax.nn.sigmoid(gate + biases[1])


class Conv(nn.Module):
    """Plain convolution. If `double`, each pixel is doubled in both directions first."""

    features: int
    kernel_size: int = 1
    stride: int = 1
    double: bool = False
    use_bias: bool = True

    def __call__(self, x: Images) -> Outputs:
        if not self.double:
            return chain([self], x)
        layer = self.layer(jax.ShapeDtypeStruct(x.shape, x.dtype))
        y = conv2d_of_doubled(x, layer.kernel)
        return y if layer.finish is None else layer.finish(layer.params, y)

    @nn.compact
    def layer(self, x: jax.ShapeDtypeStruct) -> Layer:
        """Return the layer for images of this shape."""
        shape = (self.kernel_size, self.kernel_size, x.shape[-1], self.features)
        init = uniform_init(shape)
        kernel = self.param("kernel", init, shape)
        bias, finish = (self.param("bias", init, shape[-1:]), _add_bias) if self.use_bias else (None, None)
        return Layer(kernel, bias, self.stride, _same(kernel), finish)


def _add_bias(bias: Float[Array, " F"], y: Outputs) -> Outputs:
    return y + bias


def chain(modules: Sequence[GatedConv | Conv], x: Images) -> Outputs:
    """Apply several modules one after another. On a CPU this is faster than to call one after another."""
    layers, shape = [], jax.ShapeDtypeStruct(x.shape, x.dtype)
    for module in modules:
        layers.append(module.layer(shape))
        shape = layers[-1].output(shape)
    return convolve(layers, x)


def uniform_init(kernel_shape: tuple[int, int, int, int]) -> Callable[[Array, tuple[int, ...]], Array]:
    """Return the initialiser U(-1/sqrt(fan_in), 1/sqrt(fan_in)) of kernel and bias, with fan_in = k l C."""
    bound = math.prod(kernel_shape[:3]) ** -0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)
