"""The part of an epoch that validation takes, for every architecture.

python -m benchmarks.validation [--architectures=vae,hvae,convhvae,pixelsnail,celeba] [--out=FILE.json]

Validation encodes all N training images with an exemplar prior, and then computes the ELBO of the validation images.
Both are measured on a part of the images, on random bytes, and multiplied up, as are a few training steps of RAT.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from absl import app, flags

from benchmarks.loop import EXPERIMENTS, TRAINING_SETS, Loop
from exvae import config as configs
from exvae import models
from exvae.data.store import Store
from exvae.evaluation.elbo import make_evaluator, mean_elbo
from exvae.scale import sharding

ARCHITECTURES = flags.DEFINE_list("architectures", list(EXPERIMENTS), "architectures to measure")
SECONDS = flags.DEFINE_float("seconds", 8.0, "time for the training steps of each architecture")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")
VALIDATION_IMAGES = {"mnist": 10_000, "celeba": 19_867}
PARTS = {"vae": 10_000, "hvae": 10_000, "convhvae": 2_000, "pixelsnail": 1_000, "celeba": 400}  # images to measure


def timed(call: Callable[[], Any], seconds: float) -> float:
    """The median time of a call, after one that compiles."""
    jax.block_until_ready(call())
    times: list[float] = []
    while len(times) < 2 or sum(times) < seconds:
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def row(architecture: str) -> dict[str, Any]:
    """Measure one architecture, with an exemplar prior and an exact search."""
    config = EXPERIMENTS[architecture].get_config()
    config.retrieval.search = "exact"
    num_train, *image_shape = TRAINING_SETS[config.data.name]
    config = configs.resolve(config, num_train)
    rng, mesh = np.random.default_rng(1), sharding.make_mesh()
    draw = lambda count: rng.integers(0, 256, (count, *image_shape), dtype=np.uint8)  # noqa: E731
    images = draw(num_train)
    loop = Loop(config, Store(mesh, images, 2 * images.nbytes / 2**20, 0), _table(rng, config, num_train))
    step = timed(loop.run, SECONDS.value)

    model, part = models.build(config.model, tuple(image_shape)), PARTS[architecture]
    evaluator, params = make_evaluator(config, model, mesh), loop.state.best_guess
    store, valid = Store(mesh, images[:part], 1e6, 0), images[:part]
    encoding = timed(lambda: evaluator.encode_all(params, store), 2.0) * num_train / part
    components = evaluator.components(params, _table(rng, config, num_train), num_train)
    elbo = timed(lambda: mean_elbo(jax.random.key(0), evaluator, params, valid, components), 2.0)
    elbo *= VALIDATION_IMAGES[config.data.name] / part
    epoch = step * (num_train // config.train.batch_size)
    return {
        "architecture": architecture,
        "step_ms": round(1e3 * step, 2),
        "steps_of_epoch_seconds": round(epoch, 2),
        "encoding_seconds": round(encoding, 2),
        "elbo_seconds": round(elbo, 2),
        "share": round((encoding + elbo) / (epoch + encoding + elbo), 4),
        "validate_epochs": config.train.validate_epochs,
    }


def _table(rng: np.random.Generator, config: Any, num_train: int) -> np.ndarray:
    return rng.normal(size=(num_train, config.model.latent_dim)).astype(np.float32)


def main(argv: list[str]) -> None:
    del argv
    rows = []
    for architecture in ARCHITECTURES.value:
        rows.append(row(architecture))
        print("  ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(rows, file, indent=2)


if __name__ == "__main__":
    app.run(main)
