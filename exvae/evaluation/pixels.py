"""Parzen windows in pixel space, Eq. (2): the baseline of the paper. Only the bandwidth is fitted.

gaussian   N(x | x_n, sigma^2 I) on grey pixels: a density, not comparable with probabilities of binary images
bernoulli  each pixel of a binarized exemplar flips with probability epsilon: comparable with a Bernoulli model
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Bool, Float, UInt8
from ml_collections import ConfigDict

from exvae import config as configs
from exvae import data
from exvae.arrays import Array
from exvae.data import splits
from exvae.data.batches import map_batches, padded_batches
from exvae.distributions import to_unit
from exvae.evaluation.evaluate import standard_error, subset
from exvae.runs import folder, writer

BATCH = 500  # images at a time
BLOCK = 2048  # exemplars at a time
GRID = 16  # bandwidths tried in one pass over the exemplars


class Kernel(NamedTuple):
    """log k(x, x_n) = log_constant - rate ||x - x_n||^2. Both are functions of the bandwidth."""

    bandwidths: tuple[float, float]  # range to search for the best bandwidth
    rate: Callable[[np.ndarray], np.ndarray]
    log_constant: Callable[[np.ndarray], np.ndarray]  # per pixel


KERNELS = {
    "gaussian": Kernel((0.02, 1.0), lambda s: 0.5 / s**2, lambda s: -0.5 * np.log(2 * np.pi * s**2)),
    "bernoulli": Kernel((1e-4, 0.4), lambda e: np.log((1 - e) / e), lambda e: np.log(1 - e)),
}


@jax.jit
def log_window(
    x: UInt8[Array, "B ..."], exemplars: UInt8[Array, "N ..."], rates: Float[Array, " G"]
) -> Float[Array, "G B"]:
    """log 1/N sum_n exp(-rate ||x - x_n||^2) for all rates at once, in blocks of exemplars.

    All rates share the distances. Their running sums are shifted by the smallest distance so far.
    """
    x = to_unit(x)

    def add(carry: tuple[Array, Array], tile: tuple[Array, Array]) -> tuple[tuple[Array, Array], None]:
        least, totals = carry  # (B,), (G, B)
        squares = _squares(x, tile)
        new_least = jnp.minimum(least, jnp.min(squares, -1))

        def add_rate(args: tuple[Array, Array]) -> Array:
            rate, total = args
            return total * jnp.exp(rate * (new_least - least)) + jnp.sum(
                jnp.exp(rate * (new_least[:, None] - squares)), -1
            )

        return (new_least, lax.map(add_rate, (rates, totals))), None

    start = (jnp.full(len(x), jnp.finfo(jnp.float32).max), jnp.zeros((len(rates), len(x))))
    (least, totals), _ = lax.scan(add, start, _tiles(exemplars))
    return jnp.log(totals) - rates[:, None] * least - math.log(len(exemplars))  # Eq. (2)


@jax.jit
def _least_square(x: Float[Array, "B ..."], exemplars: UInt8[Array, "N ..."]) -> Float[Array, " B"]:
    def add(least: Array, tile: tuple[Array, Array]) -> tuple[Array, None]:
        return jnp.minimum(least, jnp.min(_squares(x, tile), -1)), None

    return lax.scan(add, jnp.full(len(x), jnp.inf), _tiles(exemplars))[0]


def nearest_distance(x: Float[np.ndarray, "n ..."], exemplars: UInt8[Array, "N ..."]) -> Float[np.ndarray, " n"]:
    """Compute the distance ||x - x_n|| to the nearest exemplar, for pixels in 0..1."""
    return np.sqrt(map_batches(lambda _, batch: _least_square(batch, exemplars), x, BATCH))


def _tiles(exemplars: UInt8[Array, "N ..."]) -> tuple[UInt8[Array, "T block P"], Bool[Array, "T block"]]:
    """Cut the exemplars into blocks of equal size. Also return a mask that is False for padding."""
    count = len(exemplars)
    block = min(BLOCK, count)
    exemplars = jnp.pad(exemplars.reshape(count, -1), ((0, -count % block), (0, 0)))
    there = jnp.arange(len(exemplars)) < count
    return exemplars.reshape(-1, block, exemplars.shape[1]), there.reshape(-1, block)


def _squares(x: Float[Array, "B ..."], tile: tuple[Array, Array]) -> Float[Array, "B block"]:
    """||x - x_n||^2 with one matrix product; infinite for padding."""
    x, means = x.reshape(len(x), -1), to_unit(tile[0])
    products = jnp.matmul(x, means.T, precision=lax.Precision.HIGHEST)
    squares = jnp.sum(jnp.square(x), -1)[:, None] + jnp.sum(jnp.square(means), -1) - 2.0 * products
    return jnp.where(tile[1], jnp.maximum(squares, 0.0), jnp.inf)


def log_likelihoods(
    kernel: Kernel,
    images: UInt8[np.ndarray, "n ..."],
    exemplars: UInt8[Array, "N ..."],
    bandwidths: Float[np.ndarray, " G"],
) -> Float[np.ndarray, "G n"]:
    """Compute log p(x | X, bandwidth) of all images for all bandwidths."""
    rates = jnp.asarray(kernel.rate(bandwidths), jnp.float32)
    parts = [np.asarray(log_window(batch, exemplars, rates), np.float64) for _, batch in padded_batches(images, BATCH)]
    pixels = math.prod(images.shape[1:])
    return np.concatenate(parts, axis=1)[:, : len(images)] + pixels * kernel.log_constant(bandwidths)[:, None]


def choose_bandwidth(kernel: Kernel, valid: UInt8[np.ndarray, "n ..."], exemplars: UInt8[Array, "N ..."]) -> float:
    """Find the best bandwidth on the validation images: search the whole range, then a finer grid around the best."""
    low, high = kernel.bandwidths
    for _ in range(2):
        grid = np.geomspace(low, high, GRID)
        values = log_likelihoods(kernel, valid, exemplars, grid).mean(axis=1)
        best = int(np.argmax(values))
        print(f"valid log-likelihood {values[best]:.3f} at bandwidth {grid[best]:.5f}", flush=True)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    if grid[best] in kernel.bandwidths:
        print("warning: the best bandwidth is at the end of the range; are validation images among the exemplars?")
    return float(grid[best])


def main(config: ConfigDict, workdir: Path) -> None:
    """Run the task of `experiments/*_parzen.py`: choose the bandwidth, score the test images, write results.json."""
    began = time.monotonic()
    configs.validate(config)
    binary = config.model.likelihood == "bernoulli"
    kernel = KERNELS[config.model.likelihood]
    grey = data.load(config.data, binarize=False)
    chosen = data.load_exemplars(config.eval.exemplars, grey, memory_mib=config.data.memory_mib).images
    dataset = splits.as_modelled(grey, config.model.likelihood)
    folder.open_workdir(workdir, config.to_dict())
    # The bandwidth is chosen with training images as exemplars: no validation image may be its own exemplar.
    train, exemplars = (
        jnp.asarray(splits.draw_binary(np.random.RandomState(config.seed), images) if binary else images)
        for images in (dataset.train.images, chosen)
    )
    print(f"{config.data.name}, {config.model.likelihood} window, {len(exemplars)} exemplars -> {workdir}", flush=True)
    bandwidth = choose_bandwidth(kernel, dataset.valid.images, train)
    order = subset(config.seed, len(dataset.test), config.eval.num_images)
    values = log_likelihoods(kernel, dataset.test.images[order], exemplars, np.array([bandwidth]))[0]
    test = {
        "log_likelihood": float(np.mean(values)),
        "log_likelihood_error": standard_error(values),
        "num_images": len(values),
        "exemplars": len(exemplars),
        "bandwidth": bandwidth,
    }
    if binary:
        test["bits_per_dim"] = float(-np.mean(values) / (math.prod(exemplars.shape[1:]) * math.log(2)))
    writer.append_metrics(workdir, 0, 0, "test", test)
    folder.update_results(workdir, config, 0, test, {"seconds": time.monotonic() - began})
    what = "log-likelihood" if binary else "log-density"
    error = "" if len(values) == 1 else f" ± {test['log_likelihood_error']:.3f} (standard error)"
    print(f"test {what} {test['log_likelihood']:.3f}{error}, {len(values)} images\nnumbers  {workdir}/results.json")
