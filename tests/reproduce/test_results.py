"""Results of finished cells, and the page that is generated from them."""

import json

import pytest

from exvae import config as configs
from exvae.errors import UserError
from exvae.reproduce import cells, paper, results


def make_cell(name="mnist_vae_exemplar_seed0", *, value=-82.0, prior="exemplar", data="mnist", seed=0, **fields):
    config = configs.get_config()
    config.seed, config.data.name, config.prior.name = seed, data, prior
    config.prior.num_exemplars = fields.pop("num_exemplars", 25_000)
    config.prior.leave_one_out = fields.pop("leave_one_out", True)
    test = {"log_likelihood": value, "log_likelihood_error": 0.2, "elbo": value - 3.5, "kl": 24.0, "active_units": 30}
    values = {
        "name": name,
        "command": f"python launch.py --workdir=runs/{name}",
        "test": test,
        "best_epoch": 20,
        "config": config.to_dict(),
        "git": "0123456789abcdef",
        "train_seconds": 1200.0,
        "train_cpu_seconds": 1100.0,
        "evaluation_seconds": 600.0,
        "cores": 1,
        "matmul_gflops": 100.0,
        "valid": [(10, -87.0), (20, -85.8)],
    }
    return results.Cell(**(values | fields))


def test_page_in_the_docs_is_generated_from_the_result_files():
    found = results.read_all(results.RESULTS)
    assert results.PAGE.read_text() == results.page(found)
    readme = results.README.read_text()
    assert readme == results.with_summary(readme, found)
    for cell in found:
        assert not cell.git.endswith("+"), f"{cell.name} comes from a tree with uncommitted changes"
        assert cell.test["num_images"] == {"omniglot": 8070}.get(cell.config["data"]["name"], 10_000)
        assert cell.test["iwae_samples"] == 5000
        assert paper.cell(cell.config) is not None
        plan = next(plan for plan in cells.plans([cell.config["seed"]]) if plan.name == cell.name)
        assert cells.finished(plan, results.RESULTS), f"{cell.name} does not have the current recipe"


def test_cell_is_read_back_as_it_was_written(tmp_path):
    cell = make_cell()
    path = results.write(tmp_path / "new", cell)
    assert path.name == "mnist_vae_exemplar_seed0.json"
    assert results.read(path)._asdict() == json.loads(json.dumps(cell._asdict()))
    path.write_text("{}")
    with pytest.raises(UserError, match="is not the result of a cell"):
        results.read(path)


def test_page_marks_cells_above_the_paper_and_lists_cells_below_it_first():
    good = [make_cell(f"mnist_vae_exemplar_seed{seed}", value=-82.0 - 0.02 * seed, seed=seed) for seed in range(3)]
    bad = make_cell("mnist_vae_gaussian_seed0", value=-85.0, prior="gaussian")
    text = results.page([*good, bad])
    assert "**-82.02 ± 0.02 (3)** | -82.09 ± 0.18 | +0.07" in text
    assert "- MNIST `vae`, gaussian: -85.00 (1), -0.55 from the paper's -84.45 ± 0.12" in text
    assert "| -0.55 | -88.50 | -88.60 |" in text  # the paper's ELBO: KL 25.54, reconstruction -63.06
    assert text.index("What falls short") < text.index("The main table")
    assert "What falls short" not in results.page(good)


def test_readme_has_the_main_table_and_names_cells_below_the_paper():
    good, bad = make_cell(), make_cell("mnist_vae_gaussian_seed0", value=-85.0, prior="gaussian")
    readme = "before\n<!-- results -->\nstale\n<!-- /results -->\nafter\n"
    text = results.with_summary(readme, [good, bad])
    assert text.startswith(
        "before\n<!-- results -->\n\nOf the 36 cells of the paper's main table, 2 have been measured."
    )
    assert text.endswith("<!-- /results -->\nafter\n") and "stale" not in text
    assert "Below the paper's mean: MNIST `vae` with the gaussian prior (-0.55)." in text
    assert "| MNIST | `vae` | exemplar | **-82.00 (1)** | -82.09 ± 0.18 | +0.09 |" in text
    assert results.with_summary(text, [good, bad]) == text
    assert "None of them is below" in results.with_summary(text, [good])
    with pytest.raises(UserError, match="the README has no lines"):
        results.with_summary("no marks", [good])


def test_results_command_without_out_writes_page_and_readme(tmp_path, monkeypatch, capsys):
    results.write(tmp_path, make_cell())
    for name in ("PAGE", "README"):
        monkeypatch.setattr(results, name, tmp_path / name)
    (tmp_path / "README").write_text("<!-- results -->\n<!-- /results -->\n")
    assert results.main([f"--results={tmp_path}"]) == 0
    assert "| MNIST |" in (tmp_path / "README").read_text() and (tmp_path / "PAGE").is_file()
    (tmp_path / "README").write_text("no marks")
    (tmp_path / "PAGE").unlink()
    assert results.main([f"--results={tmp_path}"]) == 2
    assert "the README has no lines" in capsys.readouterr().err and not (tmp_path / "PAGE").exists()


def test_pages_that_the_command_writes_are_not_code_changes():
    """Otherwise the first finished cell, which rewrites them, would leave uncommitted changes for the other cells."""
    source = "".join(path.read_text() for path in (results.ROOT / "exvae" / "runs").glob("*.py"))
    for name in ("docs", "results", "README.md"):
        assert f'":(top,exclude){name}"' in source, f"add {name} to OUTPUTS"


def test_mean_over_runs_of_two_recipes_is_refused():
    old = make_cell()
    new = make_cell("mnist_vae_exemplar_seed1", seed=1)
    new.config["optim"]["weight_decay"] = 0.1
    with pytest.raises(UserError, match="have different configs .optim.weight_decay: 0.1 here, 0.0 in the run.: run"):
        results.page([old, new])


def test_mean_that_rounds_to_the_papers_number_is_not_below_it():
    assert results._beside([make_cell(value=-82.094)], -82.09, 0.18)[0].startswith("**")
    assert not results._beside([make_cell(value=-82.096)], -82.09, 0.18)[0].startswith("**")


def test_ablations_are_compared_with_their_own_numbers():
    cells = [
        make_cell("ablation_loo_mnist_false_seed0", value=-100.0, num_exemplars=50_000, leave_one_out=False),
        make_cell("ablation_subsampling_omniglot_0.2_seed0", value=-106.0, data="omniglot", num_exemplars=4600),
    ]
    text = results.page(cells)
    assert "| MNIST | 1 | no | **-100.00 (1)** | -101.33 | +1.33 |" in text
    assert "| Omniglot | 0.2 | yes | -106.00 (1) | -104.95 | -1.05 |" in text
    text = results.page([*cells, make_cell(value=-83.0)])
    assert text.count("from the paper's") == 2  # the cell of the main table is not listed again among the ablations
    assert "| MNIST | 0.5 | yes | -83.00 (1) |" in text


def test_time_to_the_papers_number_ends_at_the_first_epoch_above_it():
    cell = make_cell(valid=[(5, -90.0), (10, -85.85), (15, -85.9), (20, -85.0)])
    assert results.first_passing(cell, -85.85) == (10, 10.0)  # half of 20 minutes
    assert results.first_passing(cell, -80.0) is None
    assert "| seed 0 | 10 | 5000 | 10 | -85.00 |" in results.page([cell])


def test_results_command_writes_the_page_and_refuses_a_broken_file(tmp_path, capsys):
    results.write(tmp_path, make_cell())
    assert results.main([f"--results={tmp_path}", f"--out={tmp_path / 'page.md'}"]) == 0
    assert (tmp_path / "page.md").read_text() == results.page([make_cell()])
    (tmp_path / "broken.json").write_text("[")
    assert results.main([f"--results={tmp_path}", f"--out={tmp_path / 'page.md'}"]) == 2
    assert "broken.json is not the result of a cell" in capsys.readouterr().err
    before = (tmp_path / "page.md").read_text()
    assert results.main([f"--results={tmp_path / 'typo'}", f"--out={tmp_path / 'page.md'}"]) == 2
    assert "typo is not a folder" in capsys.readouterr().err and (tmp_path / "page.md").read_text() == before
    (tmp_path / "broken.json").unlink()
    assert results.main([f"--results={tmp_path}", f"--out={tmp_path / 'none' / 'page.md'}"]) == 2
    assert "No such file" in capsys.readouterr().err


def test_columns_of_numbers_are_aligned_on_the_right():
    rows = [["exemplar", "**-81.90 (1)**", "+0.19", "", "`python launch.py`"], ["vamp", "-82.02", "", "", ""]]
    lines = results.table(["prior", "ours", "difference", "empty", "command"], rows).splitlines()
    assert lines[1] == "| --- | ---: | ---: | ---: | --- |"
    assert len(results.table(["a", "b"], []).splitlines()) == 2
