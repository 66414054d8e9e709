"""Finished cells of the paper's tables in `results/<cell>.json`, and the page docs/results.md.

python -m exvae.results            writes docs/results.md and the table in README.md
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from exvae import config as configs
from exvae import files
from exvae.errors import UserError
from exvae.reproduce import paper

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE, README = ROOT / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
MARKS = ("<!-- results -->\n", "<!-- /results -->\n")  # the README's table is between them
TITLES = {"mnist": "MNIST", "fashion_mnist": "Fashion-MNIST", "omniglot": "Omniglot"}
ARCHITECTURES = ("vae", "hvae", "convhvae", "pixelsnail")
PRIORS = ("exemplar", "vamp", "gaussian")
INTRODUCTION = """# Results

`python -m exvae.results` makes this page from the files in `results/`, which `make reproduce` writes. Do not edit it.

The tables show test log-likelihoods in nats: importance weighting with 5000 samples, on all test images.

- **Ours** is the mean over seeds, with ± the standard deviation if there are several. The number of seeds is in
  brackets.
- **The paper's** is its mean ± over five training runs.
- **Bold** means at least the paper's mean.
- All runs use `recipe=fast`. It was chosen on validation data, but test results of earlier versions were seen before it
  was changed ([the search](recipe.md)).
- Minutes of training include validation, and other programs may have run at the same time. CPU minutes are the sum over
  all cores.
- The last column has the number of cores that a run could use, and the rate of a float32 matrix product on each core.
"""


class Cell(NamedTuple):
    """One finished run: the contents of `results/<name>.json`."""

    name: str
    command: str
    test: dict[str, Any]
    best_epoch: int
    config: dict[str, Any]
    git: str
    train_seconds: float  # elapsed time with validation; other programs may have run at the same time
    train_cpu_seconds: float | None  # sum over all cores
    evaluation_seconds: float
    cores: int  # number of cores that the run could use
    matmul_gflops: float  # float32, 1024 x 1024, on these cores
    valid: list[tuple[int, float]]  # epoch, validation ELBO

    @property
    def key(self) -> tuple[str, str, str]:
        """Data set, architecture and prior."""
        return self.config["data"]["name"], self.config["model"]["architecture"], self.config["prior"]["name"]


def write(folder: Path, cell: Cell) -> Path:
    """Write the file of a cell and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cell.name}.json"
    files.write_json(path, cell._asdict())
    return path


def read(path: Path) -> Cell:
    """Read the file of a cell."""
    try:
        return Cell(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not the result of a cell ({error})") from error


def read_all(folder: Path) -> list[Cell]:
    """Read the files of all cells in a folder."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def _is_main(cell: Cell) -> bool:
    """Whether the cell is in the paper's main table. All others are ablations."""
    return not cell.name.startswith("ablation")


def _number(values: Sequence[float]) -> str:
    spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2f}{spread} ({len(values)})"


def _beside(cells: Sequence[Cell], papers: float, spread: float | None) -> tuple[str, str, str]:
    """Ours, the paper's, and the difference."""
    values = [cell.test["log_likelihood"] for cell in cells]
    ours, theirs = _number(values), f"{papers:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")
    # Compare rounded numbers, so a mean that rounds to the paper's number is not below it.
    difference = round(statistics.mean(values), 2) - papers
    return (f"**{ours}**" if difference >= 0 else ours), theirs, f"{difference:+.2f}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table. Columns of numbers are aligned on the right."""
    is_number = [all(re.match(r"[*+-]*\d|$", cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = ["---:" if number else "---" for number in is_number] or ["---"] * len(header)
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows)) + "\n"


def _minutes(cells: Sequence[Cell], name: str) -> str:
    """The mean over seeds in minutes; '' if a cell has no such time."""
    seconds = [getattr(cell, name) for cell in cells]
    return "" if None in seconds else f"{statistics.mean(seconds) / 60:.0f}"


def _check_same(cells: Sequence[Cell]) -> None:
    """Check that cells have the same config except for the seed. Only then is their mean meaningful."""
    first, *others = cells
    for other in others:
        if found := configs.differences({**other.config, "seed": 0}, {**first.config, "seed": 0}):
            raise UserError(f"{other.name} and {first.name} have different configs ({'; '.join(found)}): run one again")


def _main_rows(cells: Sequence[Cell], data: str, architecture: str) -> list[list[str]]:
    rows = []
    for prior in PRIORS:
        found = [cell for cell in cells if cell.key == (data, architecture, prior)]
        if not found:
            continue
        column = list(paper.NUM_TRAIN).index(data)
        papers, spread = paper.LOG_LIKELIHOOD[architecture, prior][column]
        kl, negative_reconstruction = paper.KL_AND_RECONSTRUCTION[architecture, prior][column]
        _check_same(found)
        rows.append(
            [
                prior,
                *_beside(found, papers, spread),
                f"{statistics.mean(cell.test['elbo'] for cell in found):.2f}",
                f"{-kl - negative_reconstruction:.2f}",
                f"{statistics.mean(max(elbo for _, elbo in cell.valid) for cell in found):.2f}",
                "/".join(str(cell.best_epoch) for cell in found),
                _minutes(found, "train_seconds"),
                _minutes(found, "train_cpu_seconds"),
                _minutes(found, "evaluation_seconds"),
                " / ".join(f"{cell.cores} x {cell.matmul_gflops / cell.cores:.0f}" for cell in found),
            ]
        )
    return rows


MAIN_HEADER = ("prior", "ours", "the paper's", "difference", "test ELBO", "the paper's ELBO",
               "valid ELBO", "best epoch", "training, min", "CPU min", "log-likelihood, min",
               "cores x GFLOP/s")  # fmt: skip


def _main_section(cells: Sequence[Cell]) -> list[str]:
    parts = ["## The main table\n"]
    for data, title in TITLES.items():
        for architecture in ARCHITECTURES:
            if rows := _main_rows(cells, data, architecture):
                parts += [f"### {title}, `{architecture}`\n", table(MAIN_HEADER, rows)]
    return parts


def _ablation_rows(cells: Sequence[Cell], *, with_main: bool) -> list[list[str]]:
    """Rows by data set, M/N and leave-one-out. M = N / 2 is in the main table."""

    def setting(cell: Cell) -> tuple[str, float, bool]:
        data, prior = cell.config["data"]["name"], cell.config["prior"]
        return data, round(prior["num_exemplars"] / paper.NUM_TRAIN[data], 3), prior["leave_one_out"]

    chosen = [cell for cell in cells if cell.key[0] in paper.SUBSAMPLING and cell.key[1:] == ("vae", "exemplar")]
    rows = []
    for (data, fraction, loo), found in itertools.groupby(sorted(chosen, key=setting), setting):
        group = list(found)
        if all(_is_main(cell) for cell in group) and not with_main:
            continue
        reference = paper.cell(group[0].config)
        if reference is None or reference.log_likelihood is None:
            raise UserError(f"{group[0].name}: the paper has no log-likelihood for this config")
        papers = reference.log_likelihood
        rows.append([TITLES[data], f"{fraction:g}", "yes" if loo else "no", *_beside(group, papers, None)])
    return rows


ABLATION_TEXT = """These runs use RAT with K = 1, while the paper's ablation sums over all M exemplars. Without
leave-one-out, the one neighbour of an image is mostly the image itself.
"""


def _ablation_section(cells: Sequence[Cell]) -> list[str]:
    if all(_is_main(cell) for cell in cells):
        return []
    header = ("data", "M/N", "leave-one-out", "ours", "the paper's", "difference")
    return ["## Ablations (`vae`, exemplar)\n", ABLATION_TEXT, table(header, _ablation_rows(cells, with_main=True))]


def first_passing(cell: Cell, elbo: float) -> tuple[int, float] | None:
    """The first epoch with at least this validation ELBO, and the minutes of training until then."""
    for epoch, value in cell.valid:
        if value >= elbo:
            return epoch, cell.train_seconds / 60 * epoch / cell.valid[-1][0]
    return None


def _time_section(cells: Sequence[Cell]) -> list[str]:
    rows = []
    for cell in cells:
        if cell.key != ("mnist", "vae", "exemplar"):
            continue
        passed = first_passing(cell, paper.AUTHORS_VALID_ELBO)
        steps = paper.NUM_TRAIN["mnist"] // cell.config["train"]["batch_size"]
        figures = (str(passed[0]), str(passed[0] * steps), f"{passed[1]:.0f}") if passed else ("not reached",) * 3
        best = max(value for _, value in cell.valid)
        rows.append([f"seed {cell.config['seed']}", *figures, f"{best:.2f}"])
    if not rows:
        return []
    authors = [
        "the authors' run",
        str(paper.AUTHORS_EPOCHS),
        str(500 * paper.AUTHORS_EPOCHS),
        f"{500 * paper.AUTHORS_EPOCHS * paper.AUTHORS_STEP_SECONDS / 60:.0f}",
        f"{paper.AUTHORS_VALID_ELBO:.2f}",
    ]
    text = (
        f"How long a run takes until its validation ELBO passes {paper.AUTHORS_VALID_ELBO}, the value of the authors'\n"
        "best epoch (MNIST, `vae`, exemplar; the authors' batch is 100 images). Our minutes are the time of the whole\n"
        "training, divided by its number of epochs and multiplied by the epochs needed. The authors' run was not\n"
        f"repeated: its minutes are its number of steps times {paper.AUTHORS_STEP_SECONDS} s, the time of one step\n"
        "of their code on two cores with AVX-512.\n"
    )
    header = ("run", "epochs", "steps", "minutes", "best validation ELBO")
    return ["## Time to the paper's number\n", text, table(header, [*rows, authors])]


def _runs_section(cells: Sequence[Cell]) -> list[str]:
    rows = [
        [f"`{cell.name}`", f"{cell.test['log_likelihood']:.3f} ± {cell.test['log_likelihood_error']:.3f}",
         str(cell.test["active_units"]), f"{cell.test['kl']:.2f}",
         f"`{' '.join(revision[:10] for revision in cell.git.split())}`", f"`{cell.command}`"]
        for cell in cells
    ]  # fmt: skip
    header = ("run", "log-likelihood ± standard error over images", "active units", "KL", "revision", "command")
    return ["## Every run\n", table(header, rows)] if rows else []


def _short_section(cells: Sequence[Cell]) -> list[str]:
    """The first section of the page: the cells below the paper's mean."""
    short = []
    for data, title in TITLES.items():
        for architecture in ARCHITECTURES:
            rows = _main_rows([cell for cell in cells if _is_main(cell)], data, architecture)
            short += [(f"{title} `{architecture}`, {row[0]}", *row[1:4]) for row in rows]
    rows = _ablation_rows(cells, with_main=False)
    short += [(f"ablation, {row[0]}, M/N = {row[1]}, leave-one-out {row[2]}", *row[3:]) for row in rows]
    lines = [f"- {what}: {ours}, {gap} from the paper's {theirs}" for what, ours, theirs, gap in short if gap[0] == "-"]
    return ["## What falls short of the paper\n", "\n".join(lines) + "\n"] if lines else []


def page(cells: Sequence[Cell]) -> str:
    """The text of docs/results.md."""
    if not cells:
        return f"{INTRODUCTION}\nNo cell has finished yet.\n"
    main = [cell for cell in cells if _is_main(cell)]
    sections = [INTRODUCTION, *_short_section(cells), *_main_section(main), *_ablation_section(cells),
                *_time_section(main), *_runs_section(cells)]  # fmt: skip
    return "\n".join(sections)


def summary(cells: Sequence[Cell]) -> str:
    """The section of the README with the main table: the cells below the paper's mean, then all cells."""
    rows = []
    for data, title in TITLES.items():
        for architecture in ARCHITECTURES:
            found = _main_rows([cell for cell in cells if _is_main(cell)], data, architecture)
            rows += [[title, f"`{architecture}`", *row[:4]] for row in found]
    short = [f"{row[0]} {row[1]} with the {row[2]} prior ({row[5]})" for row in rows if row[5].startswith("-")]
    total = len(TITLES) * len(paper.LOG_LIKELIHOOD)
    below = f"Below the paper's mean: {'; '.join(short)}." if short else "None of them is below the paper's mean."
    text = (
        f"Of the {total} cells of the paper's main table, {len(rows)} have been measured. {below}\n\n"
        "Test log-likelihood in nats (5000 importance samples, all test images). The number of seeds is in brackets;\n"
        "**bold** means at least the paper's mean.\n"
    )
    header = ("data", "architecture", "prior", "ours", "the paper's", "difference")
    return f"{text}\n{table(header, rows)}"


def with_summary(readme: str, cells: Sequence[Cell]) -> str:
    """The text of the README with a new table."""
    before, begin, rest = readme.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (begin and end):
        raise UserError(f"the README has no lines {MARKS[0].strip()} and {MARKS[1].strip()}")
    return f"{before}{begin}\n{summary(cells)}\n{end}{after}"


def make_page(folder: Path, out: Path, readme: Path | None = None) -> int:
    """Write the page and the README's table, and return the number of finished cells."""
    cells = read_all(folder)
    texts = {out: page(cells)}
    if readme is not None:
        texts[readme] = with_summary(readme.read_text(), cells)
    for path, text in texts.items():
        files.write_text(path, text)
    return len(cells)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m exvae.results", description="Write docs/results.md and the README's table."
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FOLDER", help="files of finished cells")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the page here, and do not change the README")
    options = parser.parse_args(argv)
    try:
        if not options.results.is_dir():
            raise UserError(f"--results={options.results} is not a folder")
        out, readme = (options.out, None) if options.out else (PAGE, README)
        number = make_page(options.results, out, readme)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{number} finished cells -> {' and '.join(str(path) for path in (out, readme) if path)}")
    return 0
