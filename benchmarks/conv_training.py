"""Does the way of computing convolutions change training? The first steps of `convhvae`, computed in two ways.

python -m benchmarks.conv_training [--steps=200] [--out=FILE.json]

From the same parameters and with the same noise, the convolutions are those of `models.conv_cpu`, or all are patches
of the images. Another seed shows how much curves differ anyway. MNIST must be there (EXVAE_DATA_DIR).
"""

from __future__ import annotations

import contextlib
import json
from unittest import mock

import numpy as np
from absl import app, flags

from benchmarks.loop import EXPERIMENTS, Loop
from exvae import config as configs
from exvae import data
from exvae.data.store import Store
from exvae.models import conv_cpu
from exvae.once import forget
from exvae.scale import sharding

STEPS = flags.DEFINE_integer("steps", 200, "number of training steps")
WINDOW = flags.DEFINE_integer("window", 20, "the curves are means of so many steps")
OUT = flags.DEFINE_string("out", "", "also write the curves to this JSON file")


def method(name: str) -> contextlib.AbstractContextManager:
    """Compute convolutions in this way."""
    forget()
    same = contextlib.nullcontext()
    return same if name == "ours" else mock.patch.object(conv_cpu, "_choose", conv_cpu.input_patches)


def curve(name: str, seed: int) -> list[float]:
    """Train, and return the mean training ELBO of each window."""
    config = EXPERIMENTS["convhvae"].get_config("prior=gaussian")
    config.seed = seed
    images = data.load(config.data, binarize=False).train.images
    with method(name):
        loop = Loop(configs.resolve(config, len(images)), Store(sharding.make_mesh(), images, 1e6, 0), None)
        elbos = []
        for _ in range(STEPS.value):
            loop.run()
            elbos.append(float(loop.elbo))
    return np.mean(np.reshape(elbos, (-1, WINDOW.value)), axis=1).round(3).tolist()


def main(argv: list[str]) -> None:
    del argv
    runs = [("ours", 0), ("patches", 0), ("ours", 1)]
    found = {f"{name}, seed {seed}": curve(name, seed) for name, seed in runs}
    for name, values in found.items():
        print(f"{name:16}" + "".join(f"{value:9.2f}" for value in values))
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump({"steps": STEPS.value, "window": WINDOW.value, "curves": found}, file, indent=2)


if __name__ == "__main__":
    app.run(main)
