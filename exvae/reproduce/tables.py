"""A table of runs and the paper's numbers: python -m exvae.tables runs/* [--markdown] [--out=FILE]"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exvae.reproduce import paper

TEXT_COLUMNS = ("run", "data", "architecture", "prior")  # the others are numbers, aligned on the right
PAPER_NOTE = (
    "Ours: ± is the standard error over images. The paper's numbers, also those in brackets: means (±) over 5 training "
    "runs at convergence, all test images, 5000 samples. * evaluated with other exemplars than the training set "
    "(config.eval.exemplars)."
)
DENSITY_NOTE = "† a density of grey pixels: not comparable with log-likelihoods of binary images."


class Row(NamedTuple):
    """One run as text. The fields are the columns, with `_` for a space or hyphen."""

    run: str
    data: str
    architecture: str
    prior: str
    epoch: str
    log_likelihood: str
    images: str
    samples: str
    elbo: str
    reconstruction: str
    kl: str
    active_units: str
    paper: str
    difference: str
    bits_per_dim: str


HEADER = Row(**{name: name.replace("_", " ") for name in Row._fields} | {"log_likelihood": "log-likelihood"})


def row_of(name: str, results: dict[str, Any]) -> Row:
    """Make the row of a run from its results.json. Missing values are '-'."""
    config, test = results["config"], results["test"]
    parzen = config["model"]["architecture"] == "parzen"
    ours = test.get("log_likelihood")
    cell = None if parzen else paper.cell(config, _num_train(config, test))
    density = parzen and config["model"]["likelihood"] == "gaussian"
    return Row(
        run=name + ("*" if _other_exemplars(config, test) else ""),
        data=config["data"]["name"],
        architecture=_architecture(config["model"]),
        prior="-" if parzen else _prior(config, test),
        epoch="-" if parzen else _count(results.get("best_epoch")),
        log_likelihood=_nats(ours, test.get("log_likelihood_error")) + ("†" if density and ours is not None else ""),
        images=_count(test.get("num_images")),
        samples=_count(test.get("iwae_samples")),
        elbo=_nats(test.get("elbo")),
        reconstruction=_nats(test.get("reconstruction")) + _brackets(cell and cell.reconstruction, "{:.2f}"),
        kl=_nats(test.get("kl")) + _brackets(cell and cell.kl, "{:.2f}"),
        active_units=_count(test.get("active_units")) + _brackets(cell and cell.active_units, "{:.1f}"),
        paper=_nats(cell.log_likelihood, cell.log_likelihood_std) if cell else "-",
        difference=f"{ours - cell.log_likelihood:+.2f}" if cell and cell.log_likelihood and ours is not None else "-",
        bits_per_dim=_bits(test.get("bits_per_dim")) + _brackets(cell and cell.bits_per_dim, "{:.3f}"),
    )


def _architecture(model: dict[str, Any]) -> str:
    """The architecture, with its likelihood unless it is Bernoulli: different likelihoods are not comparable."""
    likelihood = model.get("likelihood", "bernoulli")
    plain = likelihood == "bernoulli" and model["architecture"] != "parzen"
    return model["architecture"] + ("" if plain else f" ({likelihood})")


def _nats(value: float | None, error: float | None = None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _brackets(papers: float | None, form: str) -> str:
    return "" if papers is None else f" ({form.format(papers)})"


def _count(value: int | None) -> str:
    return "-" if value is None else f"{value:d}"


def _eval_exemplars(config: dict[str, Any]) -> str:
    """The value of config.eval.exemplars. Runs older than this field used the training set."""
    return config.get("eval", {}).get("exemplars", "train")


def _other_exemplars(config: dict[str, Any], test: dict[str, Any]) -> bool:
    return _eval_exemplars(config) != "train" and test.get("exemplars") != 0  # 0: the prior has no exemplars


def _num_train(config: dict[str, Any], test: dict[str, Any]) -> int | None:
    """N, if the run was evaluated with the training set as exemplars; else None."""
    if _eval_exemplars(config) != "train":
        return None
    return test.get("exemplars") or None


def _prior(config: dict[str, Any], test: dict[str, Any]) -> str:
    """The name of the prior, and its settings that differ from the paper's."""
    prior = config["prior"]
    if prior["name"] != "exemplar":
        return prior["name"]
    n = _num_train(config, test) or paper.NUM_TRAIN.get(config["data"]["name"])
    m = prior["num_exemplars"]
    is_half = m == 0 or (n is not None and m == n // 2)
    return "exemplar" + ("" if is_half else f" M={m}") + ("" if prior["leave_one_out"] else " no LOO")


def read_rows(folders: Sequence[Path]) -> list[Row]:
    """Read the sorted rows of all folders with results. Print a warning on stderr for other folders."""
    rows = []
    for folder in folders:
        if folder.is_file():  # runs/* also matches log files
            continue
        try:
            results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
            rows.append(row_of(folder.absolute().name, results))
        except OSError as error:
            _complain(f"warning: {folder}: skipped, no results.json to read ({error.strerror})")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            _complain(f"warning: {folder}: skipped, its results.json is broken ({type(error).__name__}: {error})")
    return sorted(rows, key=lambda row: (row.data, row.architecture, row.prior, row.run))


def _complain(text: str) -> None:
    print(" ".join(text.split()), file=sys.stderr)


def _notes(rows: Sequence[Row]) -> list[str]:
    return [PAPER_NOTE] + ([DENSITY_NOTE] if any("†" in row.log_likelihood for row in rows) else [])


def as_text(rows: Sequence[Row]) -> str:
    """The table as text with aligned columns, and the footnotes."""
    lines = [HEADER, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join(
            value.ljust(width) if column in TEXT_COLUMNS else value.rjust(width)
            for column, value, width in zip(Row._fields, line, widths, strict=True)
        )
        for line in lines
    ]
    return "\n".join([*aligned, "", *_notes(rows)]) + "\n"


def as_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown, and the footnotes."""
    rule = [":---" if column in TEXT_COLUMNS else "---:" for column in Row._fields]
    escaped = [[_escape(value) for value in line] for line in rows]
    table = [f"| {' | '.join(line)} |" for line in (HEADER, rule, *escaped)]
    return "\n".join(table) + "".join(f"\n\n{_escape(note)}" for note in _notes(rows)) + "\n"


def _escape(text: str) -> str:
    """Escape characters that Markdown interprets: `|` would end a cell, a pair of `*` would be emphasis."""
    return re.sub(r"([\\|*`<])", r"\\\1", text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m exvae.tables", description="A table of runs and the paper's numbers."
    )
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of runs: runs/*")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write to FILE, Markdown if it ends in .md")
    options = parser.parse_args(argv)
    rows = read_rows(options.folders)
    if not rows:
        _complain("error: none of the folders holds the results of a run")
        return 2
    print((as_markdown if options.markdown else as_text)(rows), end="")
    if options.out is not None:
        try:
            options.out.write_text((as_markdown if options.out.suffix == ".md" else as_text)(rows), encoding="utf-8")
        except OSError as error:
            _complain(f"error: --out={options.out} cannot be written: {error.strerror}")
            return 2
    return 0
