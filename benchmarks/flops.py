"""Counts of the necessary floating point operations: products and convolutions, without recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

from exvae import models
from exvae.models.causal import WeightNormConv
from exvae.models.conv import Conv, GatedConv
from exvae.models.layers import Dense
from exvae.models.pixelsnail import Decoder


def square_product() -> tuple[Callable[[], jax.Array], float]:
    """Return a function that computes a float32 product, for comparison with a step, and its GFLOP."""
    n = 1024
    a, product = jnp.ones((n, n)), jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    return lambda: product(a, a).block_until_ready(), 2 * n**3 / 1e9


def call_flops(module: nn.Module, method: str, inputs: Sequence[Any], outputs: Any) -> int:
    """Twice the multiplications of this call in a forward pass. Modules inside it count separately."""
    if isinstance(module, Decoder):
        return attention_flops(outputs) if method == "queries" else 0
    if isinstance(module, (Conv, GatedConv)) and method == "layer":  # several layers may be called at once
        outputs = outputs.output(inputs[0])
    elif not isinstance(module, (Dense, WeightNormConv)) or method != "__call__":
        return 0
    if isinstance(module, Dense):
        return 2 * module.features * sum(part.size for part in inputs)
    if isinstance(module, WeightNormConv):
        taps = int(np.sum(module.mask))  # masked taps could be omitted
    elif isinstance(module, Conv) and module.double:
        taps = 4 * ((module.kernel_size + 1) // 2) ** 2  # different pixels under a kernel, for four times the outputs
    else:
        taps = module.kernel_size**2
    return 2 * outputs.size * taps * inputs[0].shape[-1] * (2 if isinstance(module, GatedConv) else 1)


def attention_flops(queries: jax.Array) -> int:
    """The scores and the weighted values of every pixel with all pixels before it."""
    images, heads, length, dim = queries.shape
    return 2 * 2 * images * length * (length - 1) // 2 * heads * dim


def count(
    model: nn.Module, method: str, *args: Any, passes: Callable[[nn.Module, jax.Array], int] = lambda *_: 1
) -> int:
    """The FLOP of one call of a method with arguments of these shapes. Each module counts `passes` times."""
    total = 0

    def record(call: Callable, args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        nonlocal total
        out = call(*args, **kwargs)
        if flops := call_flops(context.module, context.method_name, args, out):
            total += passes(context.module, args[0]) * flops
        return out

    params, statistics = jax.eval_shape(lambda: models.init(jax.random.key(0), model))
    with nn.intercept_methods(record):
        whole = {"model": params, **statistics}
        jax.eval_shape(lambda whole, *args: models.apply(model, whole, *args, method=method), whole, *args)
    return total


def training_flops(model: nn.Module, method: str, batch: int, *, learned_images: bool = False) -> int:
    """The FLOP of the forward pass, and of the gradients of the weights and inputs of every linear layer.

    Images need no gradient, unless they are learned (pseudo-inputs). Only the mean of an exemplar is used.
    """
    x = jax.ShapeDtypeStruct((batch, *model.image_shape), jnp.float32)

    def passes(module: nn.Module, inputs: jax.Array) -> int:
        if method == "encode" and module.name == "log_var" and not learned_images:
            return 0
        return 2 if _reads_image(module, inputs, x) and not learned_images else 3

    return count(model, method, *((jax.random.key(0), x) if method == "terms" else (x,)), passes=passes)


def _reads_image(module: nn.Module, inputs: jax.Array, x: jax.ShapeDtypeStruct) -> bool:
    if module.name == "from_x":  # first layer of a decoder that reads the image, with a border around it
        return True
    return inputs.size == x.size and any("from_x" in part or part == "encoder" for part in module.path)


def sample_flops(model: nn.Module) -> int:
    """The FLOP of one importance sample of an image: everything after its encoders."""
    params, statistics = jax.eval_shape(lambda: models.init(jax.random.key(0), model))
    x = jax.ShapeDtypeStruct((1, *model.image_shape), jnp.float32)
    observe = functools.partial(models.apply, model, method="observe")
    return count(model, "draw", jax.random.key(0), jax.eval_shape(observe, {"model": params, **statistics}, x))


def drawing_flops(model: nn.Module, num_images: int) -> tuple[int, int]:
    """The FLOP to draw the lower latents given z, and of one pass of an autoregressive decoder over all pixels."""
    z = jax.ShapeDtypeStruct((num_images, model.latent_dim), jnp.float32)
    z1 = jax.ShapeDtypeStruct((num_images, model.lower_latent_dim), jnp.float32)
    x = jax.ShapeDtypeStruct((num_images, *model.image_shape), jnp.float32)
    return count(model, "complete", jax.random.key(0), z), count(model, "logits", x, z, z1)


def image_gflop(config: ConfigDict, model: nn.Module, num_exemplars: int, candidates: int) -> float:
    """The GFLOP of the log-likelihood of one image: S samples with the candidates, and the audit with all exemplars."""
    samples, dim = config.eval.iwae_samples, config.model.latent_dim
    total = samples * sample_flops(model) + 2 * samples * candidates * dim
    if candidates < num_exemplars:
        total += 2 * num_exemplars * dim * (1 + 2 * config.eval.audit)  # distances, and two audits
    return total / 1e9


def step_gflop(config: ConfigDict, model: nn.Module) -> float:
    """The GFLOP of one training step with this config."""
    batch, dim = config.train.batch_size, config.model.latent_dim
    total = training_flops(model, "terms", batch)
    if config.prior.name == "vamp":
        count = config.prior.num_pseudo_inputs
        total += training_flops(model, "encode", count, learned_images=True) + 3 * 2 * (2 * batch * count * dim)
    if config.prior.name == "exemplar":
        search = config.retrieval.search != "none"
        count = batch * config.retrieval.num_neighbours if search else config.prior.num_exemplars
        total += training_flops(model, "encode", count) + 3 * (2 * batch * count * dim)
        total += 2 * batch * config.prior.num_exemplars * dim if config.retrieval.search == "exact" else 0
    return total / 1e9
