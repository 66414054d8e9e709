"""Outputs depend only on earlier pixels. Derivatives show this, and changes of one pixel at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae.models import causal
from exvae.models.pixelsnail import Decoder

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower
H, W, F = 4, 5, 6


@functools.partial(jax.jit, static_argnums=(0, 2), compiler_options=QUICKLY)
def initialised(module, x, *windows):
    return module.init(jax.random.key(0), x, *windows)


def drawn(module, method):
    """Parameters with the scale of initialised ones, without compiling the initialisation."""
    rng = np.random.default_rng(5)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), jnp.zeros((1, H, W, 2)), method=method))
    return jax.tree.map(lambda s: rng.uniform(-0.5, 0.5, s.shape).astype(np.float32), shapes)


def dependence(f, shape):
    """(L, L): whether output pixel i depends on input pixel j, for any of three inputs."""
    rng = np.random.default_rng(0)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def jacobian(x):
        out, pull = jax.vjp(f, x)
        (grads,) = jax.vmap(pull)(jnp.eye(out.size).reshape(-1, *out.shape))  # (output, 1, H, W, C)
        return jnp.abs(grads).reshape(H * W, -1, H * W, x.shape[-1]).sum((1, 3))

    # A derivative may vanish by chance for one input, but not for three.
    return sum(np.asarray(jacobian(rng.normal(size=shape).astype(np.float32))) for _ in range(3)) > 0


def masked_conv(mask):
    module = causal.WeightNormConv(F, mask)
    variables = initialised(module, jnp.zeros((1, H + 1, W + 2, 2)))
    return lambda x: module.apply(variables, causal.all_windows(x))


def residual():
    module = causal.GatedResidual(2, 0.1)
    variables = initialised(module, jnp.zeros((1, H, W, 2)), causal.all_windows)
    return lambda x: module.apply(variables, x, causal.all_windows)


def attention():
    """x gives keys and values. Queries are constant, because a query may depend on the pixel at its own place."""
    mix = np.random.default_rng(3).normal(size=(2, 2 * 3)).astype(np.float32)
    query = np.random.default_rng(4).normal(size=(1, 2, H * W, 3)).astype(np.float32)

    def f(x):
        heads = (x @ mix).reshape(1, H * W, 2, 3).swapaxes(1, 2)
        keys = heads.swapaxes(2, 3)
        return causal.causal_attention(query, keys, keys + 1.0).swapaxes(1, 2).reshape(1, H, W, 6)

    return f


def decoder():
    module = Decoder(F, (H, W, 2))
    maps = np.random.default_rng(1).normal(size=(1, H, W, 2)).astype(np.float32)

    def logits(module, x):
        return module(x, module.context(maps))

    variables = drawn(module, logits)
    return lambda x: module.apply(variables, x, method=logits)


LAYERS = {
    "first convolution": (functools.partial(masked_conv, causal.ABOVE_AND_LEFT), "strictly"),
    "masked convolution": (functools.partial(masked_conv, causal.INCLUSIVE), "inclusive"),
    "gated residual": (residual, "inclusive"),
    "attention": (attention, "strictly"),
    "decoder": (decoder, "strictly"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_pixels_depend_only_on_earlier_pixels(name):
    make, kind = LAYERS[name]
    seen = dependence(make(), (1, H, W, 2))
    before = np.tril(np.ones((H * W, H * W), bool), -1 if kind == "strictly" else 0)
    assert not seen[~before].any()
    if name in ("attention", "decoder"):
        np.testing.assert_array_equal(seen, before)  # and depend on all of them
    else:  # a window reaches only one row and one column, but every pixel except the last affects a later one
        assert all(seen[j + 1 :, j].any() for j in range(H * W - 1))


def test_changed_pixel_changes_only_later_logits():
    """The full decoder, with a finite change of one pixel at a time."""
    logits = jax.jit(decoder(), compiler_options=QUICKLY)
    x = np.random.default_rng(2).integers(0, 2, (1, H, W, 2)).astype(np.float32)
    base = np.asarray(logits(x)).reshape(H * W, -1)
    for j in range(H * W):
        changed = x.copy()
        changed.reshape(H * W, 2)[j] = 1 - changed.reshape(H * W, 2)[j]
        now = np.asarray(logits(changed)).reshape(H * W, -1)
        np.testing.assert_array_equal(now[: j + 1], base[: j + 1])
        assert j == H * W - 1 or np.abs(now[j + 1 :] - base[j + 1 :]).max() > 1e-6


def test_attention_equals_a_softmax_over_earlier_pixels(monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v, pull = (rng.normal(size=(3, 2, 10, 4)).astype(np.float32) for _ in range(4))
    want = np.zeros((3, 2, 10, 4))
    for b, h, i in np.ndindex(3, 2, 10):
        if i:
            weights = np.exp(k[b, h, :i].astype(np.float64) @ q[b, h, i] / 2)
            want[b, h, i] = weights / weights.sum() @ v[b, h, :i]

    def run():
        out, back = jax.vjp(causal.causal_attention, q, k.swapaxes(2, 3), v.swapaxes(2, 3))
        return out, back(pull)

    whole = jax.jit(run, compiler_options=QUICKLY)()
    np.testing.assert_allclose(whole[0], want, atol=1e-5)
    # Chunks that do not divide the length, with one image at a time, give the same values and gradients.
    monkeypatch.setattr(causal, "SMALLEST_CHUNK", 4)
    monkeypatch.setattr(causal, "SCORE_BYTES", 0)
    chunked = jax.jit(lambda: run(), compiler_options=QUICKLY)()
    np.testing.assert_allclose(chunked[0], want, atol=1e-5)
    for got, expected in zip(chunked[1], whole[1], strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_attention_keeps_no_scores_for_the_backward_pass():
    q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 8, 784, 4), (2, 8, 4, 784)))
    _, back = jax.eval_shape(lambda q, k, v: jax.vjp(causal.causal_attention, q, k, v), q, k, k)
    kept = sum(leaf.size for leaf in jax.tree.leaves(back))
    assert kept < 10 * 784 * 32  # query, key and value of two images, and little else


def test_weight_norm_starts_at_the_drawn_kernel_and_scales_with_its_gain():
    module = causal.WeightNormConv(5, causal.INCLUSIVE)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 3)).astype(np.float32)
    params = initialised(module, x)["params"]
    mask = np.array(causal.INCLUSIVE)[:, :, None, None]
    kernel = np.asarray(params["direction"], np.float64) * mask

    def brute_force(kernel):
        out = np.zeros((2, 3, 3, 5))
        for i, j in np.ndindex(2, 3):
            out += x[:, i : i + 3, j : j + 3] @ kernel[i, j]
        return out + np.asarray(params["bias"])

    np.testing.assert_allclose(module.apply({"params": params}, x), brute_force(kernel), atol=1e-5)
    gain = np.arange(1.0, 6.0).astype(np.float32)
    kernel *= gain / np.sqrt((kernel**2).sum((0, 1, 2)))
    params = {**params, "gain": gain, "direction": 7.0 * params["direction"]}  # its norm does not matter
    np.testing.assert_allclose(module.apply({"params": params}, x), brute_force(kernel), atol=1e-4)


def test_dropout_is_active_only_in_training():
    module = causal.GatedResidual(4, 0.5)
    x = np.random.default_rng(0).normal(size=(1, 3, 3, 4)).astype(np.float32)
    variables = initialised(module, x, causal.all_windows)
    apply = jax.jit(lambda **rngs: module.apply(variables, x, causal.all_windows, **rngs))
    plain = [apply() for _ in range(2)]
    np.testing.assert_array_equal(*plain)
    trained = [apply(rngs={"dropout": jax.random.key(seed)}) for seed in range(2)]
    assert np.abs(trained[0] - plain[0]).max() > 1e-3 and np.abs(trained[0] - trained[1]).max() > 1e-3


@pytest.mark.parametrize("features", [64, 5])
def test_dropout_keeps_the_mean_and_drops_the_rate(features):
    h = np.ones((20, 28, 28, features), np.float32)
    y = np.asarray(jax.jit(causal.drop_out, static_argnums=2)(jax.random.key(0), h, 0.1))
    values, counts = np.unique(y, return_counts=True)
    error = 4 * np.sqrt(0.1 * 0.9 / y.size)
    assert len(values) == 2 and values[0] == 0 and abs(values[1] - 1 / 0.9) < 1e-4
    assert abs(counts[0] / y.size - 0.1) < error
    kept = y.reshape(-1, features) > 0  # also the two values that share a random number are independent
    both = (kept[:, 0] & kept[:, 1]).mean()
    assert abs(both - 0.81) < 4 * np.sqrt(0.81 * 0.19 / len(kept))
