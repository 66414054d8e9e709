"""The time of training steps in this checkout and in another one, in turns.

python -m benchmarks.compare --tree=PATH --out=FILE.json [--rounds=2] -- [options of benchmarks.train_step]

Each round runs `python -m benchmarks.train_step` in both checkouts. The ratio is that of the medians over the rounds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from absl import app, flags

from exvae import huge_pages

TREE = flags.DEFINE_string("tree", None, "folder of the other checkout", required=True)
ROUNDS = flags.DEFINE_integer("rounds", 2, "how often each checkout is measured")
OUT = flags.DEFINE_string("out", "", "write the rows to this JSON file")
HERE = Path(__file__).resolve().parents[1]

Key = tuple[str, str, str]
Rows = dict[Key, dict[str, float]]


def run(tree: Path, options: list[str]) -> Rows:
    """Run the benchmark in one checkout: (architecture, prior, search) -> row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "rows.json")
        command = [sys.executable, "-m", "benchmarks.train_step", *options, f"--out={out}"]
        env = {name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE}  # each its own way
        subprocess.run(command, cwd=tree, env=env, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        return {(row["architecture"], row["prior"], row["search"]): row for row in json.loads(out.read_text())}


def merge(before: list[Rows], after: list[Rows]) -> list[dict]:
    """One row for each variant, with medians over the rounds."""
    found = []
    for key in after[0]:
        middle = lambda rows, name: statistics.median(row[key][name] for row in rows)  # noqa: B023, E731
        times = middle(before, "ms_per_step"), middle(after, "ms_per_step")
        row = dict(zip(("architecture", "prior", "search"), key, strict=True))
        row |= {"before_ms": times[0], "ms": times[1], "ratio": round(times[1] / times[0], 3)}
        row |= {"gflop": after[0][key]["gflop"]}
        for name in ("matmul_fraction", "memory_mib"):
            row |= {f"before_{name}": round(middle(before, name), 3), name: round(middle(after, name), 3)}
        found.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return found


def main(argv: list[str]) -> None:
    before, after = [], []
    for _ in range(ROUNDS.value):
        before.append(run(Path(TREE.value), argv[1:]))
        after.append(run(HERE, argv[1:]))
    rows = merge(before, after)
    if OUT.value:
        Path(OUT.value).write_text(json.dumps({"rounds": ROUNDS.value, "options": argv[1:], "rows": rows}, indent=2))


if __name__ == "__main__":
    app.run(main)
