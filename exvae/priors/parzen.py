"""The Parzen window over exemplar means, Eq. (8): exact, differentiable, in blocks of exemplars."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Float, Int

from exvae.arrays import Array
from exvae.distributions import LOG_2PI
from exvae.retrieval import NOBODY
from exvae.scale import sharding

BLOCK = 2048  # exemplars scored at a time: a (B, BLOCK) tile of the distance matrix fits into the cache
# Full precision: TPUs and recent GPUs round the factors of a product, and distances are differences of large numbers.
_product = functools.partial(jnp.matmul, precision=lax.Precision.HIGHEST)


class Visible(NamedTuple):
    """Which exemplars each code may see."""

    exemplar: Int[Array, " U"]  # index of each exemplar in the training set; NOBODY: an empty slot
    leave_out: Int[Array, " B"]  # index of the exemplar that each code must not see; NOBODY: none
    neighbours: Int[Array, "B K"] | None  # indices of the only exemplars that each code may see; None: all


def exemplar_log_prob(
    z: Float[Array, "B D"],
    means: Float[Array, "U D"],
    log_var: Float[Array, ""],
    *,
    count: Float[Array, "*#B"] | Int[Array, "*#B"] | float,
    exemplar_index: Int[Array, " U"] | None = None,
    leave_out: Int[Array, " B"] | None = None,
    neighbours: Int[Array, "B K"] | None = None,
    mesh: Mesh | None = None,
) -> Float[Array, " B"]:
    """log 1/M sum_j N(z | mu_j, sigma^2 I), Eq. (8), over the exemplars j that z may see.

    This function serves all objectives of the paper. The sum is exact over the exemplars in `means`. If they are only
    the K nearest, the result is a lower bound, Eq. (9), because `count` is still M. The forward and the backward pass
    process exemplars in blocks, so no array is larger than (B, BLOCK) or `means`. Differentiable in z, means and
    log_var.

    Args:
      z: latent codes.
      means: mu(x_j) of the exemplars.
      log_var: log sigma^2.
      count: M, the number of components that the sum is divided by. It may differ between rows (leave-one-out).
      exemplar_index: index of each exemplar in the training set. NOBODY marks an empty slot, which is skipped.
      leave_out: index of the image of each row of z. That exemplar is skipped (O1).
      neighbours: the indices of the only exemplars that each row may see. None means all.
      mesh: each of its devices processes a part of the exemplars. None means that this device processes all.
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
    log_sum = _log_sum_exp(mesh, z, means, log_var, Visible(exemplar_index, leave_out, neighbours))
    # Differs from the authors' code: the divisor is M, also for neighbours. The code divides by the size of the union.
    return log_sum - jnp.log(count) - 0.5 * dim * (LOG_2PI + log_var)  # Eq. (8)


def _tiles(
    means: Float[Array, "U D"], exemplar: Int[Array, " U"]
) -> tuple[Float[Array, "T block D"], Int[Array, "T block"]]:
    """Cut the exemplars into blocks of equal size. NOBODY pads the last block."""
    block = min(BLOCK, means.shape[0])
    pad = -means.shape[0] % block
    means = jnp.pad(means, ((0, pad), (0, 0)))
    exemplar = jnp.pad(exemplar, (0, pad), constant_values=NOBODY)
    return means.reshape(-1, block, means.shape[1]), exemplar.reshape(-1, block)


def _exponents(
    z: Float[Array, "B D"], means: Float[Array, "U D"], log_var: Float[Array, ""], visible: Visible
) -> Float[Array, "B U"]:
    """-||z - mu||^2 / (2 sigma^2) with one matrix product; -inf where the row may not see the exemplar."""
    index, leave_out, neighbours = visible
    half_norms = 0.5 * jnp.sum(jnp.square(z), -1)[:, None] + 0.5 * jnp.sum(jnp.square(means), -1)[None, :]
    exponents = (_product(z, means.T) - half_norms) * jnp.exp(-log_var)
    seen = (index != NOBODY)[None, :] & (index[None, :] != leave_out[:, None])
    if neighbours is not None:
        seen &= jnp.any(neighbours[:, :, None] == index[None, None, :], axis=1)
    return jnp.where(seen, exponents, -jnp.inf)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _log_sum_exp(
    mesh: Mesh | None,
    z: Float[Array, "B D"],
    means: Float[Array, "U D"],
    log_var: Float[Array, ""],
    visible: Visible,
) -> Float[Array, " B"]:
    """log sum_j exp(-||z - mu_j||^2 / (2 sigma^2)), with a running maximum and sum over blocks, then over devices."""

    def local(z: Array, means: Array, log_var: Array, visible: Visible) -> Array:
        def add(carry: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
            top, total = carry
            exponents = _exponents(z, tile[0], log_var, visible._replace(exemplar=tile[1]))
            new_top = jnp.maximum(top, jnp.max(exponents, -1))
            shift = _finite(new_top)
            total = total * jnp.exp(top - shift) + jnp.sum(jnp.exp(exponents - shift[:, None]), -1)
            return (new_top, total), None

        start = (jnp.full(z.shape[0], -jnp.inf), jnp.zeros(z.shape[0]))
        (top, total), _ = lax.scan(add, start, _tiles(means, visible.exemplar))
        if mesh is not None:
            highest = lax.pmax(top, sharding.AXIS)
            total = lax.psum(total * jnp.exp(top - _finite(highest)), sharding.AXIS)
            top = highest
        return top + jnp.log(total)

    return _over_exemplars(mesh, local, sharding.WHOLE)(z, means, log_var, visible)


def _finite(top: Float[Array, " B"]) -> Float[Array, " B"]:
    """Replace -inf by 0, in rows that have seen no exemplar yet. Then exp(-inf - 0) = 0."""
    return jnp.where(jnp.isneginf(top), 0.0, top)


def _over_exemplars(
    mesh: Mesh | None,
    function: Callable,
    out_specs: PartitionSpec | tuple[PartitionSpec, ...],
    *more: PartitionSpec,
) -> Callable:
    """Run `function` on each device for its part of the exemplars. Without a mesh, return `function` itself."""
    if mesh is None:
        return function
    whole, part = sharding.WHOLE, sharding.PART
    visible: tuple[Any, ...] = (part, whole, whole)
    in_specs = (whole, part, whole, Visible(*visible), *more)
    return sharding.per_device(mesh, function, in_specs, out_specs)


Saved = tuple[Array, Array, Array, Visible, Array]  # arguments of `_log_sum_exp`, and its result


def _forward(mesh: Mesh | None, z: Array, means: Array, log_var: Array, visible: Visible) -> tuple[Array, Saved]:
    log_sum = _log_sum_exp(mesh, z, means, log_var, visible)
    return log_sum, (z, means, log_var, visible, log_sum)


def _backward(mesh: Mesh | None, saved: Saved, grad: Float[Array, " B"]) -> tuple[Array, Array, Array, None]:
    """The gradient weights each pair by w_bj = grad_b exp(exponent_bj - log_sum_b), computed again block by block."""

    def local(z: Array, means: Array, log_var: Array, visible: Visible, *sums: Array) -> tuple[Array, Array, Array]:
        log_sum, grad = sums
        log_sum = _finite(log_sum)  # a row that sees no exemplar has weights of zero
        inverse_var = jnp.exp(-log_var)

        def add(carry: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array], Array]:
            pull_z, grad_log_var = carry
            exponents = _exponents(z, tile[0], log_var, visible._replace(exemplar=tile[1]))
            weights = jnp.exp(exponents - log_sum[:, None]) * grad[:, None]  # (B, BLOCK)
            pull_z += _product(weights, tile[0]) - jnp.sum(weights, -1)[:, None] * z
            pull_means = _product(weights.T, z) - jnp.sum(weights, 0)[:, None] * tile[0]
            grad_log_var -= jnp.sum(jnp.where(jnp.isneginf(exponents), 0.0, weights * exponents))
            return (pull_z, grad_log_var), pull_means

        start = (jnp.zeros_like(z), jnp.zeros(()))
        totals, pull_means = lax.scan(add, start, _tiles(means, visible.exemplar))
        pull_z, grad_log_var = totals if mesh is None else lax.psum(totals, sharding.AXIS)
        grad_means = pull_means.reshape(-1, means.shape[1])[: means.shape[0]]
        return pull_z * inverse_var, grad_means * inverse_var, grad_log_var

    whole, part = sharding.WHOLE, sharding.PART
    split = _over_exemplars(mesh, local, (whole, part, whole), whole, whole)
    return *split(*saved, grad), None


_log_sum_exp.defvjp(_forward, _backward)
