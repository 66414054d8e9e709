"""New images from a trained model: samples, interpolations and chains."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, Real, UInt8

from exvae import models
from exvae.data import Split
from exvae.data.batches import map_batches
from exvae.distributions import sample_normal, to_unit
from exvae.errors import UserError
from exvae.objectives import encoder
from exvae.priors import Prior
from exvae.runs.trained import TrainedModel

PLATE = 12  # a source and eleven samples, as in Figure 3 of the paper
GRID = 5  # cells along a side of a grid
REACH = 2.0  # distance from the middle to the edge of a grid, in standard deviations
NEIGHBOURS = 100  # exemplars from which the directions of a grid are computed

Indices = Int[np.ndarray, " s"] | Sequence[float]  # of exemplars; `choose` checks them
Latents = tuple[Float[np.ndarray, "n _"], ...]  # of every level, the top one first


def decode(key: Array, model: nn.Module, params: dict, z: Float[Array, "B D"], draw: bool) -> Float[Array, "B H W C"]:
    """Return the means of p(x|z), or images drawn from it."""
    return models.apply(model, params, key, z, draw, method="decode")


@functools.partial(jax.jit, static_argnames=("model", "prior", "draw"))
def _around(
    key: Array,
    model: nn.Module,
    prior: Prior,
    params: dict,
    x: Real[Array, "B H W C"],
    *,
    temperature: Float[Array, ""] | float,
    draw: bool,
) -> Float[Array, "B H W C"]:
    """Draw z ~ r(z|x), Eq. (7), and decode it."""
    key_z, key_x = jax.random.split(key)
    q = models.apply(model, params, to_unit(x) if x.dtype == np.uint8 else x, method="encode")
    return decode(key_x, model, params, sample_normal(key_z, prior.transition(params["prior"], q), temperature), draw)


@functools.partial(jax.jit, static_argnames=("model", "prior", "count", "draw"))
def _from_prior(
    key: Array,
    model: nn.Module,
    prior: Prior,
    params: dict,
    *,
    count: int,
    temperature: Any,  # a number, which jit replaces by a tracer
    draw: bool,
) -> Float[Array, "n H W C"]:
    """Draw z ~ p(z) of a prior without exemplars, and decode it."""
    key_z, key_x = jax.random.split(key)
    components = prior.components(params["prior"], encoder(model, params), None)
    z = prior.sample(key_z, components, (count, model.latent_dim), temperature)
    return decode(key_x, model, params, z, draw)


@functools.partial(jax.jit, static_argnums=0)
def _latents(model: nn.Module, params: dict, images: UInt8[Array, "B H W C"]) -> tuple[Float[Array, "B _"], ...]:
    return models.apply(model, params, to_unit(images), method="latents")


@functools.partial(jax.jit, static_argnames=("model", "ends"))
def _render(
    model: nn.Module, params: dict, rows: Float[Array, "B Ds"], *, ends: tuple[int, ...]
) -> Float[Array, "B H W C"]:
    """Render rows of all latents side by side. `ends` are the columns where one latent ends and the next begins."""
    latents = tuple(jnp.split(rows, ends, axis=1))
    # The same random numbers for every image: an image depends only on its latents, and close latents look alike.
    u = jax.random.uniform(jax.random.key(0), (1, *model.image_shape))
    return models.apply(model, params, latents, u, method="render")


def block(run: TrainedModel) -> int:
    """Return the images per batch, twice the codes that fit into a CPU core's cache. Random keys depend on it."""
    return 2 * run.model.block_rows


def latents(run: TrainedModel, images: UInt8[np.ndarray, "n H W C"]) -> Latents:
    """Return the posterior means of all latents, the top one first."""
    return map_batches(lambda _, batch: _latents(run.model, run.params, batch), images, block(run), run.mesh)


def render(run: TrainedModel, codes: Latents) -> Float[np.ndarray, "n H W C"]:
    """Return the mean of p(x|z), given all latents."""
    ends = tuple(np.cumsum([part.shape[1] for part in codes])[:-1].tolist())
    rows = np.concatenate(codes, axis=1)
    return map_batches(lambda _, part: _render(run.model, run.params, part, ends=ends), rows, block(run), run.mesh)


def choose(exemplars: Split, index: Indices | None, label: int | None) -> Int[np.ndarray, " s"]:
    """Select exemplars and return their indices.

    Args:
      index: select only from these; None: from all.
      label: select only those of this class; None: of any class.

    Raises:
      UserError: there are no such exemplars.
    """
    chosen = np.arange(len(exemplars)) if index is None else np.atleast_1d(np.asarray(index))
    if chosen.dtype.kind not in "iu" or not len(chosen):
        raise UserError(f"exemplars are chosen by their indices, not by {index!r}")
    if len(outside := chosen[(chosen < 0) | (chosen >= len(exemplars))]):
        raise UserError(f"there is no exemplar {outside[0]}: they are numbered 0..{len(exemplars) - 1}")
    if label is None:
        return chosen
    if exemplars.labels is None:
        raise UserError(f"there is no exemplar with label {label}: these images have no labels")
    known = np.unique(exemplars.labels)
    if label not in known:
        raise UserError(f"there is no exemplar with label {label}: labels are {known[0]}..{known[-1]}")
    chosen = chosen[exemplars.labels[chosen] == label]
    if not len(chosen):
        raise UserError(f"none of the chosen exemplars has label {label}")
    return chosen


def around(
    key: Array,
    run: TrainedModel,
    images: Real[np.ndarray, "n H W C"],
    *,
    temperature: float = 1.0,
    draw: bool = False,
) -> Float[np.ndarray, "n H W C"]:
    """Draw a new image for each image: z ~ r(z|x), or z ~ q(z|x) if the prior has no exemplars; then p(x|z).

    Args:
      images: bytes, or floats in 0..1.
      temperature: factor on the standard deviation of z.
      draw: draw pixels from p(x|z) instead of returning its mean.
    """
    prior = run.prior

    def draw_batch(start: int, x: Array) -> Array:
        part = jax.random.fold_in(key, start)
        return _around(part, run.model, prior, run.params, x, temperature=temperature, draw=draw)

    return map_batches(draw_batch, images, block(run), run.mesh)


class Samples(NamedTuple):
    """New images, and the indices of the exemplars that they started from; None: they come from p(z)."""

    images: Float[np.ndarray, "n H W C"]
    sources: Int[np.ndarray, " n"] | None


def sample(
    key: Array,
    run: TrainedModel,
    count: int,
    *,
    sources: Int[np.ndarray, " s"] | None = None,
    temperature: float = 1.0,
    draw: bool = False,
) -> Samples:
    """Draw `count` images from the model.

    Args:
      sources: indices of exemplars to start from, each with the same probability; None: sample from p(z).
      temperature: factor on the standard deviation of z.
      draw: draw pixels from p(x|z) instead of returning its mean.
    """
    prior = run.prior
    if sources is None and not prior.USES_EXEMPLARS:

        def draw_batch(start: int, rows: np.ndarray) -> Array:
            part = jax.random.fold_in(key, start)
            how = {"count": len(rows), "temperature": temperature, "draw": draw}
            return _from_prior(part, run.model, prior, run.params, **how)

        return Samples(map_batches(draw_batch, np.empty(count), block(run)), None)
    key_pick, key_draw = jax.random.split(key)
    pool = np.arange(len(run.exemplars)) if sources is None else sources
    picked = pool[np.asarray(jax.random.randint(key_pick, (count,), 0, len(pool)))]
    images = around(key_draw, run, run.exemplars.images[picked], temperature=temperature, draw=draw)
    return Samples(images, picked)


def plates(
    key: Array, run: TrainedModel, sources: Int[np.ndarray, " P"], **options: Any
) -> Float[np.ndarray, "P n H W C"]:
    """Draw images around each exemplar, and put the exemplar first. `options` are those of `around`."""
    x = run.exemplars.images[sources]
    new = around(key, run, np.repeat(x, PLATE - 1, axis=0), **options)
    return np.concatenate([to_unit(x)[:, None], new.reshape(len(x), PLATE - 1, *x.shape[1:])], axis=1)


def reconstruct(run: TrainedModel, images: UInt8[np.ndarray, "n H W C"]) -> Float[np.ndarray, "n H W C"]:
    """Return the mean of p(x|z) at the posterior means of all latents."""
    return render(run, latents(run, images))


def interpolate(
    run: TrainedModel, a: UInt8[np.ndarray, "n H W C"], b: UInt8[np.ndarray, "n H W C"], steps: int
) -> Float[np.ndarray, "n steps H W C"]:
    """Render images along the line between the posterior means of all latents. Both ends are reconstructions."""
    ends = [latents(run, x) for x in (a, b)]
    frames = [
        render(run, jax.tree.map(lambda u, v, t=t: (1.0 - t) * u + t * v, *ends))
        for t in np.linspace(0.0, 1.0, steps, dtype=np.float32)
    ]
    return np.stack(frames, axis=1)


def crossover(
    run: TrainedModel, a: UInt8[np.ndarray, "R H W C"], b: UInt8[np.ndarray, "S H W C"]
) -> Float[np.ndarray, "R S H W C"]:
    """Combine every a with every b: the first half of each latent is from a, the second half from b."""

    def mix(u: Float[np.ndarray, "R D"], v: Float[np.ndarray, "S D"]) -> Float[np.ndarray, "P D"]:
        half = u.shape[1] // 2
        u, v = np.repeat(u, len(v), axis=0), np.tile(v, (len(u), 1))
        return np.concatenate([u[:, :half], v[:, half:]], axis=1)

    mixed = jax.tree.map(mix, latents(run, a), latents(run, b))
    return render(run, mixed).reshape(len(a), len(b), *run.model.image_shape)


def grid(
    run: TrainedModel, image: UInt8[np.ndarray, "H W C"], size: int = GRID
) -> Float[np.ndarray, "size size H W C"]:
    """Render a grid of images around one image, which is in the middle.

    The top latent moves along the two directions in which the exemplars near the image vary most. Lower latents are
    those of the image.
    """
    top, *lower = latents(run, image[None])
    near = np.argsort(np.sum(np.square(run.means - top), axis=1))[:NEIGHBOURS]
    _, lengths, directions = np.linalg.svd(run.means[near] - run.means[near].mean(0), full_matrices=False)
    axes = lengths[:2, None] / np.sqrt(len(near)) * directions[:2]  # one standard deviation long
    down, right = np.pad(axes, ((0, 2 - len(axes)), (0, 0)))  # with one latent dimension there is no second direction
    reach = np.linspace(-REACH, REACH, size, dtype=np.float32)
    offsets = reach[:, None, None] * down + reach[:, None] * right  # (size, size, D)
    cells = (top + offsets.reshape(size * size, -1), *(np.repeat(z, size * size, axis=0) for z in lower))
    return render(run, cells).reshape(size, size, *image.shape)


def iterate(
    key: Array, run: TrainedModel, start: Float[np.ndarray, "n H W C"], steps: int, **options: Any
) -> Float[np.ndarray, "n steps H W C"]:
    """Draw chains in which each image is the exemplar of the next (supplement G). `options` are those of `around`."""
    chain = [start]
    for key_step in jax.random.split(key, steps):
        chain.append(around(key_step, run, chain[-1], **options))
    return np.stack(chain[1:], axis=1)


def pick(key: Array, pool: Int[np.ndarray, " N"], count: int) -> Int[np.ndarray, " n"]:
    """Choose `count` different elements of the pool at random."""
    return pool[np.asarray(jax.random.permutation(key, len(pool)))[:count]]
