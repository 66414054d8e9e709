"""Seconds to the first training step, for the first and the second start, and of `--task=sample` and `--help`.

python -m benchmarks.start [--experiments=mnist_vae,celeba] [--tree=FOLDER] [--rounds=3] [--out=FILE.json]

Each start is a process of its own. The first one has an empty cache folder, and the second one the folder that the
first one left. The time runs from the start of the interpreter until the result of the first step is read, so it
includes imports and the data. With --tree, another checkout of exvae is measured in the same way, in turns with this
one. The experiments need their data (EXVAE_DATA_DIR).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

HERE = Path(__file__).resolve().parents[1]
PAPER = ["mnist_vae", "mnist_hvae", "mnist_convhvae", "mnist_pixelsnail", "celeba"]
EXPERIMENTS = flags.DEFINE_list("experiments", PAPER, "experiments to start, with arguments: celeba:runlocal")
TREES = flags.DEFINE_multi_string("tree", [], "folder of another checkout to measure; may be given several times")
ROUNDS = flags.DEFINE_integer("rounds", 1, "measurements of each start", lower_bound=1)
OTHERS = flags.DEFINE_bool("others", True, "also measure --task=sample and --help")
OUT = flags.DEFINE_string("out", "", "also write the rows to this JSON file")

# Runs launch.py of the checkout in the current folder, and ends after the first step. It prints, as JSON, the seconds
# until then, and how many programs were compiled, in how many seconds, and loaded from the cache.
DRIVER = """
import json, os, sys, time
sys.path.insert(0, os.getcwd())
began = float(sys.argv.pop(1))
first_step = sys.argv.pop(1) == "step"
sys.argv[0] = "launch.py"
import jax
programs, counts = [], {"hits": 0}
def compiled(event, seconds, **_):
    if event == "/jax/core/compile/backend_compile_duration":
        programs.append(seconds)
def happened(event, **_):
    counts["hits"] += event == "/jax/compilation_cache/cache_hits"
jax.monitoring.register_event_duration_secs_listener(compiled)
jax.monitoring.register_event_listener(happened)
def end():
    found = {"seconds": time.time() - began, "compiled": len(programs) - counts["hits"], "loaded": counts["hits"]}
    print(json.dumps(found | {"compile_seconds": sum(programs)}), flush=True)
    os._exit(0)
import launch
if first_step:
    from exvae.training import loop
    check = loop.check_finite
    def check_finite(step, elbo):
        check(step, elbo)
        end()
    loop.check_finite = check_finite
if launch.main(sys.argv) == 0:
    end()
"""


class Tree(NamedTuple):
    """A checkout of exvae."""

    folder: Path
    revision: str


def revision_of(folder: Path) -> str:
    """The git revision of a checkout, with a + if it has uncommitted changes."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def environment(cache: Path) -> dict[str, str]:
    """The variables of a user who has not chosen a folder for compiled programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    return {**kept, "EXVAE_CACHE_DIR": str(cache)}


def launch(tree: Tree, cache: Path, until: str, words: list[str]) -> dict:
    """Run launch.py until the first step ("step") or to its end ("end"), and return what the driver prints."""
    command = [sys.executable, "-c", DRIVER, str(time.time()), until, *words]
    done = subprocess.run(command, cwd=tree.folder, env=environment(cache), capture_output=True, text=True)
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        sys.exit(f"{' '.join(words)} failed in {tree.folder}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def twice(tree: Tree, what: str, until: str, words: list[str]) -> list[dict]:
    """Measure a first and a second start."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for start in ("first", "second"):
            own = [f"--workdir={folder}/{start}"] if until == "step" else []
            found = launch(tree, Path(folder) / "cache", until, [*words, *own])
            rows.append({"revision": tree.revision, "what": what, "start": start, **found})
            print(describe(rows[-1]), flush=True)
    return rows


def train_small(tree: Tree, workdir: Path) -> list[str]:
    """Train a run for --task=sample, and return the options that name it."""
    words = ["--config=experiments/quickstart.py", f"--workdir={workdir}"]
    short = ["--config.train.epochs=1", "--config.eval.num_images=2", "--config.eval.iwae_samples=2"]
    launch(tree, workdir / "cache", "end", [*words, *short])
    return [*words, "--task=sample"]


def help_row(tree: Tree) -> dict:
    """Measure --help, whose exit code is not checked: it was 1 in old versions."""
    began = time.time()
    command = [sys.executable, "launch.py", "--help"]
    done = subprocess.run(command, cwd=tree.folder, capture_output=True, text=True)
    assert "--workdir" in done.stdout, done.stderr
    row = {"revision": tree.revision, "what": "--help", "start": "first", "seconds": time.time() - began}
    print(describe(row), flush=True)
    return row


def describe(row: dict) -> str:
    """Describe a measurement in one line."""
    text = f"{row['what']:18} {row['revision']:10} {row['start']:6} {row['seconds']:7.2f} s"
    if "compiled" in row:
        text += f"  {row['compiled']:3} compiled {row['loaded']:3} loaded in {row['compile_seconds']:.2f} s"
    return text


def measure(trees: list[Tree]) -> list[dict]:
    """Measure everything in turns."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        samples = {tree: train_small(tree, Path(folder) / tree.revision) for tree in trees if OTHERS.value}
        for _ in range(ROUNDS.value):
            for name in EXPERIMENTS.value:
                path, colon, arguments = name.partition(":")
                for tree in trees:
                    words = [f"--config=experiments/{path}.py{colon}{arguments}"]
                    rows += twice(tree, name, "step", words)
            for tree, words in samples.items():
                rows += twice(tree, "--task=sample", "end", words)
                rows.append(help_row(tree))
    return rows


def medians(rows: list[dict]) -> list[dict]:
    """Return one row for each start: the median of its seconds, and the numbers of programs."""
    found: dict[tuple[str, ...], list[dict]] = {}
    for row in rows:
        found.setdefault((row["what"], row["revision"], row["start"]), []).append(row)
    result = []
    for same in found.values():
        middle = {name: round(statistics.median(row[name] for row in same), 2) for name in same[0] if "seconds" in name}
        result.append({**same[0], **middle, "measurements": len(same)})
    return result


def main(argv: list[str]) -> None:
    del argv
    folders = [*(Path(folder).resolve() for folder in TREES.value), HERE]
    trees = [Tree(folder, revision_of(folder)) for folder in folders]
    assert len({tree.revision for tree in trees}) == len(trees), "two checkouts have the same revision"
    rows = medians(measure(trees))
    print("\nmedians")
    for row in rows:
        print(describe(row))
    if OUT.value:
        Path(OUT.value).write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
