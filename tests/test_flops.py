"""The benchmarks' count of operations: layers equal formulas, models equal the products in their gradient."""

import math

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from benchmarks import flops
from exvae import models
from exvae.config import get_config
from exvae.models.causal import ABOVE_AND_LEFT, INCLUSIVE, WeightNormConv, all_windows
from exvae.models.conv import Conv, GatedConv
from exvae.models.layers import Dense


def build(architecture, image_shape, **fields):
    config = get_config().model
    config.update({"architecture": architecture, "latent_dim": 3, "lower_latent_dim": 2, "hidden_dim": 5, **fields})
    return models.build(config, image_shape)


def layer_flops(layer, *inputs):
    total = 0

    def record(call, args, kwargs, context):
        nonlocal total
        out = call(*args, **kwargs)
        total += flops.call_flops(context.module, context.method_name, args, out)
        return out

    with nn.intercept_methods(record):
        jax.eval_shape(lambda: layer.init_with_output(jax.random.key(0), *inputs)[0])
    return total


@pytest.mark.parametrize(
    "layer, products",
    [
        (Dense(7), 2 * 5 * 4 * 7 * 3),
        (Conv(7, 3), 2 * 5 * 4 * 7 * 9 * 3),
        (Conv(7, 5, stride=2), 2 * 3 * 2 * 7 * 25 * 3),
        (Conv(7, 5, double=True), 2 * 10 * 8 * 7 * 9 * 3),
        (GatedConv(7, 3), 2 * 5 * 4 * 2 * 7 * 9 * 3),
        (WeightNormConv(7), 2 * 5 * 4 * 7 * 3),
    ],
)
def test_layer_counts_the_products_of_each_output(layer, products):
    assert layer_flops(layer, jnp.zeros((2, 5, 4, 3))) == 2 * products


def test_dense_of_two_inputs_counts_the_rows_of_each():
    assert layer_flops(Dense(7), jnp.zeros((2, 3)), jnp.zeros((6, 5))) == 2 * 7 * (2 * 3 + 6 * 5)


@pytest.mark.parametrize("mask, taps", [(ABOVE_AND_LEFT, 4), (INCLUSIVE, 5)])
def test_masked_layer_counts_only_visible_pixels(mask, taps):
    assert layer_flops(WeightNormConv(7, mask), all_windows(jnp.zeros((2, 5, 4, 3)))) == 2 * 2 * 5 * 4 * 7 * taps * 3


def test_attention_counts_each_pair_of_pixels_once():
    pairs = sum(1 for query in range(6) for key in range(6) if key < query)
    assert flops.attention_flops(jnp.zeros((2, 8, 6, 4))) == 2 * (2 * pairs * 8 * 4) * 2  # scores and values


def test_pixelsnail_logits_equal_the_formula():
    """2x3 images, F = 4 channels: every product of the decoder, layer by layer."""
    model = build("pixelsnail", (2, 3, 1), channels=4)
    pixels, f, heads = 2 * 3, 4, 32
    from_z = 2 * pixels * (3 + 2) + pixels * f * 9 * 2  # two gated dense layers, then 3x3 of two maps
    blocks = 4 * pixels * (f * 5 * f + 2 * f * 5 * f)
    attention = pixels * heads * (f + 4) + pixels * 2 * heads * (1 + f + 4) + 2 * heads * pixels * (pixels - 1) // 2
    head = pixels * (heads * f + f * f + f)
    expected = 2 * (pixels * f * 4 * 1 + from_z + blocks + attention + head)
    assert flops.drawing_flops(model, 5)[1] == 5 * expected


def test_pixelsnail_training_has_two_gradients_except_of_images():
    """The first layers of encoders and decoder read images, whose gradient is not needed."""
    model = build("pixelsnail", (4, 4, 1), channels=4)
    forward = flops.count(model, "terms", jax.random.key(0), jnp.zeros((5, 4, 4, 1)))
    first_layers = 16 * (2 * 32 * 49 + 2 * 32 * 9 + 4 * 4)  # of the encoders of z2 and z1, and of the decoder
    assert flops.training_flops(model, "terms", 5) == 3 * forward - 2 * 5 * first_layers


def multiplied(jaxpr):
    """Twice the number of multiplications in all matrix products of a program, including loops."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            total += 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
        inner = sum(multiplied(getattr(p, "jaxpr", p)) for p in equation.params.values() if _is_program(p))
        total += equation.params.get("length", 1) * inner
    return total


def _is_program(value):
    return hasattr(getattr(value, "jaxpr", value), "eqns")


def gradient_flops(model, batch, argnums):
    params, statistics = jax.eval_shape(lambda: models.init(jax.random.key(0), model))

    def loss(params, x, statistics):
        key, whole = jax.random.key(0), {"model": params, **statistics}
        terms, _ = models.training_terms(key, key, model, whole, x)
        return jnp.sum(terms.log_px + terms.log_ratio - terms.log_q)

    x = jnp.zeros((batch, *model.image_shape))
    return multiplied(jax.make_jaxpr(jax.grad(loss, argnums))(params, x, statistics).jaxpr)


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_training_counts_what_the_gradient_multiplies(architecture):
    model = build(architecture, (4, 4, 1))
    assert flops.training_flops(model, "terms", 7) == gradient_flops(model, 7, argnums=0)


@pytest.mark.parametrize("architecture, size", [("vae", 4), ("hvae", 4), ("convhvae", 8), ("celeba", 16)])
def test_training_on_learned_images_counts_what_the_gradient_multiplies(architecture, size, few_layers):
    """The difference between 128 and 64 images is exact, because products of kernels, done once per batch, cancel."""
    model = build(architecture, (size, size, 1), channels=2)
    counts = [flops.training_flops(model, "terms", batch, learned_images=True) for batch in (64, 128)]
    found = [gradient_flops(model, batch, argnums=(0, 1)) for batch in (64, 128)]
    assert counts[1] - counts[0] == counts[0] == found[1] - found[0]
