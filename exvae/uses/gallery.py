"""The tasks `sample`, `interpolate` and `iterate`: draw images with `generate`, and write figures and files.

They start from exemplars: those of config.generate.index, or random ones (of the class config.generate.label).
"""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from exvae.distributions import to_unit
from exvae.errors import UserError
from exvae.runs import figures, outputs
from exvae.runs.progress import phase
from exvae.runs.trained import TrainedModel
from exvae.scale import sharding
from exvae.uses import generate

SHOWN = 100  # largest number of random samples in the figure


def save_samples(key: Array, run: TrainedModel) -> None:
    """Write figures/samples.png at the end of training: plates in rows, or samples if the prior has no exemplars."""
    rows = min(8, len(run.exemplars))
    if run.prior.USES_EXEMPLARS:
        key_pick, key = jax.random.split(key)
        images = generate.plates(key, run, generate.pick(key_pick, np.arange(len(run.exemplars)), rows))
        marked = np.arange(generate.PLATE) == 0
    else:
        images = generate.sample(key, run, rows * generate.PLATE).images.reshape(
            rows, generate.PLATE, *run.model.image_shape
        )
        marked = None
    if sharding.is_main():
        figures.save_grid(run.workdir / "figures" / "samples.png", images, marked)


def _pool(run: TrainedModel) -> Int[np.ndarray, " s"] | None:
    """Return the exemplars that the command line selects, or None if it selects none."""
    options = run.config.generate
    if not options.index and options.label < 0:
        return None
    return generate.choose(run.exemplars, options.index or None, None if options.label < 0 else options.label)


def _sources(key: Array, run: TrainedModel, count: int) -> Int[np.ndarray, " s"]:
    """Return the exemplars of config.generate.index, or else `count` random ones."""
    pool = _pool(run)
    if pool is not None and run.config.generate.index:
        return pool
    return generate.pick(key, np.arange(len(run.exemplars)) if pool is None else pool, count)


def sample_task(run: TrainedModel, out: str = "") -> None:
    """Run the task `sample`: draw random samples, and plates around exemplars."""
    options = run.config.generate
    how = {"temperature": options.temperature, "draw": options.draw}
    key_random, key_pick, key_plates = jax.random.split(jax.random.key(options.seed), 3)
    with phase("drawing samples"):
        samples = generate.sample(key_random, run, options.num_images, sources=_pool(run), **how)
    shown = samples.images[:SHOWN]
    columns = int(np.ceil(np.sqrt(len(shown))))
    figures.save_grid(_figure(run, "random.png"), _rows_of(columns, shown))
    with phase("drawing around exemplars"):
        images = generate.plates(key_plates, run, _sources(key_pick, run, options.num_sources), **how)
    figures.save_plates(_figure(run, "plates.png"), images)
    others = {}
    if samples.sources is not None:
        others["sources"] = samples.sources
        if run.exemplars.labels is not None:
            others["labels"] = run.exemplars.labels[samples.sources]
    outputs.save(out, {"images": samples.images}, others)


def interpolate_task(run: TrainedModel, out: str = "") -> None:
    """Run the task `interpolate`: interpolate and cross over pairs of exemplars, and draw grids around exemplars."""
    options = run.config.generate
    sources = _sources(jax.random.key(options.seed), run, 2 * options.num_sources)
    if (options.index and len(sources) % 2) or len(sources) < 2:
        raise UserError(f"interpolation needs pairs of exemplars, so their number must be even, not {len(sources)}")
    sources = sources[: len(sources) // 2 * 2]
    x = run.exemplars.images[sources]
    a, b = x[0::2], x[1::2]
    with phase("drawing between exemplars"):
        images = {
            "interpolation": generate.interpolate(run, a, b, options.steps),
            "grid": np.stack([generate.grid(run, image) for image in a]),
            "crossover": generate.crossover(run, a, b),
        }
    lines = np.concatenate([to_unit(a)[:, None], images["interpolation"], to_unit(b)[:, None]], axis=1)
    ends = np.isin(np.arange(lines.shape[1]), [0, lines.shape[1] - 1])
    figures.save_grid(_figure(run, "interpolation.png"), lines, ends)
    cells = images["grid"].reshape(len(a), generate.GRID * generate.GRID, *x.shape[1:])
    figures.save_plates(
        _figure(run, "grid.png"), cells, columns=generate.GRID, source=generate.GRID * generate.GRID // 2
    )
    table = np.pad(images["crossover"], [(1, 0), (1, 0)] + 3 * [(0, 0)], constant_values=1.0)
    table[1:, 0], table[0, 1:] = to_unit(a), to_unit(b)
    row, column = np.indices(table.shape[:2])
    figures.save_grid(_figure(run, "crossover.png"), table, (row == 0) ^ (column == 0))
    outputs.save(out, images, {"sources": sources})


def iterate_task(run: TrainedModel, out: str = "") -> None:
    """Run the task `iterate`: draw chains that start from exemplars and from noise."""
    options = run.config.generate
    key_pick, key_noise, *keys = jax.random.split(jax.random.key(options.seed), 4)
    sources = _sources(key_pick, run, options.num_sources)
    noise = jax.random.uniform(key_noise, (options.num_sources, *run.model.image_shape))
    starts = {"images": np.asarray(to_unit(run.exemplars.images[sources])), "noise": np.asarray(noise)}
    images = {}
    for key, (name, start) in zip(keys, starts.items(), strict=True):
        with phase(f"drawing chains from {name}"):
            chain = generate.iterate(key, run, start, options.steps, temperature=options.temperature, draw=options.draw)
        whole = np.concatenate([start[:, None], chain], axis=1)
        figures.save_grid(_figure(run, f"chain_{name}.png"), whole, np.arange(whole.shape[1]) == 0)
        images[f"from_{name}"] = chain
    outputs.save(out, images, {"sources": sources})


def _figure(run: TrainedModel, name: str) -> Path:
    """Print and return the path of a figure."""
    path = run.workdir / "figures" / name
    print(f"figure   {path}")
    return path


def _rows_of(columns: int, images: Float[np.ndarray, "n H W C"]) -> Float[np.ndarray, "R columns H W C"]:
    """Arrange images in rows. White images complete the last row."""
    filled = np.pad(images, [(0, -len(images) % columns)] + 3 * [(0, 0)], constant_values=1.0)
    return filled.reshape(-1, columns, *images.shape[1:])
