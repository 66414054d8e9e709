from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from exvae.models import conv


def normal(seed, *shape):
    # From NumPy, because jax.random compiles a program for every shape.
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def reference(x, kernel, stride):
    p = kernel.shape[0] // 2
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, kernel, (stride, stride), [(p, p)] * 2, dimension_numbers=dims)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@partial(jax.jit, static_argnums=0)
def value_and_gradients(f, x, kernel, dy):
    y, pull = jax.vjp(f, x, kernel)
    return y, pull(dy)


@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("stride, size", [(1, (8, 7)), (2, (7, 8))])
def test_conv2d_equals_lax_conv(monkeypatch, k, stride, size):
    # A piece holds three images. Seven images are no multiple of three and have no divisor close to it.
    c, f = 2, 3
    positions = -(-size[0] // stride) * -(-size[1] // stride)
    monkeypatch.setattr(conv, "PIECE_BYTES", 3 * 4 * positions * (k * k * c + f))
    x = normal(0, 7, *size, c)
    kernel = normal(1, k, k, c, f)
    dy = normal(2, *reference(x, kernel, stride).shape)
    got = value_and_gradients(lambda x, w: conv.conv2d(x, w, stride=stride), x, kernel, dy)
    want = value_and_gradients(lambda x, w: reference(x, w, stride), x, kernel, dy)
    assert_close(got, want)


@pytest.mark.parametrize("num_images, budget, want", [(1100, 18, 11), (7, 3, 3), (5, 100, 5), (13, 0.5, 1), (0, 9, 1)])
def test_pieces_prefer_a_divisor_of_the_batch(num_images, budget, want):
    assert conv._images_per_piece(num_images, int(conv.PIECE_BYTES / budget)) == want


@pytest.mark.parametrize("padding", [((1, 0), (1, 1)), conv.NO_PADDING])
def test_conv2d_of_any_kernel_and_padding_equals_lax_conv(padding):
    x, kernel = normal(0, 5, 6, 7, 2), normal(1, 2, 3, 2, 4)

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

    dy = normal(2, *plain(x, kernel).shape)
    got = value_and_gradients(lambda x, w: conv.conv2d(x, w, padding=padding), x, kernel, dy)
    assert_close(got, value_and_gradients(plain, x, kernel, dy))


def test_conv2d_of_doubled_equals_doubling_first():
    x, kernel, dy = normal(0, 3, 4, 5, 2), normal(1, 5, 5, 2, 3), normal(2, 3, 8, 10, 3)

    def plain(x, kernel):
        return reference(x.repeat(2, axis=1).repeat(2, axis=2), kernel, 1)

    assert_close(value_and_gradients(conv.conv2d_of_doubled, x, kernel, dy), value_and_gradients(plain, x, kernel, dy))


def test_conv2d_rejects_even_kernels():
    with pytest.raises(ValueError, match="odd"):
        conv.conv2d(jnp.zeros((1, 4, 4, 1)), jnp.zeros((2, 2, 1, 1)))


def test_unneeded_image_gradient_is_not_computed(monkeypatch):
    monkeypatch.setattr(conv, "PIECE_BYTES", 1)  # one image at a time, so that each computation is a loop
    x, kernel = jnp.ones((4, 6, 6, 2)), jnp.ones((3, 3, 2, 4))

    def loops(argnums):
        grad = jax.jit(jax.grad(lambda x, w: jnp.sum(conv.conv2d(x, w) ** 2), argnums))
        return grad.lower(x, kernel).as_text().count("stablehlo.while")

    assert loops(1) == loops((0, 1)) - 1


def test_gated_conv_equals_formula():
    stride = 2
    module = conv.GatedConv(features=4, kernel_size=3, stride=stride)
    x = normal(1, 3, 7, 7, 2)
    variables = jax.jit(module.init)(jax.random.key(2), x)

    def formula(variables, x):
        p = variables["params"]
        value = reference(x, p["kernel"], stride) + p["bias"]
        return value * jax.nn.sigmoid(reference(x, p["gate_kernel"], stride) + p["gate_bias"])

    def run(f):
        return jax.jit(jax.value_and_grad(lambda v, x: jnp.sum(f(v, x) ** 2), (0, 1)))(variables, x)

    assert_close(module.apply(variables, x), formula(variables, x))
    assert_close(run(module.apply), run(formula))


def test_conv_equals_formula():
    module = conv.Conv(features=2)
    x = normal(1, 3, 4, 4, 5)
    variables = jax.jit(module.init)(jax.random.key(2), x)
    p = variables["params"]
    assert_close(module.apply(variables, x), reference(x, p["kernel"], 1) + p["bias"])


@pytest.mark.parametrize(
    "module, names",
    [
        (conv.GatedConv(features=64, kernel_size=3), {"kernel", "bias", "gate_kernel", "gate_bias"}),
        (conv.Conv(features=64, kernel_size=3), {"kernel", "bias"}),
    ],
)
def test_init_fills_the_range_of_fan_in(module, names):
    params = jax.jit(module.init)(jax.random.key(0), jnp.zeros((1, 4, 4, 16)))["params"]
    bound = (3 * 3 * 16) ** -0.5
    assert set(params) == names
    for leaf in params.values():
        assert bound * 0.8 < jnp.abs(leaf).max() <= bound
        assert abs(leaf.mean()) < bound / 4
    flat = [np.asarray(leaf).ravel()[:64] for leaf in params.values()]
    assert len(np.unique(np.stack(flat), axis=0)) == len(names)  # every tensor has its own random numbers
