"""Where the time of a training step goes, by the lines of Algorithm 1 (`exvae/algorithm.py`).

python -m benchmarks.profile [--architecture=vae] [--prior=exemplar] [--search=exact] [--out=FILE.json]

JAX's profiler records how long each operation runs. The compiled program names the line of Python code that each one
comes from, also in the backward pass. The table has the part of all recorded time times the duration of a step. A
product is a matrix product, or a convolution as products. A step has two threads or more on the same operation, or on
different ones, so the parts are shares of the time and not durations.
"""

from __future__ import annotations

import collections
import glob
import json
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from benchmarks.loop import EXPERIMENTS, TRAINING_SETS, Loop
from exvae import algorithm
from exvae import config as configs
from exvae.data.store import Store
from exvae.scale import sharding
from exvae.training import feed

ARCHITECTURE = flags.DEFINE_enum("architecture", "vae", list(EXPERIMENTS), "architecture of the model")
PRIOR = flags.DEFINE_enum("prior", "exemplar", ["gaussian", "vamp", "exemplar"], "prior")
SEARCH = flags.DEFINE_enum("search", "exact", ["none", "exact"], "search of neighbours; none: the exact prior")
STEPS = flags.DEFINE_integer("steps", 40, "number of steps to measure")
OUT = flags.DEFINE_string("out", "", "also write the table to this JSON file")

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{.*?stack_frame_id=(\d+)", re.M)
CONTAINERS = ("while", "call", "conditional", "ThunkExecutor")  # their time is that of the operations inside
PRODUCTS = ("dot", "ynn_fusion", "convolution", "onednn")


def make_loop() -> Loop:
    """The training step at the size of the experiment, on random images."""
    config = EXPERIMENTS[ARCHITECTURE.value].get_config(f"prior={PRIOR.value}")
    config.retrieval.search = SEARCH.value
    shape = TRAINING_SETS[config.data.name]
    config = configs.resolve(config, shape[0])
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    store = Store(sharding.make_mesh(), images, device_mib=2 * images.nbytes / 2**20, memory_mib=0)
    table = (
        rng.normal(size=(len(store), config.model.latent_dim)).astype(np.float32) if feed.uses_table(config) else None
    )
    return Loop(config, store, table)


def parts_of_algorithm() -> dict[int, str]:
    """The numbered line of Algorithm 1 for each line of the file algorithm.py."""
    found, current = {}, "average, sums, checks"
    for number, text in enumerate(Path(algorithm.__file__).read_text().splitlines(), 1):
        if re.match(r" +# \d\. ", text):
            current = text.strip("# ").split(" (")[0].split(", Eq")[0].strip()
        if text.startswith("def training_terms"):
            current = ""
        found[number] = current
    return found


def section(text: str, name: str) -> dict[int, str]:
    """A table at the head of a compiled program: number -> entry."""
    lines = text.partition(f"\n{name}\n")[2].splitlines()
    rows = (line.partition(" ") for line in lines)
    found = {}
    for number, _, entry in rows:
        if not number.isdigit():
            break
        found[int(number)] = entry
    return found


def origins(program: str) -> dict[str, str]:
    """The part of the algorithm that each operation of a compiled program comes from."""
    numbers = lambda entry: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", entry)}  # noqa: E731
    names = section(program, "FileNames")
    places = {key: numbers(entry) for key, entry in section(program, "FileLocations").items()}
    frames = {key: numbers(entry) for key, entry in section(program, "StackFrames").items()}
    files = {key for key, name in names.items() if name.strip('"').endswith("exvae/algorithm.py")}
    parts = parts_of_algorithm()

    def chain(frame: int) -> Iterator[str]:
        """The parts on the way from an operation to the training step; parents are numbered from one."""
        while frame in frames:
            place = places[frames[frame]["file_location_id"]]
            if place["file_name_id"] in files and parts[place["line"]]:
                yield parts[place["line"]]
            frame = frames[frame]["parent_frame_id"] - 1

    found = {}
    for name, frame in INSTRUCTION.findall(program):
        found[name] = next(chain(int(frame)), "average, sums, checks")
    return found


def recorded(folder: str) -> Iterator[tuple[str, float]]:
    """Name and seconds of every recorded operation."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            if line.name != "python":
                yield from ((event.name, event.duration_ns / 1e9) for event in line.events)


def measure(loop: Loop, steps: int) -> tuple[float, dict[tuple[str, str], float]]:
    """The seconds of a step, and of each part of it, by kind."""
    loop.run(5)
    began = time.perf_counter()
    loop.run(steps)
    seconds = (time.perf_counter() - began) / steps
    where, spent = origins(loop.program), collections.Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            loop.run(steps)
        for name, duration in recorded(folder):
            if name in where and not name.startswith(CONTAINERS):
                spent[where[name], "product" if name.startswith(PRODUCTS) else "other"] += duration
    total = sum(spent.values())
    return seconds, {key: seconds * value / total for key, value in spent.items()}


def main(argv: list[str]) -> None:
    del argv
    seconds, spent = measure(make_loop(), STEPS.value)
    parts = list(dict.fromkeys(part for part, _ in sorted(spent)))
    rows = [
        {"part": part} | {f"{kind}_ms": round(1e3 * spent.get((part, kind), 0.0), 3) for kind in ("product", "other")}
        for part in parts
    ]
    print(f"{ARCHITECTURE.value}, {PRIOR.value}, search {SEARCH.value}: {1e3 * seconds:.2f} ms per step")
    print(f"{'part':60}{'products':>10}{'other, ms':>12}")
    for row in rows:
        print(f"{row['part'][:58]:60}{row['product_ms']:10.2f}{row['other_ms']:12.2f}")
    if OUT.value:
        with open(OUT.value, "w") as file:
            json.dump({"ms_per_step": round(1e3 * seconds, 3), "parts": rows}, file, indent=2)


if __name__ == "__main__":
    app.run(main)
