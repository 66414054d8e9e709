"""New images from a trained model: samples, interpolations, chains."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jaxtyping import Array, Float, Int, UInt8

from exvae import figures, outputs
from exvae.data import Split
from exvae.data.batches import padded_batches
from exvae.distributions import sample_normal, to_unit
from exvae.errors import UserError
from exvae.priors import PRIORS

if TYPE_CHECKING:
    from exvae.run import Run

BLOCK = 1000  # images at a time
PLATE = 12  # a source and eleven samples, as in the paper's Figure 3
SHOWN = 100  # random samples in the figure, at most
GRID, REACH, NEIGHBOURS = 5, 2.0, 100  # cells along a side, standard deviations to its edge, of so many exemplars


def decode(key: Array, model: nn.Module, params: dict, z: Float[Array, "B D"], draw: bool) -> Float[Array, "B H W C"]:
    """The mean of p(x|z), or an image drawn from it."""
    key_latents, key_pixels = jax.random.split(key)
    mean = model.apply({"params": params["model"]}, key_latents, z, method="decode")
    return jax.random.bernoulli(key_pixels, mean).astype(jnp.float32) if draw else mean


@functools.partial(jax.jit, static_argnames=("model", "prior", "draw"))
def _around(key, model, prior: Any, params, x: Float[Array, "B H W C"], temperature, draw) -> Float[Array, "B H W C"]:
    """z ~ r(z|x), Eq. (7), then p(x|z)."""
    key_z, key_x = jax.random.split(key)
    q = model.apply({"params": params["model"]}, x, method="encode")
    return decode(key_x, model, params, sample_normal(key_z, prior.transition(params, q), temperature), draw)


@functools.partial(jax.jit, static_argnames=("model", "prior", "count", "draw"))
def _from_prior(key, model, prior: Any, params, count, temperature, draw) -> Float[Array, "n H W C"]:
    key_z, key_x = jax.random.split(key)
    return decode(key_x, model, params, prior.sample(key_z, model, params, count, temperature), draw)


@functools.partial(jax.jit, static_argnums=0)
def _latents(model: nn.Module, params: dict, images: UInt8[Array, "B H W C"]) -> tuple[Float[Array, "B D"], ...]:
    return model.apply({"params": params["model"]}, to_unit(images), method="latents")


@functools.partial(jax.jit, static_argnums=0)
def _render(model: nn.Module, params: dict, latents: tuple[Float[Array, "B D"], ...]) -> Float[Array, "B H W C"]:
    return model.apply({"params": params["model"]}, latents, method="render")


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
    key: Array, run: Run, images: UInt8[np.ndarray, "n H W C"], *, temperature: float = 1.0, draw: bool = False
) -> Float[np.ndarray, "n H W C"]:
    """A new image for each one: z ~ r(z|x), or q(z|x) where the prior is not over exemplars; then p(x|z)."""
    prior = PRIORS[run.config.prior.name]
    parts = [
        _around(jax.random.fold_in(key, start), run.model, prior, run.params, to_unit(batch), temperature, draw)
        for start, batch in padded_batches(images, BLOCK)
    ]
    return np.concatenate(jax.device_get(parts))[: len(images)]


class Samples(NamedTuple):
    """New images, and the exemplars that they started from, if from any."""

    images: Float[np.ndarray, "n H W C"]
    sources: Int[np.ndarray, " n"] | None


def sample(
    key: Array,
    run: Run,
    count: int,
    *,
    sources: Int[np.ndarray, " s"] | None = None,
    temperature: float = 1.0,
    draw: bool = False,
) -> Samples:
    """From the model; or from around the given exemplars, each of them equally likely."""
    prior = PRIORS[run.config.prior.name]
    if sources is None and prior.sample is not None:
        size = min(BLOCK, count)
        parts = [
            _from_prior(jax.random.fold_in(key, start), run.model, prior, run.params, size, temperature, draw)
            for start in range(0, count, size)
        ]
        return Samples(np.concatenate(jax.device_get(parts))[:count], None)
    key_pick, key_draw = jax.random.split(key)
    pool = np.arange(len(run.exemplars)) if sources is None else sources
    picked = pool[np.asarray(jax.random.randint(key_pick, (count,), 0, len(pool)))]
    images = around(key_draw, run, run.exemplars.images[picked], temperature=temperature, draw=draw)
    return Samples(images, picked)


def plates(key: Array, run: Run, sources: Int[np.ndarray, " P"], **options: Any) -> Float[np.ndarray, "P n H W C"]:
    """Each exemplar, followed by images drawn around it."""
    x = run.exemplars.images[sources]
    new = around(key, run, np.repeat(x, PLATE - 1, axis=0), **options)
    return np.concatenate([to_unit(x)[:, None], new.reshape(len(x), PLATE - 1, *x.shape[1:])], axis=1)


def reconstruct(run: Run, images: UInt8[np.ndarray, "n H W C"]) -> Float[np.ndarray, "n H W C"]:
    """Mean images at the posterior means of all latents."""
    parts = [
        _render(run.model, run.params, _latents(run.model, run.params, batch))
        for _, batch in padded_batches(images, BLOCK)
    ]
    return np.concatenate(jax.device_get(parts))[: len(images)]


def interpolate(
    run: Run, a: UInt8[np.ndarray, "n H W C"], b: UInt8[np.ndarray, "n H W C"], steps: int
) -> Float[np.ndarray, "n steps H W C"]:
    """Along the line between the posterior means of all latents; its ends are the reconstructions."""
    ends = [_latents(run.model, run.params, x) for x in (a, b)]
    frames = [
        _render(run.model, run.params, jax.tree.map(lambda u, v, t=t: (1.0 - t) * u + t * v, *ends))
        for t in np.linspace(0.0, 1.0, steps, dtype=np.float32)
    ]
    return np.stack(jax.device_get(frames), axis=1)


def crossover(
    run: Run, a: UInt8[np.ndarray, "R H W C"], b: UInt8[np.ndarray, "S H W C"]
) -> Float[np.ndarray, "R S H W C"]:
    """Every a with every b: the first half of each latent is that of one, the second half that of the other."""

    def mix(u: Float[Array, "R D"], v: Float[Array, "S D"]) -> Float[Array, "P D"]:
        half = u.shape[1] // 2
        u, v = jnp.repeat(u, len(v), axis=0), jnp.tile(v, (len(u), 1))
        return jnp.concatenate([u[:, :half], v[:, half:]], axis=1)

    latents = jax.tree.map(mix, *(_latents(run.model, run.params, x) for x in (a, b)))
    return np.asarray(_render(run.model, run.params, latents)).reshape(len(a), len(b), *run.model.image_shape)


def grid(run: Run, image: UInt8[np.ndarray, "H W C"], size: int = GRID) -> Float[np.ndarray, "size size H W C"]:
    """Around one image, along the two directions in which the exemplars near it vary most; its own code in the middle.

    Latents below the top one stay as they are.
    """
    top, *lower = _latents(run.model, run.params, image[None])
    near = np.argsort(np.sum(np.square(run.means - top), axis=1))[:NEIGHBOURS]
    _, lengths, directions = np.linalg.svd(run.means[near] - run.means[near].mean(0), full_matrices=False)
    down, right = lengths[:2, None] / np.sqrt(len(near)) * directions[:2]  # one standard deviation long
    reach = np.linspace(-REACH, REACH, size, dtype=np.float32)
    offsets = reach[:, None, None] * down + reach[:, None] * right  # (size, size, D)
    latents = (top + offsets.reshape(size * size, -1), *(jnp.repeat(z, size * size, axis=0) for z in lower))
    return np.asarray(_render(run.model, run.params, latents)).reshape(size, size, *image.shape)


def iterate(
    key: Array, run: Run, start: Float[np.ndarray, "n H W C"], steps: int, **options: Any
) -> Float[np.ndarray, "n steps H W C"]:
    """Chains in which each image is the exemplar of the next (supplement G)."""
    prior, chain = PRIORS[run.config.prior.name], [start]
    for time in range(steps):
        chain.append(_around(jax.random.fold_in(key, time), run.model, prior, run.params, chain[-1], **options))
    return np.stack(jax.device_get(chain[1:]), axis=1)


def save_samples(key: Array, run: Run) -> None:
    """figures/samples.png at the end of training: plates as rows, or samples from a prior that has no exemplars."""
    rows = min(8, len(run.exemplars))
    if PRIORS[run.config.prior.name].sample is None:
        key_pick, key = jax.random.split(key)
        images = plates(key, run, pick(key_pick, np.arange(len(run.exemplars)), rows))
        marked = np.arange(PLATE) == 0
    else:
        images = sample(key, run, rows * PLATE).images.reshape(rows, PLATE, *run.model.image_shape)
        marked = None
    figures.save_grid(run.workdir / "figures" / "samples.png", images, marked)


def pick(key: Array, pool: Int[np.ndarray, " N"], count: int) -> Int[np.ndarray, " n"]:
    """So many of the pool, at random and none twice."""
    return pool[np.asarray(jax.random.permutation(key, len(pool)))[:count]]


# The tasks. Their sources are exemplars: those of config.generate.index, or random ones with config.generate.label.


def _pool(run: Run) -> Int[np.ndarray, " s"] | None:
    """The exemplars that the command allows; None: it does not say."""
    options = run.config.generate
    if not options.index and options.label < 0:
        return None
    return choose(run.exemplars, options.index or None, None if options.label < 0 else options.label)


def _sources(key: Array, run: Run, count: int) -> Int[np.ndarray, " s"]:
    pool = _pool(run)
    if run.config.generate.index:
        return pool
    return pick(key, np.arange(len(run.exemplars)) if pool is None else pool, count)


def sample_task(run: Run, out: str = "") -> None:
    """The task `sample`: random samples, and plates around exemplars."""
    options = run.config.generate
    how = {"temperature": options.temperature, "draw": options.draw}
    key_random, key_pick, key_plates = jax.random.split(jax.random.key(options.seed), 3)
    samples = sample(key_random, run, options.num_images, sources=_pool(run), **how)
    shown = samples.images[:SHOWN]
    columns = int(np.ceil(np.sqrt(len(shown))))
    figures.save_grid(_figure(run, "random.png"), _rows_of(columns, shown))
    images = plates(key_plates, run, _sources(key_pick, run, options.num_sources), **how)
    figures.save_plates(_figure(run, "plates.png"), images)
    others = {}
    if samples.sources is not None:
        others["sources"] = samples.sources
        if run.exemplars.labels is not None:
            others["labels"] = run.exemplars.labels[samples.sources]
    outputs.save(out, {"images": samples.images}, others)


def interpolate_task(run: Run, out: str = "") -> None:
    """The task `interpolate`: between pairs of exemplars, around one, and crossover."""
    options = run.config.generate
    sources = _sources(jax.random.key(options.seed), run, 2 * options.num_sources)
    if len(sources) < 2:
        raise UserError(f"interpolation is between two exemplars, not {len(sources)}: config.generate.index=3,5")
    x = run.exemplars.images[sources[: len(sources) // 2 * 2]]
    a, b = x[0::2], x[1::2]
    images = {
        "interpolation": interpolate(run, a, b, options.steps),
        "grid": np.stack([grid(run, image) for image in a]),
        "crossover": crossover(run, a, b),
    }
    lines = np.concatenate([to_unit(a)[:, None], images["interpolation"], to_unit(b)[:, None]], axis=1)
    ends = np.isin(np.arange(lines.shape[1]), [0, lines.shape[1] - 1])
    figures.save_grid(_figure(run, "interpolation.png"), lines, ends)
    cells = images["grid"].reshape(len(a), GRID * GRID, *x.shape[1:])
    figures.save_plates(_figure(run, "grid.png"), cells, columns=GRID, source=GRID * GRID // 2)
    table = np.pad(images["crossover"], [(1, 0), (1, 0)] + 3 * [(0, 0)], constant_values=1.0)
    table[1:, 0], table[0, 1:] = to_unit(a), to_unit(b)
    row, column = np.indices(table.shape[:2])
    figures.save_grid(_figure(run, "crossover.png"), table, (row == 0) ^ (column == 0))
    outputs.save(out, images, {"sources": sources})


def iterate_task(run: Run, out: str = "") -> None:
    """The task `iterate`: chains from exemplars and from noise."""
    options = run.config.generate
    key_pick, key_noise, *keys = jax.random.split(jax.random.key(options.seed), 4)
    sources = _sources(key_pick, run, options.num_sources)
    noise = jax.random.uniform(key_noise, (options.num_sources, *run.model.image_shape))
    starts = {"images": to_unit(run.exemplars.images[sources]), "noise": np.asarray(noise)}
    images = {}
    for key, (name, start) in zip(keys, starts.items(), strict=True):
        chain = iterate(key, run, start, options.steps, temperature=options.temperature, draw=options.draw)
        whole = np.concatenate([start[:, None], chain], axis=1)
        figures.save_grid(_figure(run, f"chain_{name}.png"), whole, np.arange(whole.shape[1]) == 0)
        images[f"from_{name}"] = chain
    outputs.save(out, images, {"sources": sources})


def _figure(run: Run, name: str):
    path = run.workdir / "figures" / name
    print(f"figure   {path}")
    return path


def _rows_of(columns: int, images: Float[np.ndarray, "n H W C"]) -> Float[np.ndarray, "R columns H W C"]:
    """Images line by line, the last line filled up with white."""
    filled = np.pad(images, [(0, -len(images) % columns)] + 3 * [(0, 0)], constant_values=1.0)
    return filled.reshape(-1, columns, *images.shape[1:])
