"""The Parzen window prior over exemplar means, Eq. (8): exact, streamed, differentiable."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from exvae.distributions import LOG_2PI
from exvae.retrieval import NOBODY
from exvae.scale import sharding

BLOCK = 2048  # exemplars scored at a time: a (B, BLOCK) tile of the distance matrix stays in the cache
# TPUs and recent GPUs would round the factors of a float32 product; distances are differences of large numbers.
_product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


def exemplar_log_prob(
    z: Float[Array, "B D"],
    means: Float[Array, "U D"],
    log_var: Float[Array, ""],
    *,
    count: Float[Array, " B"] | float,
    exemplar_index: Int[Array, " U"] | None = None,
    leave_out: Int[Array, " B"] | None = None,
    neighbours: Int[Array, "B K"] | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, " B"]:
    """log 1/M sum_j N(z | mu_j, sigma^2 I), Eq. (8), over the exemplars j that z may see.

    One function for all objectives of the paper. Exact over everything in `means`; where those are the K nearest only,
    a lower bound, Eq. (9), because `count` stays M. Streams over blocks of exemplars, forward and backward: no array
    larger than (B, BLOCK) or `means` exists. Differentiable in z, means and log_var.

    Args:
      z: latent codes.
      means: mu(x_j) of the exemplars.
      log_var: log sigma^2.
      count: M, the number of components that the mixture divides by; may differ between rows (leave-one-out).
      exemplar_index: number of each exemplar in the training set, or NOBODY for a slot to be skipped.
      leave_out: number of the image behind each row of z: that exemplar is skipped (O1).
      neighbours: exemplar numbers that each row may see at all; None: every one.
      mesh: its devices each take a part of the exemplars; None: this device takes them all.
    """
    batch, dim = z.shape
    if exemplar_index is None:
        exemplar_index = jnp.arange(means.shape[0])
    if leave_out is None:
        leave_out = jnp.full(batch, NOBODY)
    if mesh is not None:
        pad = sharding.round_up(len(means), mesh) - len(means)
        means = jnp.pad(means, ((0, pad), (0, 0)))
        exemplar_index = jnp.pad(exemplar_index, (0, pad), constant_values=NOBODY)
    log_sum = _log_sum_exp(mesh, z, means, log_var, exemplar_index, leave_out, neighbours)
    return log_sum - jnp.log(count) - 0.5 * dim * (LOG_2PI + log_var)  # Eq. (8)


def _tiles(means: Array, exemplar_index: Array) -> tuple[Array, Array]:
    """Cut the exemplars into equal blocks: (T, BLOCK, D) and (T, BLOCK), the rest filled with NOBODY."""
    block = min(BLOCK, means.shape[0])
    pad = -means.shape[0] % block
    means = jnp.pad(means, ((0, pad), (0, 0)))
    exemplar_index = jnp.pad(exemplar_index, (0, pad), constant_values=NOBODY)
    return means.reshape(-1, block, means.shape[1]), exemplar_index.reshape(-1, block)


def _exponents(z, means, log_var, index, leave_out, neighbours) -> Float[Array, "B U"]:
    """-||z - mu||^2 / (2 sigma^2) by ONE matrix product; -inf where the row may not see the exemplar."""
    half_norms = 0.5 * jnp.sum(jnp.square(z), -1)[:, None] + 0.5 * jnp.sum(jnp.square(means), -1)[None, :]
    exponents = (_product(z, means.T) - half_norms) * jnp.exp(-log_var)
    seen = (index != NOBODY)[None, :] & (index[None, :] != leave_out[:, None])
    if neighbours is not None:
        seen &= jnp.any(neighbours[:, :, None] == index[None, None, :], axis=1)
    return jnp.where(seen, exponents, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_sum_exp(mesh, z, means, log_var, exemplar_index, leave_out, neighbours) -> Float[Array, " B"]:
    """log sum_j exp(-||z - mu_j||^2 / (2 sigma^2)) with a running maximum and sum over blocks, then over devices."""

    def local(z, means, log_var, exemplar_index, leave_out, neighbours):
        def add(carry, tile):
            top, total = carry
            exponents = _exponents(z, tile[0], log_var, tile[1], leave_out, neighbours)
            new_top = jnp.maximum(top, jnp.max(exponents, -1))
            shift = _finite(new_top)
            total = total * jnp.exp(top - shift) + jnp.sum(jnp.exp(exponents - shift[:, None]), -1)
            return (new_top, total), None

        start = (jnp.full(z.shape[0], -jnp.inf), jnp.zeros(z.shape[0]))
        (top, total), _ = lax.scan(add, start, _tiles(means, exemplar_index))
        if mesh is not None:
            highest = lax.pmax(top, sharding.AXIS)
            total = lax.psum(total * jnp.exp(top - _finite(highest)), sharding.AXIS)
            top = highest
        return top + jnp.log(total)

    split = _over_exemplars(mesh, local, sharding.WHOLE)
    return split(z, means, log_var, exemplar_index, leave_out, neighbours)


def _finite(top: Float[Array, " B"]) -> Float[Array, " B"]:
    """Where nothing was seen so far, 0: exp(-inf - 0) = 0."""
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _over_exemplars(mesh: Mesh | None, function: Callable, out_specs: Any, *more: Any) -> Callable:
    """On each device for its part of the exemplars; without a mesh all of them are here."""
    if mesh is None:
        return function
    whole, part = sharding.WHOLE, sharding.PART
    return sharding.per_device(mesh, function, (whole, part, whole, part, whole, whole, *more), out_specs)


def _forward(mesh, *args):
    log_sum = _log_sum_exp(mesh, *args)
    return log_sum, (*args, log_sum)


def _backward(mesh, saved, grad):
    """Each exemplar pulls with its responsibility w_bj = grad_b exp(exponent_bj - log_sum_b), recomputed per block."""

    def local(z, means, log_var, exemplar_index, leave_out, neighbours, log_sum, grad):
        log_sum = _finite(log_sum)  # a row that sees nothing pulls nothing
        inverse_var = jnp.exp(-log_var)

        def add(carry, tile):
            pull_z, grad_log_var = carry
            exponents = _exponents(z, tile[0], log_var, tile[1], leave_out, neighbours)
            weights = jnp.exp(exponents - log_sum[:, None]) * grad[:, None]  # (B, BLOCK)
            pull_z += _product(weights, tile[0]) - jnp.sum(weights, -1)[:, None] * z
            pull_means = _product(weights.T, z) - jnp.sum(weights, 0)[:, None] * tile[0]
            grad_log_var -= jnp.sum(jnp.where(jnp.isneginf(exponents), 0.0, weights * exponents))
            return (pull_z, grad_log_var), pull_means

        start = (jnp.zeros_like(z), jnp.zeros(()))
        sums, pull_means = lax.scan(add, start, _tiles(means, exemplar_index))
        pull_z, grad_log_var = sums if mesh is None else lax.psum(sums, sharding.AXIS)
        grad_means = pull_means.reshape(-1, means.shape[1])[: means.shape[0]]
        return pull_z * inverse_var, grad_means * inverse_var, grad_log_var

    whole, part = sharding.WHOLE, sharding.PART
    split = _over_exemplars(mesh, local, (whole, part, whole), whole, whole)
    return *split(*saved, grad), None, None, None


_log_sum_exp.defvjp(_forward, _backward)
