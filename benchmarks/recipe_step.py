"""The cost of each part of the fast recipe: steps of a dense architecture with and without it, measured in one run.

python -m benchmarks.recipe_step [--architecture=hvae] [--priors=exemplar] [--rows=...] [--rounds=40] [--out=FILE.json]

N = 50,000, M = 25,000. Images and the table of means are random: the time of a step does not depend on them.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from typing import Any

import numpy as np
from absl import app, flags
from ml_collections import ConfigDict

from benchmarks.flops import square_product
from benchmarks.loop import Loop
from experiments import common
from exvae import config as configs
from exvae.data.store import Store
from exvae.scale import sharding
from exvae.training import feed
from exvae.training.optim import AVERAGE_STEPS

NUM_TRAIN = 50_000
PRIORS = ("gaussian", "vamp", "exemplar")
STEPS = AVERAGE_STEPS  # steps in one measurement, with one update of the average
BOTH = {"optim.estimator": "stl", "optim.ema": 0.999}
# Changes to RAT with K = 10 and batches of 100. The last row of the table is recipe=fast itself.
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "stl": {"optim.estimator": "stl"},
    "ema": {"optim.ema": 0.999},
    "stl + ema": BOTH,
    "two z": {"objective.samples": 2},
    "four z": {"objective.samples": 4},
    "stl + ema, two z": {**BOTH, "objective.samples": 2},
    "stl + ema, K = 1": {**BOTH, "retrieval.num_neighbours": 1},
}
ARCHITECTURE = flags.DEFINE_enum("architecture", "vae", ["vae", "hvae"], "the architecture to measure")
CHOSEN = flags.DEFINE_multi_enum("priors", PRIORS, PRIORS, "a prior to measure; may be given several times")
ROWS = flags.DEFINE_list("rows", [], "rows to measure besides `plain`, as --rows='stl + ema'; default: all")
ROUNDS = flags.DEFINE_integer("rounds", 40, f"measurements, each of {STEPS} steps")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")


def make_config(prior: str, fields: dict[str, Any] | None) -> ConfigDict:
    """RAT with these changes; None: recipe=fast."""
    recipe = "paper" if fields is not None else "fast"
    config = common.build("mnist", ARCHITECTURE.value, prior=prior, recipe=recipe)
    config.retrieval.search = "exact"
    config.update_from_flattened_dict(fields or {})
    return configs.resolve(config, NUM_TRAIN)


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95 % confidence interval, from order statistics: no distribution is assumed."""
    ordered, n = sorted(values), len(values)
    half = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def main(argv: list[str]) -> None:
    del argv
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (NUM_TRAIN, 28, 28, 1), dtype=np.uint8)
    store = Store(sharding.make_mesh(), images, device_mib=2 * images.nbytes / 2**20, memory_mib=0)
    loops, batch = {}, {}
    for prior in CHOSEN.value:
        for name, fields in {**CHANGES, "recipe=fast": None}.items():
            if ROWS.value and name not in ("plain", *ROWS.value):
                continue
            config = make_config(prior, fields)
            table = None
            if feed.uses_table(config):
                table = rng.normal(size=(NUM_TRAIN, config.model.latent_dim)).astype(np.float32)
            elif "K = 1" in name:
                continue  # the other priors have no neighbours
            loops[prior, name], batch[prior, name] = Loop(config, store, table), config.train.batch_size
    times: dict[tuple[str, str], list[float]] = {key: [] for key in loops}
    product, gflop = square_product()
    rates = []
    for number in range(ROUNDS.value):
        for key, loop in sorted(loops.items(), reverse=number % 2 == 1):  # forwards and backwards, so drift cancels
            began = time.perf_counter()
            loop.run(STEPS)
            times[key].append((time.perf_counter() - began) / STEPS)
        began = time.perf_counter()
        product()
        rates.append(gflop / (time.perf_counter() - began))
    rows = []
    for (prior, name), values in times.items():
        # Ratios of consecutive measurements, because the speed of a shared machine varies.
        ratio, low, high = median_interval([a / b for a, b in zip(values, times[prior, "plain"], strict=True)])
        seconds = statistics.median(values)
        images_per_second = batch[prior, name] / seconds
        rows.append({"prior": prior, "step": name, "ms": round(1e3 * seconds, 2), "ratio": round(ratio, 3),
                     "interval": [round(low, 3), round(high, 3)],
                     "images_per_second": round(images_per_second)})  # fmt: skip
    print(f"matrix product: {statistics.median(rates):.0f} GFLOP/s")
    print(f"{'prior':10}{'step':26}{'ms/step':>9}{'to plain':>10}{'95 %':>15}{'images/s':>10}")
    for row in rows:
        interval = "{:.3f}, {:.3f}".format(*row["interval"])
        numbers = f"{row['ms']:9.1f}{row['ratio']:10.3f}{interval:>15}{row['images_per_second']:10d}"
        print(f"{row['prior']:10}{row['step']:26}{numbers}")
    if OUT.value:
        with open(OUT.value, "w") as file:
            rate = round(statistics.median(rates), 1)
            whole = {"architecture": ARCHITECTURE.value, "matmul_gflops": rate, "rounds": ROUNDS.value, "rows": rows}
            json.dump(whole, file, indent=2)


if __name__ == "__main__":
    app.run(main)
