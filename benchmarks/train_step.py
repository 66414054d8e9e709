"""Time of one training step for every architecture and prior, beside the machine's matrix product rate.

python -m benchmarks.train_step [--architectures=vae,hvae,convhvae] [--out=FILE.json]

Real shapes: N = 50,000 exemplars of 28 x 28, M = 25,000 drawn, K = 10 neighbours, batch 100. All variants of an
architecture are timed in turns in one run, with the matrix product among them, because the speed of a shared machine
wanders. The images are random bytes: the time of a step does not depend on them.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.flops import square_product, step_gflop
from exvae import config as configs
from exvae import models, optim, step, train
from exvae.priors.types import Batch
from exvae.retrieval import scann

NUM_TRAIN, NUM_EXEMPLARS, BATCH = 50_000, 25_000, 100
VARIANTS = [("gaussian", "none"), ("vamp", "none"), ("exemplar", "none"), ("exemplar", "exact"), ("exemplar", "scann")]
ARCHITECTURES = flags.DEFINE_list("architectures", ["vae", "hvae", "convhvae"], "which to time")
SECONDS = flags.DEFINE_float("seconds", 6.0, "time for each variant; a slow one takes at least two steps")
SKIP = flags.DEFINE_list("skip", [], "variants to leave out, as architecture/prior/search")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")


@dataclasses.dataclass
class Variant:
    """One compiled step and its timings."""

    architecture: str
    prior: str
    search: str
    run: Callable[[], None]
    gflop: float
    extra_seconds: float = 0.0  # of work that is not done in every step
    times: list[float] = dataclasses.field(default_factory=list)

    def measure(self) -> None:
        began = time.perf_counter()
        self.run()
        self.times.append(time.perf_counter() - began + self.extra_seconds)


def matmul_variant() -> Variant:
    return Variant("matmul", "", "", *square_product())


def step_variant(architecture: str, prior: str, search: str, images: jax.Array) -> Variant:
    """The real training step on random images, with the host's part of the ScaNN search included."""
    config = configs.get_config()
    config.model.architecture, config.prior.name, config.retrieval.search = architecture, prior, search
    config.prior.num_exemplars = NUM_EXEMPLARS
    model = models.build(config.model, images.shape[1:])
    optimizer = optim.optimizer(config.optim, 1000)
    state = step.init_state(config, model, optimizer)
    rng = np.random.default_rng(0)
    if train.uses_table(config):
        table = rng.normal(size=(len(images), config.model.latent_dim)).astype(np.float32)
        state = state.replace(table=jnp.asarray(table))
    num_candidates = scann.num_candidates(config.retrieval.num_neighbours, NUM_EXEMPLARS, len(images))
    index, build_seconds = None, 0.0
    if search == "scann":
        began = time.perf_counter()
        index = scann.ScannIndex(table, num_candidates)
        build_seconds = (time.perf_counter() - began) / config.retrieval.rebuild_steps  # its share in every step

    def next_batch() -> Batch:
        chosen = rng.choice(len(images), BATCH, replace=False).astype(np.int32)
        return Batch(images, chosen, index.search(chosen) if index else None)

    batch = next_batch()
    compiled = step.make_train_step(config, model, optimizer, 500).lower(state, batch).compile()
    holder = [compiled(state, batch)[0]]

    def run() -> None:
        holder[0], _ = compiled(holder[0], next_batch())
        jax.block_until_ready(holder[0])

    run()
    return Variant(architecture, prior, search, run, step_gflop(config, model), build_seconds)


def measure(variants: list[Variant], matmul: Variant, seconds: float) -> None:
    """Turn by turn, until each fast variant has had its share of time and each slow one two steps."""
    while waiting := [v for v in variants if len(v.times) < 2 or sum(v.times) < seconds]:
        for variant in waiting:
            variant.measure()
            measure_beside(variant, matmul)


def measure_beside(variant: Variant, matmul: Variant) -> None:
    """The matrix product for a fifth of the time that the step took, so that both see the same minutes."""
    until = time.perf_counter() + min(2.0, 0.2 * variant.times[-1])
    matmul.measure()
    while time.perf_counter() < until:
        matmul.measure()


def rows(variants: list[Variant], matmul: Variant) -> list[dict]:
    """One row per variant; the median is robust against a neighbour's burst."""
    rate = matmul.gflop / statistics.median(matmul.times)  # GFLOP/s
    found = []
    for variant in variants:
        seconds = statistics.median(variant.times)
        found.append(
            {
                "architecture": variant.architecture,
                "prior": variant.prior,
                "search": variant.search,
                "ms_per_step": round(1e3 * seconds, 2),
                "gflop": round(variant.gflop, 3),
                "matmul_fraction": round(variant.gflop / seconds / rate, 3),
            }
        )
    print(f"matrix product: {rate:.0f} GFLOP/s")
    return found


def show(found: list[dict]) -> None:
    print(f"{'architecture':13}{'prior':10}{'search':8}{'ms/step':>10}{'GFLOP':>9}{'of matmul rate':>16}")
    for row in found:
        print(
            f"{row['architecture']:13}{row['prior']:10}{row['search']:8}{row['ms_per_step']:10.1f}"
            f"{row['gflop']:9.2f}{100 * row['matmul_fraction']:15.0f}%"
        )


def main(argv: list[str]) -> None:
    del argv
    bytes_ = np.random.default_rng(1).integers(0, 256, (NUM_TRAIN, 28, 28, 1), dtype=np.uint8)
    images = jnp.asarray(bytes_)
    found = []
    for architecture in ARCHITECTURES.value:
        chosen = [v for v in VARIANTS if f"{architecture}/{v[0]}/{v[1]}" not in SKIP.value]
        variants = [step_variant(architecture, prior, search, images) for prior, search in chosen]
        matmul = matmul_variant()
        measure(variants, matmul, SECONDS.value)
        found += rows(variants, matmul)
    show(found)
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    app.run(main)
