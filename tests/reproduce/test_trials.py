"""The search for the recipe: what a trial stores about a run, and the page that is generated from trials."""

import json

import pytest

import exvae
from exvae import config as configs
from exvae.reproduce import trials


def test_tables_in_the_docs_are_generated_from_the_trial_files():
    text = trials.PAGE.read_text().partition(trials.MARK)[2]
    assert text == "\n" + trials.tables(trials.read_all(trials.TRIALS))


def write_run(folder, *, elbos=(-100.0, -90.0), **fields):
    config = configs.get_config()
    config.update_from_flattened_dict({"data.name": "mnist", "train.epochs": 10, "optim.schedule": "cosine", **fields})
    folder.mkdir()
    (folder / "config.json").write_text(config.to_json())
    lines = []
    for epoch, elbo in zip((5, 10), elbos, strict=False):
        lines.append({"epoch": epoch, "split": "train", "elbo": elbo - 1, "images_per_second": 5000.0})
        lines.append({"epoch": epoch, "split": "valid", "elbo": elbo})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_trial_has_the_runs_settings_and_curves_and_the_best_comes_first(tmp_path):
    worse = trials.collect(write_run(tmp_path / "worse", elbos=(-101.0, -91.0)), "note")
    better = trials.collect(
        write_run(tmp_path / "better", **{"optim.ema": 0.99, "objective.samples": 2, "optim.weight_decay": 0.1}), ""
    )
    rest = trials.collect(write_run(tmp_path / "rest", elbos=(-80.0,), **{"retrieval.search": "exact"}), "")
    *_, first, second, third = trials.tables([worse, rest, better]).splitlines()
    assert (
        first
        == "| 0.0005 | plain | 100 | 2 |  | 100 | 0.1 | 0.99 |  | -100.00 | -90.00 | -90.00 | -91.00 |  |  | 10.0 |"
    )
    assert (
        second == "| 0.0005 | plain | 100 | 1 |  | 100 |  |  | note | -101.00 | -91.00 | -91.00 | -92.00 |  |  | 10.0 |"
    )
    assert (
        third == "| 0.0005 | plain | 100 | 1 | 10 | 100 |  |  |  | -80.00 |  | -80.00 (epoch 5) | -81.00 |  |  | 10.0 |"
    )


def test_score_of_a_trial_uses_validation_images(trained, tmp_path):
    _, folder = trained
    scored = trials.score(folder, 7)
    run = exvae.load(folder)
    want = run.log_likelihood(run.dataset.valid.images[:7], num_samples=trials.SAMPLES).mean()
    assert scored["scored_images"] == 7 and scored["log_likelihood"] == pytest.approx(want, abs=1e-3)
    trial = trials.collect(write_run(tmp_path / "run"), "") | scored
    row = trials.tables([trial]).splitlines()[-1]
    assert row.endswith(f"| {scored['active_units']} | {scored['log_likelihood']:.2f} | 10.0 |")


def test_folder_without_a_run_is_refused_in_one_line(tmp_path, capsys):
    assert trials.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: --workdir={tmp_path} holds no run")
    assert trials.main(["--likelihood=-1"]) == 2
    assert capsys.readouterr().err == "error: --likelihood=-1 must be at least 0\n"


@pytest.fixture
def own_page(tmp_path, monkeypatch):
    """A temporary folder of trials and a temporary page."""
    monkeypatch.setattr(trials, "TRIALS", tmp_path / "trials")
    monkeypatch.setattr(trials, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text("Prose.\n" + trials.MARK + "old tables")
    return tmp_path / "page.md"


def test_run_that_is_added_again_keeps_its_note_and_scores(tmp_path, own_page):
    folder = write_run(tmp_path / "run")
    assert trials.main([str(folder), "--note=why"]) == 0
    path = tmp_path / "trials" / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"log_likelihood": -88.0}))
    assert trials.main([str(folder)]) == 0
    text = own_page.read_text()
    assert text.startswith("Prose.\n" + trials.MARK) and "old tables" not in text
    assert "| why |" in text and "| -88.00 |" in text


def test_nothing_is_lost_when_a_trial_cannot_be_added(tmp_path, own_page, capsys):
    good, other = write_run(tmp_path / "run"), tmp_path / "other"
    other.mkdir()
    assert trials.main([str(good), str(other)]) == 2
    assert not (tmp_path / "trials").exists()
    trials.main([str(good)])
    before = own_page.read_text()
    same_name = write_run(other / "run", **{"optim.ema": 0.5})
    capsys.readouterr()
    assert trials.main([str(same_name)]) == 2
    assert "run.json belongs to another run" in capsys.readouterr().err
    assert trials.main([str(good), str(same_name)]) == 2
    assert "have the same name" in capsys.readouterr().err and own_page.read_text() == before
    own_page.write_text("no mark")
    assert trials.main([]) == 2
    assert own_page.read_text() == "no mark"
