"""Floating point operations that cannot be done without: products and convolutions, no recomputation."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from exvae import models
from exvae.models.conv import Conv, GatedConv
from exvae.models.layers import Dense


def square_product() -> tuple[Callable[[], jax.Array], float]:
    """A float32 product whose rate a step is measured against: the call, and its GFLOP."""
    n = 1024
    a, product = jnp.ones((n, n)), jax.jit(jnp.matmul)
    product(a, a).block_until_ready()
    return lambda: product(a, a).block_until_ready(), 2 * n**3 / 1e9


def layer_flops(module: nn.Module, inputs: jax.Array, outputs: jax.Array) -> int:
    """2 x multiplications of one forward pass of a linear layer."""
    if isinstance(module, Dense):
        return 2 * outputs.size * inputs.shape[-1]
    fan_in = module.kernel_size**2 * inputs.shape[-1]
    return 2 * outputs.size * fan_in * (2 if isinstance(module, GatedConv) else 1)


def training_flops(model: nn.Module, method: str, batch: int, *, learned_images: bool = False) -> int:
    """Forward, gradient of the weights and gradient of the inputs of every linear layer.

    Images need no gradient, unless they are learned (pseudo-inputs); of exemplars only the mean is used.
    """
    image_size = math.prod(model.image_shape)
    total = 0

    def record(call, args, kwargs, context):
        nonlocal total
        out = call(*args, **kwargs)
        unused = method == "encode" and context.module.name == "log_var" and not learned_images
        if isinstance(context.module, Dense | Conv | GatedConv) and context.method_name == "__call__" and not unused:
            is_image = args[0].size == batch * image_size and _reads_image(context.module)
            passes = 2 if is_image and not learned_images else 3
            total += passes * layer_flops(context.module, args[0], out)
        return out

    def apply(params, x):
        args = (jax.random.key(0), x) if method == "terms" else (x,)
        return model.apply({"params": params}, *args, method=method)

    with nn.intercept_methods(record):
        params = jax.eval_shape(lambda: models.init(jax.random.key(0), model))
        total = 0  # what initialisation called does not count
        jax.eval_shape(apply, params, jnp.zeros((batch, *model.image_shape)))
    return total


def sample_flops(model: nn.Module) -> int:
    """One importance sample of an image: everything below its encoders."""
    total = 0

    def record(call, args, kwargs, context):
        nonlocal total
        out = call(*args, **kwargs)
        if isinstance(context.module, Dense | Conv | GatedConv) and context.method_name == "__call__":
            total += layer_flops(context.module, args[0], out)
        return out

    params = jax.eval_shape(lambda: models.init(jax.random.key(0), model))
    x = jnp.zeros((1, *model.image_shape))
    seen = jax.eval_shape(lambda p: model.apply({"params": p}, x, method="observe"), params)
    with nn.intercept_methods(record):
        jax.eval_shape(lambda p, seen: model.apply({"params": p}, jax.random.key(0), seen, method="draw"), params, seen)
    return total


def image_gflop(config: Any, model: nn.Module, num_exemplars: int, candidates: int) -> float:
    """Log-likelihood of one image: S samples against the candidates, and the audit against all exemplars."""
    samples, dim = config.eval.iwae_samples, config.model.latent_dim
    total = samples * sample_flops(model) + 2 * samples * candidates * dim
    if candidates < num_exemplars:
        total += 2 * num_exemplars * dim * (1 + 2 * config.eval.audit)  # distances, and two audits
    return total / 1e9


def _reads_image(module: nn.Module) -> bool:
    return any("from_x" in part or part == "encoder" for part in module.path)


def step_gflop(config: Any, model: nn.Module) -> float:
    """One step of batch B under the config's prior."""
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
