"""Time of a classifier's training step, plain and augmented, compared with the rate of a matrix product.

python -m benchmarks.augment_step [--hidden_dim=1024] [--out=FILE.json]

60,000 random images of 28 x 28, batch 100, the dense VAE at its real size. The steps and the product alternate in one
run, because the speed of a shared machine varies. The table shows medians.
"""

from __future__ import annotations

import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks.flops import square_product
from exvae import config as configs
from exvae import models
from exvae.distributions import Normal
from exvae.uses import classifier as classifiers

HIDDEN = flags.DEFINE_integer("hidden_dim", 1024, "units of a hidden layer")
STEPS = flags.DEFINE_integer("steps", 200, "steps of each kind")
OUT = flags.DEFINE_string("out", "", "also write the figures to this JSON file")
NUM_IMAGES, CLASSES = 60_000, 10


def gflop(config: ConfigDict, *, augmented: bool) -> float:
    """The necessary products of a step. The decoder and the input of the first layer need no gradient."""
    batch, hidden, pixels = config.augment.batch_size, config.augment.hidden_dim, 784
    images = 2 * batch if augmented else batch
    total = images * (4 * pixels * hidden + 6 * hidden * hidden + 6 * hidden * CLASSES)
    if augmented:
        units, latent = config.model.hidden_dim, config.model.latent_dim
        total += batch * 2 * (2 * latent * units + 2 * units * units + units * pixels)
    return total / 1e9


def main(argv: list[str]) -> None:
    del argv
    config = configs.get_config()
    config.augment.hidden_dim = HIDDEN.value
    model = models.build(config.model, (28, 28, 1))
    params = {"model": models.init(jax.random.key(0), model)[0]}  # this model has no batch norm
    rng = np.random.default_rng(0)
    codes = rng.normal(size=(NUM_IMAGES, config.model.latent_dim)).astype(np.float32)
    source = classifiers.Source(
        jnp.asarray(rng.integers(0, 256, (NUM_IMAGES, 28, 28, 1), dtype=np.uint8)),
        jnp.asarray(rng.integers(0, CLASSES, NUM_IMAGES).astype(np.int32)),
        Normal(jnp.asarray(codes), jnp.full(codes.shape, -2.0)),
    )
    classifier = classifiers.Classifier(HIDDEN.value, CLASSES)
    optimizer = classifiers.make_optimizer(config, 60_000)
    key = jax.random.key(0)
    kinds = {}
    for name, lambda_ in (("plain", 1.0), ("augmented", 0.4)):
        step = classifiers.make_step(config, classifier, model, optimizer, lambda_=lambda_)
        state = classifiers.init_state(key, classifier, optimizer, model.image_shape)
        kinds[name] = [step, state, []]
    product, product_gflop = square_product()
    rates = []
    for number in range(STEPS.value + 1):
        index = rng.choice(NUM_IMAGES, config.augment.batch_size, replace=False)
        for kind in kinds.values():
            began = time.perf_counter()
            kind[1], _ = jax.block_until_ready(kind[0](kind[1], params, source, key, index))
            if number:  # the first step compiles
                kind[2].append(time.perf_counter() - began)
        began = time.perf_counter()
        product()
        rates.append(product_gflop / (time.perf_counter() - began))
    rate = statistics.median(rates)
    print(f"matrix product: {rate:.0f} GFLOP/s")
    print(f"{'step':12}{'ms':>8}{'real images/s':>16}{'GFLOP':>8}{'of matmul rate':>16}")
    found = {"matmul_gflops": round(rate, 1)}
    for name, (_, _, times) in kinds.items():
        seconds, work = statistics.median(times), gflop(config, augmented=name == "augmented")
        speed, fraction = config.augment.batch_size / seconds, work / seconds / rate
        print(f"{name:12}{1e3 * seconds:8.2f}{speed:16.0f}{work:8.2f}{100 * fraction:15.0f}%")
        found[name] = {"ms": 1e3 * seconds, "images_per_second": speed, "gflop": work, "matmul_fraction": fraction}
    print(f"augmented / plain: {found['augmented']['ms'] / found['plain']['ms']:.2f} times as long")
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    app.run(main)
