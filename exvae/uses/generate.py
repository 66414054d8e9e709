"""New images from a trained model: samples, interpolations, chains."""

from __future__ import annotations

import functools
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

PLATE = 12  # a source and eleven samples, as in the paper's Figure 3
GRID, REACH, NEIGHBOURS = 5, 2.0, 100  # cells along a side, standard deviations to its edge, of so many exemplars


def decode(key: Array, model: nn.Module, params: dict, z: Float[Array, "B D"], draw: bool) -> Float[Array, "B H W C"]:
    """The mean of p(x|z), or an image drawn from it."""
    return models.apply(model, params, key, z, draw, method="decode")


@functools.partial(jax.jit, static_argnames=("model", "prior", "draw"))
def _around(key, model, prior: Prior, params, x: Float[Array, "B H W C"], temperature, draw) -> Float[Array, "B H W C"]:
    """z ~ r(z|x), Eq. (7), then p(x|z)."""
    key_z, key_x = jax.random.split(key)
    q = models.apply(model, params, x, method="encode")
    return decode(key_x, model, params, sample_normal(key_z, prior.transition(params["prior"], q), temperature), draw)


@functools.partial(jax.jit, static_argnames=("model", "prior", "count", "draw"))
def _from_prior(key, model, prior: Prior, params, count, temperature, draw) -> Float[Array, "n H W C"]:
    key_z, key_x = jax.random.split(key)
    components = prior.components(params["prior"], encoder(model, params), None)
    z = prior.sample(key_z, components, (count, model.latent_dim), temperature)
    return decode(key_x, model, params, z, draw)


@functools.partial(jax.jit, static_argnums=0)
def _latents(model: nn.Module, params: dict, images: UInt8[Array, "B H W C"]) -> tuple[Float[Array, "B D"], ...]:
    return models.apply(model, params, to_unit(images), method="latents")


@functools.partial(jax.jit, static_argnums=0)
def _render(model: nn.Module, params: dict, latents: tuple[Float[Array, "B D"], ...]) -> Float[Array, "B H W C"]:
    # The same random numbers for every image: it depends on its latents alone, and neighbours on a line are alike.
    u = jax.random.uniform(jax.random.key(0), (1, *model.image_shape))
    return models.apply(model, params, latents, u, method="render")


def block(run: TrainedModel) -> int:
    """Images at a time: twice the codes whose activations stay in a CPU core's cache. z is drawn by block."""
    return 2 * run.model.block_rows


def latents(run: TrainedModel, images: UInt8[np.ndarray, "n H W C"]) -> tuple[Float[np.ndarray, "n D"], ...]:
    """Posterior means of all latents, the top one first."""
    return map_batches(lambda _, batch: _latents(run.model, run.params, batch), images, block(run), run.mesh)


def render(run: TrainedModel, codes: tuple[Float[np.ndarray, "n D"], ...]) -> Float[np.ndarray, "n H W C"]:
    """Mean images of all latents."""
    widths = np.cumsum([part.shape[1] for part in codes])[:-1]

    def render_batch(_: int, rows: Array) -> Array:
        return _render(run.model, run.params, tuple(jnp.split(rows, widths, axis=1)))

    return map_batches(render_batch, np.concatenate(codes, axis=1), block(run), run.mesh)


def choose(exemplars: Split, index: Int[np.ndarray, " s"] | None, label: int | None) -> Int[np.ndarray, " s"]:
    """Numbers of the exemplars that are among `index` and have the label; None: no restriction."""
    chosen = np.arange(len(exemplars)) if index is None else np.atleast_1d(np.asarray(index))
    if chosen.dtype.kind not in "iu" or not len(chosen):
        raise UserError(f"exemplars are chosen by their numbers, not by {index!r}")
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
    key: Array, run: TrainedModel, images: Real[np.ndarray, "n H W C"], *, temperature: float = 1.0, draw: bool = False
) -> Float[np.ndarray, "n H W C"]:
    """A new image for each one: z ~ r(z|x), or q(z|x) where the prior is not over exemplars; then p(x|z)."""
    prior = run.prior

    def draw_batch(start: int, x: Array) -> Array:
        x = to_unit(x) if x.dtype == np.uint8 else x
        return _around(jax.random.fold_in(key, start), run.model, prior, run.params, x, temperature, draw)

    return map_batches(draw_batch, images, block(run), run.mesh)


class Samples(NamedTuple):
    """New images, and the exemplars that they started from, if from any."""

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
    """From the model; or from around the given exemplars, each of them equally likely."""
    prior = run.prior
    if sources is None and not prior.USES_EXEMPLARS:

        def draw_batch(start: int, rows: np.ndarray) -> Array:
            part = jax.random.fold_in(key, start)
            return _from_prior(part, run.model, prior, run.params, len(rows), temperature, draw)

        return Samples(map_batches(draw_batch, np.empty(count), block(run)), None)
    key_pick, key_draw = jax.random.split(key)
    pool = np.arange(len(run.exemplars)) if sources is None else sources
    picked = pool[np.asarray(jax.random.randint(key_pick, (count,), 0, len(pool)))]
    images = around(key_draw, run, run.exemplars.images[picked], temperature=temperature, draw=draw)
    return Samples(images, picked)


def plates(
    key: Array, run: TrainedModel, sources: Int[np.ndarray, " P"], **options: Any
) -> Float[np.ndarray, "P n H W C"]:
    """Each exemplar, followed by images drawn around it."""
    x = run.exemplars.images[sources]
    new = around(key, run, np.repeat(x, PLATE - 1, axis=0), **options)
    return np.concatenate([to_unit(x)[:, None], new.reshape(len(x), PLATE - 1, *x.shape[1:])], axis=1)


def reconstruct(run: TrainedModel, images: UInt8[np.ndarray, "n H W C"]) -> Float[np.ndarray, "n H W C"]:
    """Mean images at the posterior means of all latents."""
    return render(run, latents(run, images))


def interpolate(
    run: TrainedModel, a: UInt8[np.ndarray, "n H W C"], b: UInt8[np.ndarray, "n H W C"], steps: int
) -> Float[np.ndarray, "n steps H W C"]:
    """Along the line between the posterior means of all latents; its ends are the reconstructions."""
    ends = [latents(run, x) for x in (a, b)]
    frames = [
        render(run, jax.tree.map(lambda u, v, t=t: (1.0 - t) * u + t * v, *ends))
        for t in np.linspace(0.0, 1.0, steps, dtype=np.float32)
    ]
    return np.stack(frames, axis=1)


def crossover(
    run: TrainedModel, a: UInt8[np.ndarray, "R H W C"], b: UInt8[np.ndarray, "S H W C"]
) -> Float[np.ndarray, "R S H W C"]:
    """Every a with every b: the first half of each latent is that of one, the second half that of the other."""

    def mix(u: Float[np.ndarray, "R D"], v: Float[np.ndarray, "S D"]) -> Float[np.ndarray, "P D"]:
        half = u.shape[1] // 2
        u, v = np.repeat(u, len(v), axis=0), np.tile(v, (len(u), 1))
        return np.concatenate([u[:, :half], v[:, half:]], axis=1)

    mixed = jax.tree.map(mix, latents(run, a), latents(run, b))
    return render(run, mixed).reshape(len(a), len(b), *run.model.image_shape)


def grid(
    run: TrainedModel, image: UInt8[np.ndarray, "H W C"], size: int = GRID
) -> Float[np.ndarray, "size size H W C"]:
    """Around one image, along the two directions in which the exemplars near it vary most; its own code in the middle.

    Latents below the top one stay as they are.
    """
    top, *lower = latents(run, image[None])
    near = np.argsort(np.sum(np.square(run.means - top), axis=1))[:NEIGHBOURS]
    _, lengths, directions = np.linalg.svd(run.means[near] - run.means[near].mean(0), full_matrices=False)
    axes = lengths[:2, None] / np.sqrt(len(near)) * directions[:2]  # one standard deviation long
    down, right = np.pad(axes, ((0, 2 - len(axes)), (0, 0)))  # a latent of one dimension has no second direction
    reach = np.linspace(-REACH, REACH, size, dtype=np.float32)
    offsets = reach[:, None, None] * down + reach[:, None] * right  # (size, size, D)
    cells = (top + offsets.reshape(size * size, -1), *(np.repeat(z, size * size, axis=0) for z in lower))
    return render(run, cells).reshape(size, size, *image.shape)


def iterate(
    key: Array, run: TrainedModel, start: Float[np.ndarray, "n H W C"], steps: int, **options: Any
) -> Float[np.ndarray, "n steps H W C"]:
    """Chains in which each image is the exemplar of the next (supplement G)."""
    chain = [start]
    for key_step in jax.random.split(key, steps):
        chain.append(around(key_step, run, chain[-1], **options))
    return np.stack(chain[1:], axis=1)


def pick(key: Array, pool: Int[np.ndarray, " N"], count: int) -> Int[np.ndarray, " n"]:
    """So many of the pool, at random and none twice."""
    return pool[np.asarray(jax.random.permutation(key, len(pool)))[:count]]
