"""The search for the recipe: what a trial keeps of a run, and the page that is made of them."""

import json

import pytest

import exvae
from exvae import config as configs
from exvae import trials


def test_tables_in_the_docs_are_made_from_the_files_of_trials():
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


def test_scored_trial_is_of_validation_images(trained, tmp_path):
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
