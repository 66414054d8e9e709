"""Averages over held-out images, compared with explicit loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from exvae import models
from exvae.config import get_config
from exvae.data.store import Store
from exvae.encoding import make_encode_all
from exvae.evaluation import elbo, evaluate
from exvae.runs.records import Memory
from exvae.scale import sharding
from tests.conftest import compilations

SHAPE, DIM = (3, 4, 1), 2


@pytest.fixture(scope="module")
def setup():
    config = get_config()
    config.model.latent_dim, config.model.hidden_dim = DIM, 6
    model = models.build(config.model, SHAPE)
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    network = jax.tree.map(lambda s: rng.normal(scale=s.shape[0] ** -0.5, size=s.shape).astype(np.float32), shapes)
    params = {"model": network, "prior": {"log_var": np.float32(-0.3)}}
    return model, params, elbo.make_evaluator(config, model, sharding.make_mesh()), rng


def binary(rng, n):
    return (255 * rng.integers(0, 2, (n, *SHAPE))).astype(np.uint8)


def test_mean_elbo_equals_a_loop_over_images(setup):
    model, params, evaluator, rng = setup
    evaluator = evaluator._replace(batch=4)
    images, means = binary(rng, 10), rng.normal(size=(7, DIM)).astype(np.float32)
    key = jax.random.key(3)
    got = elbo.mean_elbo(key, evaluator, params, images, evaluator.components(params, means, 7))

    @jax.jit
    def outputs(key, x):
        q = model.apply({"params": params["model"]}, x, method="encode")
        z = q.mean + jnp.exp(0.5 * q.log_var) * jax.random.normal(key, q.mean.shape)
        return z, q.mean, q.log_var, model.apply({"params": params["model"]}, z, method="logits")

    reconstruction, kl = [], []
    for start in (0, 4, 8):
        x = np.zeros((4, *SHAPE), np.float32)
        batch = images[start : start + 4] / 255
        x[: len(batch)] = batch
        z, mean, log_var, logits = (np.asarray(a, np.float64) for a in outputs(jax.random.fold_in(key, start), x))
        for b in range(len(batch)):
            signs = np.where(x[b] == 1, 1.0, -1.0)
            reconstruction.append(special.log_expit(signs * logits[b]).sum())
            log_q = stats.norm.logpdf(z[b], mean[b], np.exp(0.5 * log_var[b])).sum()
            log_pz = special.logsumexp(stats.norm.logpdf(z[b], means, np.exp(-0.15)).sum(-1)) - np.log(7)
            kl.append(log_q - log_pz)
    assert len(kl) == 10
    assert got["reconstruction"] == pytest.approx(np.mean(reconstruction), rel=1e-5)
    assert got["kl"] == pytest.approx(np.mean(kl), rel=1e-4)
    assert got["elbo"] == pytest.approx(np.mean(reconstruction) - np.mean(kl), rel=1e-5)


def test_mean_elbo_ignores_the_padding(setup):
    _, params, evaluator, rng = setup
    evaluator = evaluator._replace(batch=4)
    images, means = binary(rng, 6), rng.normal(size=(7, DIM)).astype(np.float32)
    key = jax.random.key(4)
    got = elbo.mean_elbo(key, evaluator, params, images, evaluator.components(params, means, 7))
    filled = np.concatenate([images, binary(rng, 2)])  # other images in place of the padding
    mixture = evaluator.components(params, means, 7)
    parts = [
        np.asarray(
            evaluator.elbo_batch(jax.random.fold_in(key, start), params, filled[start : start + 4], mixture).elbo
        )
        for start in (0, 4)
    ]
    assert got["elbo"] == pytest.approx(np.concatenate(parts)[:6].mean(dtype=np.float64), rel=1e-6)


def test_mean_elbo_compiles_once_for_all_batches(setup):
    _, params, evaluator, rng = setup
    evaluator, means = evaluator._replace(batch=5), rng.normal(size=(7, DIM)).astype(np.float32)
    with compilations() as compiled:
        for count in (12, 15):  # the last of three batches is padded, then full
            parts = evaluator.components(params, means, 7)
            elbo.mean_elbo(jax.random.key(0), evaluator, params, binary(rng, count), parts)
    assert compiled["elbo_batch"] == 1


def test_mean_elbo_ignores_rows_beyond_the_exemplars(setup):
    _, params, evaluator, rng = setup
    images, means = binary(rng, 6), rng.normal(size=(7, DIM)).astype(np.float32)
    longer = np.concatenate([means, np.zeros((2, DIM), np.float32)])
    got, want = (
        elbo.mean_elbo(jax.random.key(5), evaluator, params, images, evaluator.components(params, m, 7))
        for m in (longer, means)
    )
    assert got == pytest.approx(want, rel=1e-6)


@pytest.mark.parametrize("on_host", [False, True])
def test_encode_all_gives_means_of_images_in_order(setup, on_host):
    model, params, evaluator, rng = setup
    images = rng.integers(0, 256, (9, *SHAPE), dtype=np.uint8)
    x = images.astype(np.float32) / 255
    want = jax.jit(lambda: model.apply({"params": params["model"]}, x, method="encode").mean)()
    store = Store(evaluator.mesh, images, device_mib=1e-6 if on_host else 1, memory_mib=1)
    assert store.on_host == on_host
    encode_all = make_encode_all(model, evaluator.mesh, block=4)
    np.testing.assert_allclose(encode_all(params, store), want, rtol=1e-5, atol=1e-6)


def test_active_units_counts_latents_whose_mean_varies():
    rng = np.random.default_rng(1)
    wave = np.tile([-1.0, 1.0], 50)  # variance 1
    scales = np.sqrt([0.0, 0.0099, 0.0101, 1.0, 25.0])
    means = (wave[:, None] * scales + rng.normal(size=5) * 100).astype(np.float32)  # a large mean is not activity
    assert elbo.active_units(means) == 3
    assert elbo.active_units(jnp.asarray(means[:, :2])) == 0
    noise = rng.normal(size=(200, 40)) * rng.uniform(0, 0.3, 40)
    want = sum(1 for d in range(40) if np.mean((noise[:, d] - noise[:, d].mean()) ** 2) > 0.01)
    assert elbo.active_units(noise) == want


def test_subset_is_random_and_a_larger_one_contains_it():
    whole = evaluate.subset(0, 100, 0)
    assert sorted(whole) == list(range(100))
    np.testing.assert_array_equal(evaluate.subset(0, 100, 30), whole[:30])
    assert sorted(whole[:30]) != list(range(30))
    assert (evaluate.subset(1, 100, 0) != whole).any()
    assert len(evaluate.subset(0, 20, 50)) == 20


def test_standard_error_equals_scipy(rng):
    values = rng.normal(size=50)
    assert evaluate.standard_error(values) == pytest.approx(stats.sem(values))
    assert evaluate.standard_error(values[:1]) is None


def test_second_estimate_of_the_audit_decides_nothing(make_run, monkeypatch):
    """`excess` above the tolerance doubles the candidates. `loss` is only reported, so it stays unbiased."""
    run, passes = make_run(), []
    run.config.eval.tolerance = 0.5
    lines = [(0, 0.1, 0.9), (1, 0.9, 0.1), (2, 0.9, 0.9), (3, 0.1, 0.1)]  # image, excess, loss
    records = Memory()
    records.add([{"image": i, "excess": excess, "loss": loss, "candidates": 50} for i, excess, loss in lines])

    def score(mesh, scorer, images, order, *, candidates, records, countdown):
        passes.append((candidates, order))
        records.add([{"image": i, "excess": 0.0, "loss": 0.0, "candidates": candidates} for i in order])

    monkeypatch.setattr(evaluate, "_score", score)
    monkeypatch.setattr(evaluate, "_components", lambda *_: None)
    monkeypatch.setattr(evaluate, "make_scorer", lambda *_, **__: lambda *_: None)
    evaluate.score_images(run, run.config, run.grey.test.images, np.arange(4), records, quiet=True)
    assert passes == [(100, [1, 2])]
