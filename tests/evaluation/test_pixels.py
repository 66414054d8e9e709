"""Parzen windows on pixels: they equal SciPy, they sum to one, and the choice of their bandwidth."""

import itertools
import json

import numpy as np
import pytest
from scipy import optimize, special, stats

from exvae import data
from exvae.config import get_config
from exvae.errors import UserError
from exvae.evaluation import pixels


def brute_force(name, x, exemplars, bandwidth):
    """log 1/N sum_n k(x, x_n), where k is a product over pixels."""
    x, exemplars = x.reshape(len(x), 1, -1) / 255.0, exemplars.reshape(len(exemplars), -1) / 255.0
    if name == "gaussian":
        terms = stats.norm.logpdf(x, exemplars, bandwidth).sum(-1)
    else:
        terms = np.where(x == exemplars, np.log(1 - bandwidth), np.log(bandwidth)).sum(-1)
    return special.logsumexp(terms, axis=1) - np.log(len(exemplars))


def draw(rng, name, n, shape=(4, 5, 1)):
    if name == "gaussian":
        return rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    return (255 * rng.integers(0, 2, (n, *shape))).astype(np.uint8)


@pytest.mark.parametrize("name", pixels.KERNELS)
@pytest.mark.parametrize("count", [1, 37, 100])
def test_window_equals_scipy(monkeypatch, rng, name, count):
    """Also with batches and blocks that are not full, and for an image that is an exemplar."""
    monkeypatch.setattr(pixels, "BATCH", 3)
    monkeypatch.setattr(pixels, "BLOCK", 32)
    exemplars, images = draw(rng, name, count), draw(rng, name, 7)
    images[2] = exemplars[0]
    bandwidths = np.array([0.05, 0.2, 0.45])
    got = pixels.log_likelihoods(pixels.KERNELS[name], images, exemplars, bandwidths)
    want = [brute_force(name, images, exemplars, bandwidth) for bandwidth in bandwidths]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-3 if name == "gaussian" else 1e-4)


def test_bernoulli_window_sums_to_one(rng):
    images = 255 * np.array(list(itertools.product((0, 1), repeat=6)), np.uint8).reshape(-1, 2, 3, 1)
    got = pixels.log_likelihoods(pixels.KERNELS["bernoulli"], images, draw(rng, "b", 9, (2, 3, 1)), np.array([0.1]))
    assert np.exp(got).sum() == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("name", pixels.KERNELS)
def test_chosen_bandwidth_is_the_best_on_validation(rng, name):
    exemplars = draw(rng, name, 60)
    valid = exemplars[rng.integers(0, 60, 40)].copy()
    noise = rng.random(valid.shape) < 0.1
    valid[noise] = draw(rng, name, 40)[noise]
    kernel = pixels.KERNELS[name]
    got = pixels.choose_bandwidth(kernel, valid, exemplars)
    best = optimize.minimize_scalar(
        lambda b: -brute_force(name, valid, exemplars, b).mean(), bounds=kernel.bandwidths, method="bounded"
    )
    assert got == pytest.approx(best.x, rel=0.06)
    assert brute_force(name, valid, exemplars, got).mean() == pytest.approx(-best.fun, abs=0.02)


@pytest.mark.parametrize("name", pixels.KERNELS)
def test_experiment_writes_its_folder(tmp_path, name):
    config = get_config()
    config.data.name, config.data.num_images = "glyphs", 300
    config.model.architecture, config.model.likelihood = "parzen", name
    config.eval.num_images = 20
    pixels.main(config, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    written = json.loads((tmp_path / "config.json").read_text())
    assert results["config"] == written == json.loads(json.dumps(config.to_dict()))
    test = results["test"]
    assert (test["num_images"], test["exemplars"]) == (20, 240)
    assert test["log_likelihood_error"] > 0
    assert ("bits_per_dim" in test) == (name == "bernoulli")
    if name == "bernoulli":  # a fair coin for each pixel has 1 bit per dimension
        assert 0 < test["bits_per_dim"] < 1


def test_bandwidth_is_chosen_with_validation_images_and_training_exemplars(tmp_path):
    """With validation images among the exemplars, the best bandwidth would be close to zero."""
    config = get_config()
    config.data.name, config.data.num_images = "glyphs", 300
    config.model.architecture, config.model.likelihood = "parzen", "gaussian"
    bandwidths = []
    for which in ("train", "train+valid"):
        config.eval.exemplars = which
        pixels.main(config, tmp_path / which)
        bandwidths.append(json.loads((tmp_path / which / "results.json").read_text())["test"]["bandwidth"])
    grey = data.load(config.data, binarize=False)
    kernel, train = pixels.KERNELS["gaussian"], grey.train.images
    on_valid, on_test = (pixels.choose_bandwidth(kernel, part.images, train) for part in (grey.valid, grey.test))
    assert bandwidths == [on_valid, on_valid] and on_valid != on_test


def test_window_of_another_kernel_does_not_overwrite_a_folder(tmp_path):
    config = get_config()
    config.data.name, config.data.num_images, config.model.architecture = "glyphs", 100, "parzen"
    pixels.main(config, tmp_path)
    config.model.likelihood = "gaussian"
    with pytest.raises(UserError, match="another config"):
        pixels.main(config, tmp_path)
