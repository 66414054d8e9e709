"""Encoding of many images, in blocks, to posteriors or latent means."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8

from exvae import models
from exvae.arrays import Array
from exvae.data.batches import map_batches
from exvae.data.store import Store
from exvae.distributions import Normal, to_unit
from exvae.models.layers import RESULT
from exvae.scale import sharding

BLOCK = 1000  # images encoded at a time


def encode_means(
    model: nn.Module,
    params: dict,
    images: UInt8[Array, "N H W C"],
    index: Int[Array, " U"],
    *,
    activation_bytes: float = float("inf"),
    block: int | None = None,
) -> Float[Array, "U D"]:
    """Encode the images `index` to their latent means mu(x_j), differentiable in params.

    Activations take bounded memory for any U. The results of linear layers are stored for the backward pass, in as many
    blocks as fit into `activation_bytes`. The backward pass computes everything else again.

    Args:
      index: rows of `images` to encode.
      activation_bytes: memory for stored results.
      block: images encoded at a time. The default is BLOCK.
    """

    def encode(params: dict, index: Int[Array, " b"]) -> Float[Array, "b D"]:
        return models.apply(model, params, to_unit(images[index]), method="encode").mean

    block = block or BLOCK
    if len(index) <= block:
        return encode(params, index)
    pad = -len(index) % block
    blocks = jnp.pad(index, (0, pad)).reshape(-1, block)
    keep = jax.checkpoint(encode, policy=jax.checkpoint_policies.save_only_these_names(RESULT))
    kept = int(min(len(blocks), activation_bytes / (block * _bytes_per_image(keep, params))))
    parts = []
    for block_fn, part in ((keep, blocks[:kept]), (jax.checkpoint(encode), blocks[kept:])):
        if len(part):
            parts.append(lax.map(functools.partial(block_fn, params), part).reshape(-1, model.latent_dim))
    return jnp.concatenate(parts)[: len(index)]


def encode_split(
    mesh: Mesh,
    model: nn.Module,
    params: dict,
    images: UInt8[Array, "_ H W C"],
    index: Int[Array, " U"] | None,
    *,
    activation_bytes: float = float("inf"),
    block: int | None = None,
) -> Float[Array, "U D"]:
    """Run `encode_means` on all devices, each for its part of U. U must be a multiple of their number.

    Args:
      images: the images that `index` selects from, on every device. If `index` is None, the U images themselves, split
        over the devices.
    """
    whole, part = sharding.WHOLE, sharding.PART

    def local(params: dict, images: Array, index: Array | None) -> Array:
        index = jnp.arange(len(images)) if index is None else index
        return encode_means(model, params, images, index, activation_bytes=activation_bytes, block=block)

    in_specs = (whole, part if index is None else whole, part)
    return sharding.per_device(mesh, local, in_specs, part)(params, images, index)


def _bytes_per_image(block_fn: Callable, params: dict) -> int:
    """Return the bytes stored per image for the backward pass: two images minus one, so that weights cancel."""

    def kept(num_images: int) -> int:
        index = jax.ShapeDtypeStruct((num_images,), jnp.int32)
        _, backward = jax.eval_shape(lambda p, i: jax.vjp(lambda q: block_fn(q, i), p), params, index)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))

    return kept(2) - kept(1)


def make_encode_all(model: nn.Module, mesh: Mesh, block: int) -> Callable[[dict, Store], Float[Array, "R D"]]:
    """Make the function (params, store) -> latent means of all images, `block` at a time on each device.

    The result has R rows, N rounded up to a multiple of the number of devices. Each device encodes its own part of the
    rows, so a process reads only the images of its own devices.
    """
    exactly = jax.default_matmul_precision("highest")

    @functools.partial(jax.jit, out_shardings=sharding.part(mesh))
    @exactly
    def encode_whole(params: dict, images: UInt8[Array, "N H W C"]) -> Float[Array, "R D"]:
        rows = jnp.arange(sharding.round_up(len(images), mesh))
        return encode_split(mesh, model, params, images, jnp.minimum(rows, len(images) - 1), block=block)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=sharding.part(mesh))
    @exactly
    def encode_block(
        table: Float[Array, "R D"], start: Int[Array, ""], params: dict, images: UInt8[Array, "b H W C"]
    ) -> Float[Array, "R D"]:
        write = lambda table, means, start: lax.dynamic_update_slice(table, means, (start, 0))  # noqa: E731
        write = sharding.per_device(mesh, write, (sharding.PART, sharding.PART, sharding.WHOLE), sharding.PART)
        return write(table, encode_split(mesh, model, params, images, None), start)

    def encode_all(params: dict, store: Store) -> Float[Array, "R D"]:
        if store.whole is not None:
            return encode_whole(params, store.whole)
        num_rows = sharding.round_up(len(store), mesh)
        per_device = num_rows // mesh.size
        size = min(block, per_device)
        first = np.arange(num_rows)[sharding.own_rows(mesh, num_rows)][::per_device, None]  # for each own device
        table = sharding.zeros(mesh, (num_rows, model.latent_dim))
        for start in range(0, per_device, size):
            start = min(start, per_device - size)  # the last block overlaps the one before
            rows = first + start + np.arange(size)
            images = store.take(np.minimum(rows, len(store) - 1).reshape(-1))
            table = encode_block(table, start, params, images)
        return table

    return encode_all


@functools.partial(jax.jit, static_argnums=(0, 1))
@jax.default_matmul_precision("highest")  # accelerators round the factors of products by default
def posterior(mesh: Mesh, model: nn.Module, params: dict, images: UInt8[Array, "B H W C"]) -> Normal:
    """Encode images to q(z|x), the posterior of the top latent."""
    with sharding.context(mesh):
        return models.apply(model, params, to_unit(images), method="encode")


def encode(mesh: Mesh, model: nn.Module, params: dict, images: UInt8[np.ndarray, "n H W C"]) -> Normal:
    """Encode any number of images to q(z|x), streamed from the host."""
    size = 2 * model.block_rows * mesh.size
    return map_batches(lambda _, batch: posterior(mesh, model, params, batch), images, size, mesh)
