"""The tables of docs/benchmarks.md that have files, made from results/benchmarks/*.json.

python docs/make_benchmarks.py            writes the tables between their markers: <!-- step --> ... <!-- end -->
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE, RESULTS = ROOT / "docs" / "benchmarks.md", ROOT / "results" / "benchmarks"
STEPS = ("train_step_dense", "train_step_convhvae", "train_step_convhvae_rest", "train_step_large")
SEARCHES = {"exact": "RAT, exact search", "scann": "RAT, ScaNN", "none": "all M exemplars"}
TITLE = {"vamp": "vamp-500", "gaussian": "gaussian"}


def read(name: str) -> Any:
    """The content of a results file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def duration(milliseconds: float) -> str:
    """A time with three digits."""
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1e3:.3g} s"


def percent(fraction: float) -> str:
    """A fraction in percent."""
    return f"{100 * fraction:.0f} %"


def step() -> str:
    """The time of a training step, before and after."""
    rows = [row for name in STEPS for row in read(name)["rows"]]
    order = ["vae", "hvae", "convhvae", "pixelsnail", "celeba"]
    rows.sort(key=lambda row: order.index(row["architecture"]))
    titles = ["", "before", "now", "now / before", "of the product's rate: before", "now", "memory"]
    return table(titles, map(_step, rows))


def _step(row: dict[str, Any]) -> list[str]:
    prior = TITLE.get(row["prior"], SEARCHES[row["search"]])
    fractions = [percent(row[name]) for name in ("before_matmul_fraction", "matmul_fraction")]
    return [
        f"`{row['architecture']}`, {prior}",
        duration(row["before_ms"]),
        duration(row["ms"]),
        f"{row['ratio']:.2f}",
        *fractions,
        f"{row['memory_mib']:.0f} MiB",
    ]


def conv() -> str:
    """GFLOP/s of every convolution, with its gradients."""
    found = read("conv")
    titles = {"ours": "exvae", "patches": "patches", "tiles4": "4x4 tiles", "lax": "XLA", "torch": "PyTorch"}
    titles, names = {**titles, "product": "product"}, ("ours", "patches", "tiles4")
    rows = []
    for row in found["layers"]:
        errors = [f"{1e7 * row[f'{name}_error']:.1f}" if f"{name}_error" in row else "" for name in names]
        rates = [f"{row[f'{name}_gflops']:.0f}" if f"{name}_gflops" in row else "" for name in titles]
        rows.append(
            [
                f"`{row['architecture']}`",
                str(row["times"]),
                row["layer"].replace(" ", "\N{NO-BREAK SPACE}").replace("->", "→"),
                *rates,
                *errors,
            ]
        )
    heads = ["", "times", "layer", *titles.values(), "error / 10⁻⁷: exvae", "patches", "4x4 tiles"]
    return table(heads, rows)


def profile() -> str:
    """The parts of the step of RAT."""
    found = read("profile_vae")
    rows = [[row["part"], f"{row['product_ms']:.2f}", f"{row['other_ms']:.2f}"] for row in found["parts"]]
    sums = [f"{sum(row[name] for row in found['parts']):.2f}" for name in ("product_ms", "other_ms")]
    return table(["line of Algorithm 1", "products, ms", "other, ms"], [*rows, ["all", *sums]])


def samples() -> str:
    """Steps with several codes for each image."""
    rows = [row for row in read("recipe_step_samples")["rows"] if row["prior"] == "exemplar"]
    names = {"plain": "one", "two z": "two", "four z": "four"}
    lines = [[names[row["step"]], duration(row["ms"]), f"{row['ratio']:.2f}"] for row in rows if row["step"] in names]
    return table(["codes for each image", "step", "times one code"], lines)


def start() -> str:
    """Seconds to the first step."""
    rows: dict[str, dict[tuple[str, str], dict]] = {}
    found = read("start")["rows"]
    revisions = list(dict.fromkeys(row["revision"] for row in found))
    for row in found:
        rows.setdefault(row["what"], {})[row["revision"], row["start"]] = row
    keys = [(revision, start) for revision in revisions for start in ("first", "second")]
    lines = [[f"`{what}`", *(_start(cells.get(key)) for key in keys)] for what, cells in rows.items()]
    names = ["before", "now"] if len(revisions) == 2 else revisions
    return table(["", *(f"{name}, {start} start" for name in names for start in ("first", "second"))], lines)


def _start(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    return f"{row['seconds']:.3g} s" + (f" ({row['compiled']})" if "compiled" in row else "")


def validation() -> str:
    """The part of an epoch that validation takes."""
    titles = ["", "steps of an epoch", "encoding N images", "ELBO of the validation images", "part of the epoch"]
    lines = [
        [f"`{row['architecture']}`"]
        + [f"{row[name]:.3g} s" for name in ("steps_of_epoch_seconds", "encoding_seconds", "elbo_seconds")]
        + [f"{100 * row['share']:.1f} %"]
        for row in read("validation")
    ]
    return table(titles, lines)


def peer() -> str:
    """Our step of convhvae beside PyTorch's."""
    found = read("peer")
    line = [duration(found["exvae_ms"]), duration(found["pytorch_ms"]), f"{found['ratio']:.2f}"]
    return table(
        ["exvae", f"PyTorch {found['pytorch_version']}", "ratio", "product"],
        [[*line, f"{found['matmul_gflops']} GFLOP/s"]],
    )


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function for function in (step, conv, profile, samples, start, validation, peer)
}


def page() -> str:
    """The page with its tables."""
    text = PAGE.read_text()
    for name, make in TABLES.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n\n")
        _, end, after = rest.partition("\n\n<!-- end -->")
        assert begin and end, f"no place for the table {name}"
        text = before + begin + make() + end + after
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
