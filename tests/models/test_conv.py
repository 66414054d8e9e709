from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from exvae.models import conv, conv_cpu


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
def test_conv2d_equals_lax_conv(k, stride, size):
    x, kernel = normal(0, 4, *size, 2), normal(1, k, k, 2, 3)
    dy = normal(2, *reference(x, kernel, stride).shape)
    got = value_and_gradients(lambda x, w: conv.conv2d(x, w, stride=stride), x, kernel, dy)
    want = value_and_gradients(lambda x, w: reference(x, w, stride), x, kernel, dy)
    assert_close(got, want)


METHODS = {
    "winograd": lambda image, kernel, padding: conv_cpu.winograd(image, kernel, padding),
    "input patches": lambda image, kernel, padding: conv_cpu.input_patches(image, kernel, 1, padding),
    "output patches": lambda image, kernel, padding: conv_cpu.output_patches(image, kernel, padding),
}
SIZES = [
    ((3, 3), ((1, 1), (1, 1))),
    ((4, 4), ((0, 1), (1, 2))),
    ((2, 3), ((1, 0), (1, 1))),
    ((3, 2), conv_cpu.NO_PADDING),
]


@pytest.mark.parametrize("window, padding", SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_each_method_equals_lax_conv_in_float64(method, window, padding):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        x, kernel = jnp.asarray(rng.normal(size=(3, 7, 6, 2))), jnp.asarray(rng.normal(size=(*window, 2, 3)))

        def plain(x, kernel):
            return lax.conv_general_dilated(x, kernel, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))

        def products(x, kernel):
            found = METHODS[method](x.shape[1:], kernel, padding)
            return found.apply(found.weights, x)

        dy = jnp.asarray(rng.normal(size=plain(x, kernel).shape))
        got, want = (value_and_gradients(f, x, kernel, dy) for f in (products, plain))
        assert got[0].dtype == jnp.float64
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("taps", range(2, conv_cpu.LARGEST + 1))
def test_winograd_transform_computes_a_convolution(taps):
    matrices = conv_cpu.transform(taps)
    rng = np.random.default_rng(taps)
    weights, window = rng.normal(size=taps), rng.normal(size=taps + conv_cpu.TILE - 1)
    got = matrices.output @ ((matrices.weights @ weights) * (matrices.window @ window))
    np.testing.assert_allclose(got, np.correlate(window, weights, "valid"), rtol=1e-12)


def test_winograd_rounds_little_more_than_patches():
    x, kernel = normal(0, 4, 14, 14, 64), normal(1, 3, 3, 64, 64) / 24
    with jax.enable_x64(True):
        exact = jax.jit(reference, static_argnums=2)(x.astype(np.float64), kernel.astype(np.float64), 1)
    errors = {}
    for name, method in METHODS.items():
        found = method(x.shape[1:], kernel, ((1, 1), (1, 1)))
        errors[name] = np.sqrt(np.mean((np.asarray(jax.jit(found.apply)(found.weights, x)) - np.asarray(exact)) ** 2))
    assert errors["winograd"] < 4 * errors["input patches"] < 4e-6


@pytest.mark.parametrize(
    "size, shape, stride, method",
    [
        (14, (3, 3, 64, 128), 1, "winograd"),
        (4, (3, 3, 64, 128), 1, "input_patches"),
        (14, (3, 3, 64, 128), 2, "input_patches"),
        (14, (3, 3, 1, 64), 1, "input_patches"),
        (14, (3, 3, 64, 6), 1, "output_patches"),
        (14, (7, 7, 64, 64), 1, "input_patches"),  # no points for so large a kernel
    ],
)
def test_method_depends_on_the_shapes(monkeypatch, size, shape, stride, method):
    for name in ("winograd", "input_patches", "output_patches"):
        monkeypatch.setattr(conv_cpu, name, lambda *_, name=name: conv_cpu.Products(name, mock.Mock(), 1))
    k = shape[0] // 2
    assert conv_cpu._choose((size, size, shape[2]), jnp.zeros(shape), stride, ((k, k), (k, k))).weights == method


@pytest.mark.parametrize("num_images, most, want", [(1100, 18, 11), (7, 3, 3), (5, 100, 5), (13, 0, 1), (0, 9, 1)])
def test_pieces_prefer_a_divisor_of_the_batch(num_images, most, want):
    assert conv_cpu._divisor(num_images, most) == want


@pytest.mark.parametrize("num_images", [1, 6, 7])
def test_layers_in_pieces_equal_one_layer_after_another(monkeypatch, num_images):
    # A piece holds three images. Seven images are no multiple of three.
    for name, value in {"PATCH_BYTES": 0, "TILE_BYTES": 0, "ROWS": 3 * 8 * 7, "MANY_CHANNELS": 2}.items():
        monkeypatch.setattr(conv_cpu, name, value)
    modules = [conv.GatedConv(4, 3), conv.GatedConv(2, 3, 2), conv.Conv(3, 1), conv.Conv(2, 5, use_bias=False)]
    x = normal(1, num_images, 8, 7, 2)
    inputs = [jnp.zeros((1, 8, 7, channels)) for channels in (2, 4, 2, 3)]
    init = jax.jit(lambda key: [module.init(key, h) for module, h in zip(modules, inputs, strict=True)])
    variables = init(jax.random.key(2))

    def run(apply):
        def f(variables, x):
            layers, shape = [], jax.ShapeDtypeStruct(x.shape, x.dtype)
            for module, own in zip(modules, variables, strict=True):
                layers.append(module.apply(own, shape, method="layer"))
                shape = layers[-1].output(shape)
            y = apply(layers, x)
            assert y.shape == shape.shape
            return jnp.sum(y**2), y

        return jax.jit(jax.value_and_grad(f, (0, 1), has_aux=True))(variables, x)

    assert_close(run(conv_cpu.convolve), run(conv.plain))


@pytest.mark.parametrize("padding", [((1, 0), (1, 1)), conv_cpu.NO_PADDING])
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


def test_unneeded_image_gradient_is_not_computed():
    x, kernel = jnp.ones((4, 6, 6, 2)), jnp.ones((3, 3, 2, 4))

    def products(argnums):
        grad = jax.jit(jax.grad(lambda x, w: jnp.sum(conv.conv2d(x, w) ** 2), argnums))
        return grad.lower(x, kernel).compile().as_text().count(" dot(")

    assert products(1) == products((0, 1)) - 1


def test_accelerators_keep_the_plain_convolution(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    x, kernel = jnp.ones((4, 6, 6, 2)), jnp.ones((3, 3, 2, 4))
    for platform in ("cuda", "tpu"):
        program = jax.export.export(jax.jit(conv.conv2d), platforms=[platform])(x, kernel).mlir_module()
        assert "stablehlo.convolution" in program and "dot_general" not in program


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
