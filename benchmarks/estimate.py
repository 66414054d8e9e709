"""An estimate of the cost of a training step on accelerators, by arithmetic only: nothing is run.

python -m benchmarks.estimate

For each case and for one device: the products of a step, the bytes between host and device and between devices, and the
memory. FLOP are the necessary ones (benchmarks/flops.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
from absl import app
from ml_collections import ConfigDict

from benchmarks.flops import step_gflop
from experiments import celeba
from exvae import config as configs
from exvae import models, state

TFLOPS = 100  # rate of an accelerator, in float32 or its replacement
FLOAT = 4  # bytes
SEARCHES = ("exact", "scann")


class Case(NamedTuple):
    """A training set and the devices to train on."""

    name: str
    num_train: int
    devices: int
    images_on: str  # device or host


CASES = (
    Case("CelebA", 162_770, 8, "device"),
    Case("100 million images of that size", 100_000_000, 64, "host"),
)


def make_config(case: Case, search: str) -> ConfigDict:
    """100 images on each device, K = 5, M = N / 2, as in experiments/celeba.py."""
    config = celeba.get_config()
    config.retrieval.search = search
    config.train.batch_size *= case.devices
    return configs.resolve(config, case.num_train)


def estimate(case: Case, search: str) -> dict[str, float]:
    """Estimate one step on one device. The names of the figures contain their units."""
    config = make_config(case, search)
    model = models.build(config.model, (64, 64, 3))
    params = jax.eval_shape(lambda: state.init_params(config, model))
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    batch, dim, d = config.train.batch_size, config.model.latent_dim, case.devices
    slots = batch * config.retrieval.num_neighbours
    image = math.prod(model.image_shape)
    table = case.num_train * dim * FLOAT
    # In a ring, each device sends and receives an array about twice for a sum, and once for a copy on all devices.
    between = 2 * num_params * FLOAT + 2 * batch * dim * FLOAT  # gradients of parameters and of z
    between += (batch + slots) * dim * FLOAT + batch * dim * FLOAT  # means for the table, and z
    if search == "exact":
        between += batch * dim * FLOAT + d * batch * (config.retrieval.num_neighbours + 1) * 2 * FLOAT  # candidates
    moved = (batch + slots) * image / d if case.images_on == "host" else 0
    tables = table / d * (3 if search == "scann" else 1)  # also copies for the current and the next index
    images = 0 if case.images_on == "host" else case.num_train * image
    gflop = step_gflop(config, model) / d
    return {
        "GFLOP": gflop,
        f"ms at {TFLOPS} TFLOP/s": gflop / TFLOPS,
        "host to device, MB": moved / 1e6,
        "between devices, MB": between / 1e6,
        "images, GB": images / 1e9,
        "tables, GB": tables / 1e9,
        "parameters, gradients and Adam, GB": 4 * num_params * FLOAT / 1e9,
        "table of means and index in a host, GB": (2 * table * 2 if search == "scann" else 0) / 1e9,
        "images in a file, GB": case.num_train * image / 1e9,
    }


def main(argv: list[str]) -> None:
    del argv
    columns = {f"{case.name}, {case.devices} devices, {s}": estimate(case, s) for case in CASES for s in SEARCHES}
    for number, name in enumerate(columns, 1):
        print(f"{number}  {name}")
    print(f"{'':42}" + "".join(f"{number:>10}" for number in range(1, len(columns) + 1)))
    for row in next(iter(columns.values())):
        print(f"{row:42}" + "".join(f"{column[row]:10.3g}" for column in columns.values()))


if __name__ == "__main__":
    app.run(main)
