"""The cost of a training step for N = 10,000 to 1,000,000 exemplars, with exact and ScaNN search.

python -m benchmarks.scale [--exemplars=10000,50000,100000,1000000] [--out=FILE.json] [--plot=FILE.png]

The images are glyphs. The latent means come from a `vae` after a few hundred training steps, because the recall of
an index depends on their distribution. M = N / 2 exemplars are drawn, K = 10, batch 100. All variants
alternate in one run, with images on the device. The largest N is also measured with images on the host, and while an
index is built in the background.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import statistics
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks.loop import Loop
from experiments import mnist_vae
from exvae import config as configs
from exvae import models
from exvae.data.sources import glyphs
from exvae.data.store import Store
from exvae.encoding import make_encode_all
from exvae.retrieval import scann
from exvae.retrieval.index import in_background, recall
from exvae.runs.figures import save_panels
from exvae.scale import sharding

EXEMPLARS = flags.DEFINE_list("exemplars", ["10000", "50000", "100000", "1000000"], "N")
TRAIN_STEPS = flags.DEFINE_integer("train_steps", 500, "training steps before the means are computed")
ROUNDS = flags.DEFINE_integer("rounds", 8, "measurements of each variant")
STEPS = flags.DEFINE_integer("steps", 10, "steps in a measurement; two if a step is slow")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")
PLOT = flags.DEFINE_string("plot", "", "also plot the rows in this PNG file")


@dataclasses.dataclass
class Variant:
    """A training loop and its measurements."""

    num_exemplars: int
    search: str
    images: str  # device or host
    loop: Loop
    build_seconds: float = float("nan")
    recall: float = 1.0
    times: list[float] = dataclasses.field(default_factory=list)

    def measure(self, steps: int) -> None:
        """Time this many steps."""
        began = time.perf_counter()
        self.loop.run(steps)
        self.times.append((time.perf_counter() - began) / steps)

    def row(self) -> dict:
        """The row of the table."""
        memory = self.loop.memory
        return {
            "exemplars": self.num_exemplars,
            "search": self.search,
            "images": self.images,
            "ms_per_step": round(1e3 * statistics.median(self.times), 1),
            "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
            "arguments_mib": round(memory.argument_size_in_bytes / 2**20, 1),
            "recall": round(self.recall, 4),
            "build_seconds": None if np.isnan(self.build_seconds) else round(self.build_seconds, 1),
        }


def make_config(search: str, num_exemplars: int) -> ConfigDict:
    """The config of the MNIST `vae` for this search and N."""
    config = mnist_vae.get_config()
    config.retrieval.search = search
    return configs.resolve(config, num_exemplars)


def make_store(images: np.ndarray, on_host: bool) -> Store:
    """Store the images on the host or on the device."""
    device_mib = 1e-6 if on_host else 2 * images.nbytes / 2**20
    return Store(sharding.make_mesh(), images, device_mib, memory_mib=0)


def learn(images: np.ndarray, steps: int) -> tuple[dict, np.ndarray]:
    """Train on the first 50,000 images. Return the parameters and the means of all images."""
    first = make_store(images[:50_000], on_host=False)
    loop = Loop(make_config("exact", len(first)), first, np.zeros((len(first), 40), np.float32))
    loop.run(steps)
    params = loop.state.params
    model = models.build(make_config("exact", len(first)).model, images.shape[1:])
    encode_all = make_encode_all(model, sharding.make_mesh(), block=1000)
    return jax.device_get(params), np.array(encode_all(params, make_store(images, on_host=True))[: len(images)])


def make_variant(store: Store, table: np.ndarray, params: dict, search: str) -> Variant:
    """Compile the step of a variant. With ScaNN, also time a build and measure its recall."""
    config = make_config(search, len(store))
    loop = Loop(config, store, table, params)
    variant = Variant(len(store), search, "host" if store.on_host else "device", loop)
    if search == "scann":
        began = time.perf_counter()
        index = scann.ScannIndex(table, scann.choose_shape(config, len(store)))
        variant.build_seconds = time.perf_counter() - began
        variant.recall = recall(index, table, config.retrieval.num_neighbours)
    return variant


def overlap(variant: Variant, table: np.ndarray, rounds: int) -> dict[str, float]:
    """Measure the step alone, and while an index is built in the background."""
    shape = scann.choose_shape(make_config("scann", len(table)), len(table))
    alone, beside, seconds = [], [], []
    for _ in range(rounds):
        began = time.perf_counter()
        variant.loop.run(STEPS.value)
        alone.append((time.perf_counter() - began) / STEPS.value)
        first = time.perf_counter()
        build = in_background(scann.ScannIndex, table, shape)
        while not build.done():
            began = time.perf_counter()
            variant.loop.run(2)
            beside.append((time.perf_counter() - began) / 2)
        seconds.append(time.perf_counter() - first)
    alone, beside = statistics.median(alone), statistics.median(beside)
    return {
        "ms_alone": round(1e3 * alone, 1),
        "ms_beside": round(1e3 * beside, 1),
        "speed": round(alone / beside, 3),
        "build_seconds_beside": round(statistics.median(seconds), 1),
    }


def show(rows: list[dict]) -> None:
    """Print the table."""
    print(
        f"{'N':>9}  {'search':7}{'images':8}{'ms/step':>8}{'temporary MiB':>15}{'arguments MiB':>15}"
        f"{'recall@10':>11}{'build s':>9}"
    )
    for row in rows:
        build = "" if row["build_seconds"] is None else f"{row['build_seconds']:.1f}"
        print(
            f"{row['exemplars']:9d}  {row['search']:7}{row['images']:8}{row['ms_per_step']:8.1f}"
            f"{row['temporary_mib']:15.1f}{row['arguments_mib']:15.1f}{row['recall']:11.3f}{build:>9}"
        )


def plot(path: Path, rows: list[dict]) -> None:
    """Plot the time, the temporary memory, the recall and the build time against N."""

    def lines(name: str, searches: tuple[str, ...]) -> dict:
        return {
            {"exact": "exact search", "scann": "ScaNN"}[search]: zip(
                *[(r["exemplars"], r[name]) for r in rows if r["search"] == search and r["images"] == "device"],
                strict=True,
            )
            for search in searches
        }

    both, scann_only = ("exact", "scann"), ("scann",)
    panels = {
        "ms per step": lines("ms_per_step", both),
        "temporary memory of a step, MiB": lines("temporary_mib", both),
        "recall@10": lines("recall", scann_only),
        "seconds to build the index": lines("build_seconds", scann_only),
    }
    save_panels(path, panels, "exemplars N")


def main(argv: list[str]) -> None:
    del argv
    sizes = sorted(map(int, EXEMPLARS.value))
    began = time.perf_counter()
    images = glyphs.generate(sizes[-1], 0).images
    params, means = learn(images, TRAIN_STEPS.value)
    print(f"{sizes[-1]} glyphs drawn and encoded in {time.perf_counter() - began:.0f} s", flush=True)
    variants = []
    for size in sizes:
        store = make_store(images[:size], on_host=False)
        variants += [make_variant(store, means[:size], params, search) for search in ("exact", "scann")]
    variants.append(make_variant(make_store(images, on_host=True), means, params, "scann"))
    for _ in range(ROUNDS.value):
        for variant in variants:
            slow = bool(variant.times) and variant.times[0] > 0.3
            variant.measure(2 if slow else STEPS.value)
    rows = [variant.row() for variant in variants]
    show(rows)
    largest = variants[-2]
    beside = overlap(largest, means, rounds=3)
    print(
        f"N = {sizes[-1]}, ScaNN: {beside['ms_alone']} ms/step alone, {beside['ms_beside']} while an index is built: "
        f"{100 * beside['speed']:.0f} % of the speed; the build then takes {beside['build_seconds_beside']} s"
    )
    print(f"peak memory of the whole process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if OUT.value:
        Path(OUT.value).write_text(json.dumps({"rows": rows, "rebuild": beside}, indent=2) + "\n")
    if PLOT.value:
        plot(Path(PLOT.value), rows)


if __name__ == "__main__":
    app.run(main)
