"""Runs compared with the paper: the cells of its tables, and our table in text and Markdown."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from exvae import config as configs
from exvae.reproduce import paper, tables

ROOT = Path(__file__).parents[2]
TEST = {
    "elbo": -86.126, "reconstruction": -61.25, "kl": 24.876, "exemplars": 50_000, "active_units": 29,
    "log_likelihood": -82.315, "log_likelihood_error": 0.234, "num_images": 10_000, "iwae_samples": 5000,
    "bits_per_dim": 0.1515,
}  # fmt: skip


def config_of(data="mnist", architecture="vae", prior="exemplar", **fields) -> dict:
    """A config as in results.json. By default, M is half of the training set."""
    config = configs.get_config()
    config.data.name, config.model.architecture, config.prior.name = data, architecture, prior
    config.prior.num_exemplars = paper.NUM_TRAIN.get(data, 4000) // 2 if prior == "exemplar" else 0
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in fields.items()})
    return config.to_dict()


def write_run(folder: Path, config: dict, test: dict, best_epoch: int | None = 7) -> None:
    folder.mkdir()
    results = {"test": test, "config": config, "git": None, "seconds": 1.0}
    if best_epoch is not None:
        results["best_epoch"] = best_epoch
    (folder / "results.json").write_text(json.dumps(results))


def parzen_config(likelihood: str) -> dict:
    config = config_of()
    config["model"] = {"architecture": "parzen", "likelihood": likelihood}
    del config["prior"]
    return config


def columns(line: str) -> list[str]:
    """Cells of a line of the text table."""
    return re.split(r"\s{2,}", line.strip())


def markdown_cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


@pytest.mark.parametrize(
    ("data", "architecture", "prior", "expected"),
    [
        ("mnist", "vae", "gaussian", (-84.45, 0.12, 25.54, -63.06, 24.0)),
        ("fashion_mnist", "vae", "vamp", (-227.35, 0.05, 18.44, -211.37, 35.25)),
        ("mnist", "vae", "exemplar", (-82.09, 0.18, 24.82, -61.00, 29.4)),
        ("omniglot", "vae", "exemplar", (-105.22, 0.18, 32.66, -80.25, 40.0)),
        ("fashion_mnist", "hvae", "gaussian", (-227.37, 0.1, 19.08, -211.18, 12.4)),  # the paper omits the minus sign
        ("mnist", "hvae", "vamp", (-81.56, 0.09, 26.69, -58.46, 20.4)),
        ("omniglot", "hvae", "exemplar", (-102.25, 0.43, 36.76, -73.35, 38.6)),
        ("mnist", "convhvae", "gaussian", (-80.52, 0.28, 26.58, -57.64, 19.8)),
        ("omniglot", "convhvae", "vamp", (-97.30, 0.07, 38.95, -66.38, 39.8)),
        ("fashion_mnist", "convhvae", "exemplar", (-224.63, 0.06, 20.46, -207.18, 33.6)),
        ("omniglot", "pixelsnail", "gaussian", (-89.59, 0.07, 0.01, -89.57, 0.0)),
        ("mnist", "pixelsnail", "vamp", (-77.90, 0.02, 7.17, -71.23, 17.2)),
        ("fashion_mnist", "pixelsnail", "exemplar", (-223.26, 0.01, 10.35, -213.95, 37.2)),
        ("omniglot", "pixelsnail", "exemplar", (-89.28, 0.12, 10.03, -80.19, 25.5)),
    ],
)
def test_cell_equals_the_papers_numbers(data, architecture, prior, expected):
    assert paper.cell(config_of(data, architecture, prior), None) == (*expected, None)


def test_every_row_is_complete_and_respects_the_bound():
    """The tables agree with each other: the log-likelihood is above the ELBO, by at most a few nats."""
    assert paper.LOG_LIKELIHOOD.keys() == paper.KL_AND_RECONSTRUCTION.keys() == paper.ACTIVE_UNITS.keys()
    for architecture, prior in paper.LOG_LIKELIHOOD:
        for data in paper.NUM_TRAIN:
            cell = paper.cell(config_of(data, architecture, prior), None)
            assert -0.05 < cell.log_likelihood - (cell.reconstruction - cell.kl) < 9, (data, architecture, prior)
            assert 0 <= cell.active_units <= 40


@pytest.mark.parametrize(
    ("data", "m", "leave_one_out", "expected"),
    [
        ("mnist", 50_000, True, -82.35), ("mnist", 50_000, False, -101.33),
        ("omniglot", 23_000, True, -105.80), ("omniglot", 23_000, False, -139.12),
        ("mnist", 49_999, True, -82.35), ("omniglot", 22_999, True, -105.80),
        ("mnist", 10_000, True, -82.12), ("mnist", 5_000, True, -82.20),
        ("omniglot", 4_600, True, -104.95), ("omniglot", 2_300, True, -105.42),
    ],
)  # fmt: skip
def test_cell_of_the_ablations_has_a_log_likelihood_only(data, m, leave_one_out, expected):
    config = config_of(data, prior__num_exemplars=m, prior__leave_one_out=leave_one_out)
    assert paper.cell(config, None) == (expected, None, None, None, None, None)


def test_cell_with_half_of_the_exemplars_is_that_of_the_main_table():
    assert paper.cell(config_of(prior__num_exemplars=0), None).log_likelihood_std == 0.18
    assert paper.cell(config_of(prior__num_exemplars=25_100), None).log_likelihood_std == 0.18  # within 1 %
    for data, fractions in paper.SUBSAMPLING.items():
        assert fractions[0.5] == paper.cell(config_of(data), None).log_likelihood


def test_cell_depends_on_the_number_of_training_images():
    config = config_of(prior__num_exemplars=5_000)
    assert paper.cell(config, 5_000).log_likelihood == -82.35
    assert paper.cell(config, 10_000).log_likelihood == -82.09
    assert paper.cell(config, 50_000).log_likelihood == -82.20


@pytest.mark.parametrize(
    "config",
    [
        config_of("mnist_5k"),
        config_of("static_mnist", prior="gaussian"),
        config_of(model__latent_dim=20),
        config_of(model__hidden_dim=500),
        config_of(model__lower_latent_dim=20),
        config_of(prior__num_exemplars=15_000),
        config_of(prior__num_exemplars=10_200),  # 2 % off
        config_of(prior__leave_one_out=False),  # M = N/2
        config_of(prior__leave_one_out=False, prior__num_exemplars=49_999),
        config_of("fashion_mnist", prior__num_exemplars=50_000),
        config_of("fashion_mnist", prior__num_exemplars=50_000, prior__leave_one_out=False),
        config_of("mnist", "hvae", prior__num_exemplars=50_000),
        config_of("omniglot", "hvae", prior__num_exemplars=23_000, prior__leave_one_out=False),
    ],
)
def test_cell_is_none_where_the_paper_has_no_such_run(config):
    assert paper.cell(config, None) is None


def test_priors_without_exemplars_ignore_their_fields():
    config = config_of(prior="vamp", prior__num_exemplars=17, prior__leave_one_out=False)
    assert paper.cell(config, None).log_likelihood == -82.43


def test_row_has_the_numbers_of_the_run_and_of_the_paper():
    row = tables.row_of("mine", {"config": config_of(), "test": TEST, "best_epoch": 312})
    assert row == (
        "mine", "mnist", "vae", "exemplar", "312", "-82.31 ± 0.23", "10000", "5000", "-86.13", "-61.25 (-61.00)",
        "24.88 (24.82)", "29 (29.4)", "-82.09 ± 0.18", "-0.22", "0.151",
    )  # fmt: skip


def test_celebas_cell_is_in_bits_per_dimension():
    sizes = {"model__latent_dim": 128, "model__likelihood": "discretized_logistic"}
    config = config_of("celeba", "celeba", **sizes, prior__num_exemplars=81_385)
    test = TEST | {"bits_per_dim": 5.801, "log_likelihood": -49_409.0, "exemplars": 162_770}
    row = tables.row_of("mine", {"config": config, "test": test})
    assert (row.bits_per_dim, row.paper, row.difference) == ("5.801 (5.780)", "-", "-")
    assert paper.cell(config_of("celeba", "celeba", "gaussian", **sizes)).bits_per_dim == 5.825
    assert paper.cell(config, 8_000) is None  # other training images
    for changed in ({"model__channels": 16}, {"prior__num_exemplars": 1000}, {"prior__leave_one_out": False}):
        assert paper.cell(config_of("celeba", "celeba", **{**sizes, "prior__num_exemplars": 81_385, **changed})) is None


@pytest.mark.parametrize(
    ("fields", "exemplars", "prior", "in_paper"),
    [
        ({"prior__num_exemplars": 5_000}, 50_000, "exemplar M=5000", "-82.20"),
        ({"prior__num_exemplars": 50_000, "prior__leave_one_out": False}, 50_000, "exemplar M=50000 no LOO", "-101.33"),
        ({"prior__leave_one_out": False}, 50_000, "exemplar no LOO", "-"),
        ({"prior__num_exemplars": 2_000}, 4_000, "exemplar", "-82.09 ± 0.18"),  # N comes from the run
        ({"prior": "vamp", "prior__leave_one_out": False}, 0, "vamp", "-82.43 ± 0.06"),
        ({"data": "npz:a.npz", "eval__exemplars": "train+valid"}, 4_500, "exemplar M=2000", "-"),  # N is unknown
    ],
)
def test_row_names_what_differs_in_the_prior(fields, exemplars, prior, in_paper):
    row = tables.row_of("r", {"config": config_of(**fields), "test": TEST | {"exemplars": exemplars}})
    assert (row.prior, row.paper) == (prior, in_paper)


def test_row_of_other_exemplars_is_marked():
    config = config_of(eval__exemplars="train+valid")
    row = tables.row_of("r", {"config": config, "test": TEST | {"exemplars": 60_000}})
    assert (row.run, row.prior, row.paper) == ("r*", "exemplar", "-82.09 ± 0.18")
    gaussian = config_of(prior="gaussian", eval__exemplars="train+valid")
    assert tables.row_of("r", {"config": gaussian, "test": TEST | {"exemplars": 0}}).run == "r"


@pytest.fixture
def runs(tmp_path) -> list[str]:
    """Paths that a glob finds: good, old, broken and empty folders, and a log file."""
    write_run(tmp_path / "b_vamp", config_of(prior="vamp"), TEST | {"exemplars": 0})
    write_run(tmp_path / "z_exemplar", config_of(), TEST | {"log_likelihood_error": None, "num_images": 1})
    old = config_of("omniglot", "hvae")
    del old["eval"]
    write_run(tmp_path / "a_old", old, {"elbo": -120.0, "reconstruction": -80.0, "kl": 40.0}, best_epoch=None)
    kernel = {"log_likelihood": -190.5, "log_likelihood_error": 1.0, "num_images": 50, "exemplars": 50_000}
    write_run(tmp_path / "grey|pixels", parzen_config("gaussian"), kernel | {"log_likelihood": 812.0})
    write_run(tmp_path / "binary", parzen_config("bernoulli"), kernel)
    write_run(tmp_path / "y_other", config_of(eval__exemplars="train+valid"), TEST | {"exemplars": 60_000})
    write_run(tmp_path / "list", config_of(), [])
    for name, text in (("cut", '{"test": {"elbo"'), ("no_test", '{"config": {}}'), ("number", "3")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "results.json").write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.log").write_text("epoch 1\n")
    return [str(path) for path in sorted(tmp_path.iterdir())]


def test_text_is_sorted_and_aligned_and_broken_runs_are_named(runs, capsys):
    assert tables.main(runs) == 0
    out, err = capsys.readouterr()
    table, notes = out.split("\n\n")
    header, *rows = table.splitlines()
    assert [columns(row)[0] for row in rows] == ["binary", "grey|pixels", "y_other*", "z_exemplar", "b_vamp", "a_old"]
    assert columns(rows[0])[2:7] == ["parzen (bernoulli)", "-", "-", "-190.50 ± 1.00", "50"]
    assert columns(rows[1])[5] == "812.00 ± 1.00†" and columns(rows[1])[7:] == ["-"] * 8
    assert columns(rows[3])[4:9] == ["7", "-82.31", "1", "5000", "-86.13"]  # one image has no standard error
    assert columns(rows[5])[4:8] == ["-", "-", "-", "-"]
    assert columns(rows[5])[8:] == [
        "-120.00",
        "-80.00 (-73.35)",
        "40.00 (36.76)",
        "- (38.6)",
        "-102.25 ± 0.43",
        "-",
        "-",
    ]
    assert len({len(row.rstrip()) for row in (header, *rows)}) == 1  # the last column is aligned on the right
    assert "5 training runs" in notes and "* evaluated with other exemplars" in notes and "† a density" in notes
    assert [line.split(": ")[1].split("/")[-1] for line in err.splitlines()] == [
        "cut", "empty", "list", "no_test", "number",
    ]  # fmt: skip
    assert all(line.startswith("warning: ") for line in err.splitlines())


def test_markdown_is_a_github_table(runs, capsys):
    assert tables.main([*runs, "--markdown"]) == 0
    table, *notes = capsys.readouterr().out.split("\n\n")
    header, rule, *rows = map(markdown_cells, table.splitlines())
    assert {len(cells) for cells in (header, rule, *rows)} == {15}
    assert all(re.fullmatch(":---|---:", cell) for cell in rule)
    assert rows[1][0] == r"grey\|pixels" and rows[2][0] == r"y_other\*"
    assert len(notes) == 2 and r"\* evaluated" in notes[0]


def test_density_footnote_appears_only_with_densities(tmp_path, capsys):
    write_run(tmp_path / "run", config_of(), TEST)
    assert tables.main([str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    assert "†" not in out and "5000 samples" in out


@pytest.mark.parametrize(("name", "markdown"), [("table.md", True), ("table.txt", False)])
def test_out_is_written_in_the_format_of_its_name(runs, tmp_path, capsys, name, markdown):
    assert tables.main([*runs, f"--out={tmp_path / name}", *([] if markdown else ["--markdown"])]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("| run") != markdown
    assert tables.main([*runs, *(["--markdown"] if markdown else [])]) == 0
    assert (tmp_path / name).read_text(encoding="utf-8") == capsys.readouterr().out


def test_out_that_cannot_be_written_is_a_one_line_error(tmp_path, capsys):
    write_run(tmp_path / "run", config_of(), TEST)
    assert tables.main([str(tmp_path / "run"), f"--out={tmp_path / 'nowhere' / 'table.md'}"]) == 2
    assert re.fullmatch(r"error: --out=.* cannot be written: .*\n", capsys.readouterr().err)


def test_no_results_at_all_is_exit_code_2(tmp_path):
    """The real command. A log file is not a run and causes no warning."""
    (tmp_path / "run.log").write_text("")
    command = [sys.executable, "-m", "exvae.tables", str(tmp_path / "run.log")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: none of the folders holds the results of a run\n"
