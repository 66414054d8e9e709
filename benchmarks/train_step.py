"""Time of one training step for every architecture and prior, compared with the rate of a matrix product.

python -m benchmarks.train_step [--architectures=vae,hvae,convhvae] [--out=FILE.json]
python -m benchmarks.train_step --architectures=pixelsnail,celeba --skip='*/vamp/*,*/exemplar/none,*/exemplar/scann'

The settings are those of the experiments: N = 50,000 exemplars of 28 x 28, M = 25,000, K = 10, batch 100; for celeba
N = 162,770 exemplars of 64 x 64 x 3 (2 GB), M = N / 2, K = 5. All variants of an architecture and the matrix product
alternate in one run, because the speed of a shared machine varies. The images are random bytes, because the time of a
step does not depend on them.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import statistics
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks.flops import square_product, step_gflop
from benchmarks.loop import EXPERIMENTS, TRAINING_SETS, Loop
from exvae import config as configs
from exvae import models
from exvae.data.store import Store
from exvae.retrieval import scann
from exvae.scale import sharding
from exvae.training import feed

ACCELERATOR_TFLOPS = 100
VARIANTS = [("gaussian", "none"), ("vamp", "none"), ("exemplar", "none"), ("exemplar", "exact"), ("exemplar", "scann")]
ARCHITECTURES = flags.DEFINE_list(
    "architectures", ["vae", "hvae", "convhvae"], "architectures to measure: " + ", ".join(EXPERIMENTS)
)
SECONDS = flags.DEFINE_float("seconds", 6.0, "time for each variant; a slow one has at least two steps")
SKIP = flags.DEFINE_list("skip", [], "variants to leave out, as architecture/prior/search; * stands for anything")
NUM_TRAIN = flags.DEFINE_integer("num_train", 0, "N; 0: that of the experiment")
CHANNELS = flags.DEFINE_integer("channels", 0, "channels of convolutions; 0: those of the experiment")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")


@dataclasses.dataclass
class Variant:
    """One compiled step and its measurements."""

    architecture: str
    prior: str
    search: str
    run: Callable[[], None]
    gflop: float
    temporary_mib: float = 0.0
    arguments_mib: float = 0.0  # state, training set and batch
    extra_seconds: float = 0.0  # this step's share of rare work: index builds
    times: list[float] = dataclasses.field(default_factory=list)

    def measure(self) -> None:
        """Time one call."""
        began = time.perf_counter()
        self.run()
        self.times.append(time.perf_counter() - began + self.extra_seconds)


def matmul_variant() -> Variant:
    """The matrix product, as a variant."""
    return Variant("matmul", "", "", *square_product())


def make_config(architecture: str, prior: str, search: str) -> ConfigDict:
    """The config of the architecture's experiment, with this prior and search."""
    config = EXPERIMENTS[architecture].get_config(f"prior={prior}")
    config.retrieval.search = search
    config.model.channels = CHANNELS.value or config.model.channels
    return configs.resolve(config, training_set_shape(config)[0])


def training_set_shape(config: ConfigDict) -> tuple[int, int, int, int]:
    """The shape (N, H, W, C) of the training set."""
    num_train, *image_shape = TRAINING_SETS[config.data.name]
    return NUM_TRAIN.value or num_train, *image_shape


def step_variant(config: ConfigDict, store: Store) -> Variant:
    """Compile the real training step on random images, including the work of the host in a ScaNN search."""
    table, build_seconds = None, 0.0
    if feed.uses_table(config):
        table = np.random.default_rng(0).normal(size=(len(store), config.model.latent_dim)).astype(np.float32)
    if feed.uses_index(config):
        began = time.perf_counter()
        scann.ScannIndex(table, scann.choose_shape(config, len(store)))
        build_seconds = (time.perf_counter() - began) / config.retrieval.rebuild_steps  # per step
    loop = Loop(config, store, table)
    model = models.build(config.model, store.image_shape)
    return Variant(
        config.model.architecture,
        config.prior.name,
        config.retrieval.search,
        loop.run,
        step_gflop(config, model),
        loop.memory.temp_size_in_bytes / 2**20,
        loop.memory.argument_size_in_bytes / 2**20,
        build_seconds,
    )


def measure(variants: list[Variant], matmul: Variant, seconds: float) -> None:
    """Measure in rounds, until each fast variant has used its time and each slow one has two steps."""
    while waiting := [v for v in variants if len(v.times) < 2 or sum(v.times) < seconds]:
        for variant in waiting:
            variant.measure()
            measure_beside(variant, matmul)


def measure_beside(variant: Variant, matmul: Variant) -> None:
    """Measure the matrix product for a fifth of the time of the step, so both are measured in the same minutes."""
    until = time.perf_counter() + min(2.0, 0.2 * variant.times[-1])
    matmul.measure()
    while time.perf_counter() < until:
        matmul.measure()


def rows(variants: list[Variant], matmul: Variant) -> list[dict]:
    """One row per variant. Medians ignore bursts of other programs."""
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
                "steps_per_second": round(1 / seconds, 4),
                "gflop": round(variant.gflop, 3),
                "matmul_fraction": round(variant.gflop / seconds / rate, 3),
                "temporary_mib": round(variant.temporary_mib, 1),
                "arguments_mib": round(variant.arguments_mib, 1),
                "memory_mib": round(variant.temporary_mib + variant.arguments_mib, 1),
                "accelerator_floor_ms": round(variant.gflop / ACCELERATOR_TFLOPS, 4),
            }
        )
    print(f"matrix product: {rate:.0f} GFLOP/s")
    return found


def show(found: list[dict]) -> None:
    """Print the table."""
    print(
        f"{'architecture':13}{'prior':10}{'search':8}{'ms/step':>10}{'steps/s':>9}{'GFLOP':>10}{'of matmul rate':>16}"
        f"{'memory MiB':>12}{'floor ms':>10}"
    )
    for row in found:
        print(
            f"{row['architecture']:13}{row['prior']:10}{row['search']:8}{row['ms_per_step']:10.1f}"
            f"{row['steps_per_second']:9.3g}{row['gflop']:10.2f}{100 * row['matmul_fraction']:15.0f}%"
            f"{row['memory_mib']:12.0f}{row['accelerator_floor_ms']:10.3g}"
        )
    print("memory: temporary memory and arguments, including the whole training set")
    print(f"floor: time at the full rate of an accelerator with {ACCELERATOR_TFLOPS} TFLOP/s; computed, not measured")


def time_architecture(architecture: str) -> list[dict]:
    """Measure all variants of an architecture on one training set."""
    chosen = [
        variant
        for variant in VARIANTS
        if not any(fnmatch.fnmatch("/".join([architecture, *variant]), pattern) for pattern in SKIP.value)
    ]
    variant_configs = [make_config(architecture, prior, search) for prior, search in chosen]
    if not variant_configs:
        return []
    shape = training_set_shape(variant_configs[0])
    images = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    store = Store(sharding.make_mesh(), images, device_mib=2 * images.nbytes / 2**20, memory_mib=0)
    variants = [step_variant(config, store) for config in variant_configs]
    matmul = matmul_variant()
    measure(variants, matmul, SECONDS.value)
    return rows(variants, matmul)


def main(argv: list[str]) -> None:
    del argv
    found = []
    for architecture in ARCHITECTURES.value:
        found += time_architecture(architecture)
    show(found)
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump(found, file, indent=2)


if __name__ == "__main__":
    app.run(main)
