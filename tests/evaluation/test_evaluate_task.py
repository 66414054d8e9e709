"""The task `evaluate` on a tiny run: what it writes, resumes and refuses."""

import copy
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from scipy import stats

from exvae import data
from exvae.errors import UserError
from exvae.evaluation import evaluate
from exvae.runs.records import Records
from exvae.runs.trained import open_run
from exvae.training import loop
from tests.conftest import TINY_FIELDS

ROOT = Path(__file__).parents[2]


def results_of(workdir) -> dict:
    return json.loads((workdir / "results.json").read_text())["test"]


def record_files(workdir) -> dict[str, list[dict]]:
    """The records of each file, without `seconds`, which depends on the clock."""
    found = {}
    for path in (workdir / "evaluations").glob("*.jsonl"):
        found[path.name] = [json.loads(line) for line in path.read_text().splitlines()[1:]]
        for record in found[path.name]:
            assert record.pop("seconds") > 0
    return found


def test_training_ends_with_a_complete_evaluation(trained):
    _, workdir = trained
    test = results_of(workdir)
    assert {"elbo", "reconstruction", "kl", "log_likelihood", "iwae_samples", "exemplars", "active_units"} <= set(test)
    assert (test["iwae_samples"], test["exemplars"], test["num_images"]) == (20, 320, 40)
    (records,) = record_files(workdir).values()
    values = [record["log_likelihood"] for record in {record["image"]: record for record in records}.values()]
    assert len(values) == 40
    assert test["log_likelihood"] == pytest.approx(np.mean(values), rel=1e-12)
    assert test["log_likelihood_error"] == pytest.approx(stats.sem(values), rel=1e-9)
    assert test["bits_per_dim"] == pytest.approx(-np.mean(values) / (784 * np.log(2)), rel=1e-9)
    assert test["log_likelihood"] > test["elbo"]
    line = json.loads((workdir / "metrics.jsonl").read_text().splitlines()[-1])
    assert line.items() >= test.items()
    assert (workdir / "figures" / "samples.png").stat().st_size > 1000


def test_repeated_evaluation_scores_nothing_and_has_the_same_results(copied, monkeypatch):
    config, workdir = copied
    before = results_of(workdir)
    monkeypatch.setattr(evaluate, "make_scorer", None)  # scoring would fail
    evaluate.main(open_run(config, workdir))
    assert results_of(workdir) == before


def test_pruned_doubles_candidates_until_the_tolerance_is_met_and_then_equals_exact(copied):
    """With zero tolerance, the candidates of every image grow to all exemplars: 50, 100, 200, 320."""
    config, workdir = copied
    config.eval.tolerance, config.eval.num_images = 0.0, 6
    evaluate.main(open_run(config, workdir))
    pruned = results_of(workdir)
    (records,) = (records for records in record_files(workdir).values() if len({r["image"] for r in records}) == 6)
    by_image = {}
    for record in records:
        by_image.setdefault(record["image"], []).append(record)
    assert len(by_image) == 6
    for rounds in by_image.values():
        counts = [record["candidates"] for record in rounds]
        assert counts == [50, 100, 200, 320][: len(counts)]
        assert counts[-1] == 320 or rounds[-1]["excess"] == 0  # the missing terms underflow to zero
        values = [record["log_likelihood"] for record in rounds]
        assert np.all(np.diff(values) >= -1e-4)
    assert (pruned["loss"], pruned["images_doubled"]) == (0.0, 6)
    config.eval.method = "exact"
    evaluate.main(open_run(config, workdir))
    exact = results_of(workdir)
    assert exact["log_likelihood"] == pytest.approx(pruned["log_likelihood"], abs=1e-5)
    assert "loss" not in exact
    assert exact["elbo"] == pruned["elbo"]


def values_by_image(workdir, samples: int) -> dict[str, dict[int, float]]:
    """Log-likelihoods of the evaluations with this number of samples: {method: {image: value}}."""
    found = {}
    for path in (workdir / "evaluations").glob("*.jsonl"):
        settings, *records = (json.loads(line) for line in path.read_text().splitlines())
        if settings["iwae_samples"] == samples:
            found[settings["method"]] = {record["image"]: record["log_likelihood"] for record in records}
    return found


def test_interval_of_the_audit_covers_what_pruning_lost(copied):
    """With 200 of 320 exemplars and no doubling, the loss is measurable, yet small enough for the normal interval."""
    config, workdir = copied
    config.eval.candidates, config.eval.audit, config.eval.iwae_samples = 200, 16, 60
    evaluate.main(open_run(config, workdir))
    pruned = results_of(workdir)
    config.eval.method = "exact"
    evaluate.main(open_run(config, workdir))
    values = values_by_image(workdir, 60)
    lost = np.array([values["exact"][image] - values["pruned"][image] for image in values["exact"]])
    assert results_of(workdir)["log_likelihood"] - pruned["log_likelihood"] == pytest.approx(lost.mean(), abs=1e-6)
    assert 1e-3 < lost.mean() < 1
    assert pruned["loss_low"] < lost.mean() < pruned["loss_high"]
    assert pruned["loss_high"] - pruned["loss_low"] < lost.mean()
    assert pruned["images_doubled"] == 0


def test_interrupted_evaluation_resumes_and_scores_no_image_twice(copied, monkeypatch):
    config, workdir = copied
    config.eval.iwae_samples = 30
    evaluate.main(open_run(config, workdir))
    straight, straight_files = results_of(workdir), record_files(workdir)
    shutil.rmtree(workdir / "evaluations")
    add, done = Records.add, []

    def interrupted(self, records):
        add(self, records)
        done.extend(record["image"] for record in records)
        if len(done) == 13:
            raise KeyboardInterrupt

    monkeypatch.setattr(Records, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main(open_run(config, workdir))
    assert results_of(workdir) == straight  # the earlier results are kept
    evaluate.main(open_run(config, workdir))
    assert results_of(workdir) == straight
    assert len(done) == sum(len(records) for records in record_files(workdir).values())
    (records,) = record_files(workdir).values()
    assert len({(record["image"], record["candidates"]) for record in records}) == len(records)
    assert sorted(map(str, records)) == sorted(
        map(str, next(found for found in straight_files.values() if found[0] in records))
    )


@pytest.mark.faults
def test_killed_evaluation_resumes_with_the_same_results(copied):
    config, workdir = copied
    fields = {**TINY_FIELDS, "eval.iwae_samples": 1000}
    command = [sys.executable, "launch.py", "--config=experiments/quickstart.py", "--task=evaluate"]
    command += [f"--config.{field}={value}" for field, value in fields.items()]
    other = workdir.with_name("other")
    shutil.copytree(workdir, other)
    shutil.rmtree(workdir / "evaluations")
    process = subprocess.Popen([*command, f"--workdir={workdir}"], cwd=ROOT, stdout=subprocess.DEVNULL)
    while sum(map(len, record_files(workdir).values())) < 5:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    (killed,) = record_files(workdir).values()
    assert 5 <= len(killed) < 40
    done = subprocess.run([*command, f"--workdir={workdir}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    config.eval.iwae_samples = 1000
    evaluate.main(open_run(config, other))
    (records,) = record_files(workdir).values()
    assert records[: len(killed)] == killed
    assert len({(record["image"], record["candidates"]) for record in records}) == len(records)
    assert results_of(workdir) == results_of(other)


def test_several_devices_give_the_same_values(copied):
    """With three devices and 40 images, the last round is not full."""
    _, workdir = copied
    before, records = results_of(workdir), record_files(workdir)
    shutil.rmtree(workdir / "evaluations")
    command = [sys.executable, "launch.py", "--config=experiments/quickstart.py", "--task=evaluate"]
    command += [f"--config.{field}={value}" for field, value in TINY_FIELDS.items()] + [f"--workdir={workdir}"]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=3"
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert record_files(workdir) == records  # image by image
    assert results_of(workdir)["elbo"] == pytest.approx(before["elbo"], rel=1e-6)


def test_records_of_other_parameters_images_or_options_are_separate(trained):
    config, workdir = trained
    run = open_run(config, workdir)

    def changed(**fields):
        other = copy.deepcopy(run.config)
        other.update_from_flattened_dict(fields)
        return evaluate.settings_of(dataclasses.replace(run, config=other))

    test = dataclasses.replace(run.grey.test, images=run.grey.test.images[::-1])
    poisoned = jax.tree.map(lambda leaf: leaf + 1e-3, run.params)
    others = [
        evaluate.settings_of(dataclasses.replace(run, params=poisoned)),
        evaluate.settings_of(dataclasses.replace(run, grey=dataclasses.replace(run.grey, test=test))),
        evaluate.settings_of(dataclasses.replace(run, exemplars=data.Split(run.exemplars.images[1:]))),
        changed(seed=5),
        *(changed(**{f"eval.{name}": 7}) for name in ("iwae_samples", "candidates", "audit")),
        changed(**{"eval.tolerance": 0.5}),
        changed(**{"eval.method": "exact"}),
    ]
    here = evaluate.settings_of(run)
    assert all(other != here for other in others)
    assert changed(**{"eval.num_images": 5}) == here  # a subset of the same records
    assert evaluate.settings_of(open_run(config, workdir)) == here


def test_each_kind_of_evaluation_has_its_own_summary_and_scores_once(copied, monkeypatch):
    config, workdir = copied
    first = results_of(workdir)
    config.eval.method, config.eval.num_images = "exact", 3
    evaluate.main(open_run(config, workdir))
    summaries = [json.loads(path.read_text()) for path in (workdir / "evaluations").glob("*.json")]
    assert sorted(summary["eval"]["method"] for summary in summaries) == ["exact", "pruned"]
    assert first in [summary["test"] for summary in summaries]
    monkeypatch.setattr(evaluate, "make_scorer", None)
    config.eval.tolerance, config.eval.candidates, config.eval.audit = 0.5, 9, 2  # the exact method does not use them
    evaluate.main(open_run(config, workdir))


def test_other_training_images_are_refused(copied):
    config, workdir = copied
    stored = json.loads((workdir / "config.json").read_text())
    stored["data"]["split_seed"] = 1
    (workdir / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="other training images"):
        evaluate.main(open_run(config, workdir))
    config.data.split_seed = 1
    with pytest.raises(UserError, match="a run on other training images"):
        loop.train(config, workdir)


def test_evaluation_of_more_images_reuses_earlier_scores(copied):
    config, workdir = copied
    config.eval.iwae_samples = 25
    for number, scored in ((3, 3), (7, 7), (5, 7)):
        config.eval.num_images = number
        evaluate.main(open_run(config, workdir))
        assert results_of(workdir)["num_images"] == number
        counts = [len({record["image"] for record in records}) for records in record_files(workdir).values()]
        assert sorted(counts) == [scored, 40]


def test_evaluation_accepts_exemplars_other_than_the_training_set(copied, rng):
    config, workdir = copied
    config.eval.num_images = 5
    dataset = data.load(config.data)
    config.eval.exemplars = "train+valid"
    evaluate.main(open_run(config, workdir))
    both = results_of(workdir)
    assert both["exemplars"] == 360
    grey = data.load(config.data, binarize=False)
    np.savez(workdir / "both.npz", images=np.concatenate([grey.train.images, grey.valid.images]))
    config.eval.exemplars = f"npz:{workdir}/both.npz"
    evaluate.main(open_run(config, workdir))
    assert results_of(workdir) == both
    np.savez(workdir / "few.npz", train=dataset.test.images[:9])
    config.eval.exemplars = f"npz:{workdir}/few.npz"
    evaluate.main(open_run(config, workdir))
    assert results_of(workdir)["exemplars"] == 9
    assert results_of(workdir)["log_likelihood"] != both["log_likelihood"]
    np.savez(workdir / "small.npz", images=np.zeros((9, 14, 14)))
    config.eval.exemplars = f"npz:{workdir}/small.npz"
    with pytest.raises(UserError, match="images of 14x14x1, but the model is for 28x28x1"):
        evaluate.main(open_run(config, workdir))


def test_folder_without_a_checkpoint_is_refused(copied, tmp_path):
    config, workdir = copied
    with pytest.raises(UserError, match="holds no run"):
        evaluate.main(open_run(config, tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()
    shutil.rmtree(workdir / "checkpoints" / "best")
    with pytest.raises(UserError, match="holds no checkpoint"):
        evaluate.main(open_run(config, workdir))
    for text in ("{", '{"train": {"batch_size": "x"}}'):
        stored = json.loads((workdir / "results.json").read_text())["config"]
        stored["train"]["batch_size"] = "x"
        (workdir / "config.json").write_text(text if text == "{" else json.dumps(stored))
        with pytest.raises(UserError, match="is not the config of a run"):
            evaluate.main(open_run(config, workdir))


def test_run_of_another_model_is_refused_but_training_options_may_differ(copied):
    config, workdir = copied
    config.train.batch_size, config.optim.learning_rate, config.prior.num_exemplars = 7, 0.3, 11
    config.eval.num_images = 2
    evaluate.main(open_run(config, workdir))
    stored = json.loads((workdir / "results.json").read_text())["config"]
    assert (stored["train"]["batch_size"], stored["eval"]["num_images"]) == (40, 2)
    for field, value in (("prior.name", "vamp"), ("data.name", "mnist_5k"), ("model.architecture", "hvae")):
        other = copy.deepcopy(config)
        other.update_from_flattened_dict({field: value})
        with pytest.raises(UserError, match=f"{field}: '{value}' here, '.*' in the run"):
            evaluate.main(open_run(other, workdir))
    config.model.architecture = "hvae"
    # If config.json names the other model as well, the checkpoint itself does not fit.
    stored["model"]["architecture"] = "hvae"
    (workdir / "config.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="no readable checkpoint"):
        evaluate.main(open_run(config, workdir))


def test_damaged_checkpoint_is_replaced_by_the_one_before(copied, capsys):
    config, workdir = copied
    best = workdir / "checkpoints" / "best"
    shutil.copytree(best / "8", best / "16")
    for path in (best / "16").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-7])
    config.eval.num_images = 2
    evaluate.main(open_run(config, workdir))
    assert "warning: the checkpoint of step 16 is damaged" in capsys.readouterr().out
    assert json.loads((workdir / "results.json").read_text())["best_epoch"] == 1
