"""A trained model from Python: `exvae.load`."""

import json

import jax
import numpy as np
import pytest

import exvae
from exvae.errors import UserError
from exvae.runs.trained import open_run
from exvae.uses import generate

KEY = jax.random.key(0)


@pytest.fixture
def loaded(copied):
    return exvae.load(str(copied[1]))


def far_away(run, count):
    """Images whose means are far from all exemplars, so that they do not change p(z) near the exemplars."""
    rng = np.random.default_rng(0)
    pool = rng.integers(0, 256, (4000, *run.model.image_shape), dtype=np.uint8)
    z = run.encode(pool).mean
    squares = ((z[:, None] - run.means[None]) ** 2).sum(-1)
    far = np.argsort(-squares.min(1))[:count]
    return pool[far], np.argsort(-squares[far].min(0))[:4]  # and the exemplars farthest from them


def test_loaded_run_is_the_trained_one(loaded, copied):
    config, workdir = copied
    assert (loaded.config.model.latent_dim, loaded.workdir) == (4, workdir)
    assert len(loaded.exemplars) == 320
    jax.tree.map(np.testing.assert_array_equal, loaded.params, open_run(config, workdir).params)


def test_every_method_takes_images_in_any_form(loaded):
    images = loaded.dataset.test.images[:4]  # bytes 0 and 255
    forms = [images, images[..., 0], images / 255.0, images > 0, (images > 0).astype(np.uint8)]
    for form in forms:
        np.testing.assert_allclose(loaded.encode(form).mean, loaded.encode(images).mean, atol=1e-5)
        np.testing.assert_allclose(loaded.reconstruct(form), loaded.reconstruct(images), atol=1e-5)
    assert loaded.encode(images).log_var.shape == (4, 4)
    assert loaded.sample(KEY, 3).shape == (3, 28, 28, 1)
    assert loaded.interpolate(images[:2], images[2:], 3).shape == (2, 3, 28, 28, 1)
    assert loaded.nearest_exemplars(images, 5).index.shape == (4, 5)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 14, 14), np.uint8), "images of 14x14x1, but the model is for 28x28x1"),
        (np.zeros((2, 28, 28, 3), np.uint8), "images of 28x28x3"),
        (np.full((2, 28, 28), np.nan), "NaN or infinite"),
        (np.full((2, 28, 28), 7.0), "must lie in 0..1"),
        (np.zeros((0, 28, 28)), "holds no images"),
        (np.zeros(3), "expected"),
    ],
)
def test_images_of_the_wrong_kind_are_refused(loaded, images, message):
    calls = [
        loaded.encode, loaded.reconstruct, loaded.nearest_exemplars, loaded.with_exemplars, loaded.log_likelihood,
        lambda x: loaded.augment(KEY, x), lambda x: loaded.interpolate(x, x),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(UserError, match=message):
            call(images)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda run, x: run.sample(KEY, 0), "n=0 must be a whole number, at least 1"),
        (lambda run, x: run.sample(KEY, 2.5), "n=2.5 must be a whole number"),
        (lambda run, x: run.sample(KEY, 2, temperature=-1), "temperature=-1 must be at least 0"),
        (lambda run, x: run.augment(KEY, x, 0), "n=0 must be"),
        (lambda run, x: run.interpolate(x, x, 1), "steps=1 must be"),
        (lambda run, x: run.log_likelihood(x, 0), "num_samples=0 must be"),
        (lambda run, x: run.sample(KEY, 2, index=[0.5]), "by their indices"),
        (lambda run, x: run.sample(KEY, 2, index=[]), "by their indices"),
    ],
)
def test_invalid_numbers_are_refused(loaded, call, message):
    with pytest.raises(UserError, match=message):
        call(loaded, loaded.dataset.test.images[:2])


def test_data_dir_replaces_the_stored_folder(copied):
    assert exvae.load(copied[1], data_dir="elsewhere").config.data.dir == "elsewhere"


def test_repeated_log_likelihood_encodes_no_exemplars_and_prints_nothing(loaded, monkeypatch, capsys):
    images = loaded.dataset.test.images[:2]
    loaded.log_likelihood(images, 5)
    monkeypatch.setattr("exvae.runs.trained.encode", None)
    loaded.log_likelihood(images, 5)
    assert capsys.readouterr().out == ""


def test_config_without_newer_fields_is_opened_and_an_empty_one_is_refused(copied):
    config, workdir = copied
    stored = json.loads((workdir / "config.json").read_text())
    for group in ("generate", "represent", "augment"):
        del stored[group]
    del stored["model"]["lower_latent_dim"]
    (workdir / "config.json").write_text(json.dumps(stored))
    assert open_run(config, workdir).model == exvae.load(workdir).model
    (workdir / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is not the config of a run"):
        exvae.load(workdir)


def test_interpolation_between_unequal_numbers_of_images_is_refused(loaded):
    with pytest.raises(UserError, match="not 2 and 3"):
        loaded.interpolate(loaded.dataset.test.images[:2], loaded.dataset.test.images[:3])


def test_samples_come_from_the_given_exemplars(loaded):
    more = np.concatenate([loaded.exemplars.images, 255 - loaded.exemplars.images])
    labels = np.repeat([0, 1], 320)
    twice = loaded.with_exemplars(more, labels)
    assert (len(twice.exemplars), len(loaded.exemplars)) == (640, 320)  # a new run, the old one is unchanged
    np.testing.assert_allclose(twice.means[:320], loaded.means, atol=1e-5)
    inverted = twice.sample(KEY, 50, label=1, temperature=0.0)
    possible = twice.reconstruct(more[320:])
    distance = np.abs(inverted[:, None] - possible[None]).max(axis=(2, 3, 4)).min(1)
    assert distance.max() < 1e-4
    sources = generate.sample(KEY, twice, 400).sources
    assert 120 < np.sum(sources >= 320) < 280


def test_repeated_exemplars_give_the_same_prior(loaded):
    """p(z|X) is a mean over exemplars, so it does not change if every exemplar occurs twice."""
    images = loaded.dataset.test.images[:5]
    here = loaded.log_likelihood(images, num_samples=5)
    doubled = loaded.with_exemplars(np.repeat(loaded.exemplars.images, 2, axis=0))
    np.testing.assert_allclose(doubled.log_likelihood(images, num_samples=5), here, atol=2e-3)


def test_exemplars_far_away_cost_log_two(loaded):
    """The mixture divides by the number of all exemplars, including those far away."""
    assert loaded.config.eval.candidates > 640  # all exemplars count
    loaded.params["prior"]["log_var"] = np.float32(-6.0)  # narrow components, which do not reach far
    others, near = far_away(loaded, 320)
    images = loaded.exemplars.images[near]
    here = loaded.log_likelihood(images, num_samples=5)
    twice = loaded.with_exemplars(np.concatenate([loaded.exemplars.images, others]))
    np.testing.assert_allclose(twice.log_likelihood(images, num_samples=5), here - np.log(2), atol=2e-3)


def test_log_likelihood_of_the_test_set_equals_that_of_the_task(loaded):
    results = json.loads((loaded.workdir / "results.json").read_text())["test"]
    loaded.config.eval.candidates, loaded.config.eval.audit, loaded.config.eval.tolerance = 50, 4, 1e9
    found = loaded.log_likelihood(loaded.dataset.test.images, num_samples=20)
    assert found.mean() == pytest.approx(results["log_likelihood"], abs=1e-4)


def test_labels_of_another_length_are_refused(loaded):
    with pytest.raises(UserError, match="expected 320 integers"):
        loaded.with_exemplars(loaded.exemplars.images, np.zeros(3, np.int32))


def test_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        exvae.load(tmp_path)
