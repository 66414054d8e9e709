"""Log-likelihoods equal quadrature and brute force, pruning gives a lower bound, and the audit is unbiased."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from exvae import models
from exvae.config import get_config
from exvae.evaluation import likelihood
from exvae.objectives import encoder, evaluation_elbo
from exvae.priors import PRIORS, exemplar
from exvae.scale import sharding

SHAPE = (3, 4, 1)


def make_config(architecture="vae", prior="exemplar", dim=2, samples=200):
    config = get_config()
    config.model.architecture, config.prior.name = architecture, prior
    config.model.latent_dim, config.model.lower_latent_dim, config.model.hidden_dim = dim, 1, 8
    config.prior.num_pseudo_inputs = 5
    config.eval.iwae_samples = samples
    return config


def make_params(config, model, rng, log_var=-0.5) -> dict:
    """Random weights. Posteriors are wide and near the origin, so that importance sampling needs few samples."""
    shapes = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    network = jax.tree.map(lambda s: rng.normal(scale=0.5, size=s.shape).astype(np.float32), shapes)
    for name in set(network) & {"q_z", "q_z1", "q_z2"}:
        network[name] = jax.tree.map(lambda leaf: 0.2 * leaf, network[name])
        network[name]["log_var"]["bias"] += 0.7
    prior = {"exemplar": {"log_var": np.float32(log_var)}, "gaussian": {}}.get(config.prior.name)
    if prior is None:
        prior = {"pseudo_inputs": rng.uniform(size=(5, *SHAPE)).astype(np.float32)}
    return {"model": network, "prior": prior}


# Compiled once for each shape, instead of once for each operation.
@functools.partial(jax.jit, static_argnums=0, static_argnames="method")
def apply(model, params, *args, method):
    return models.apply(model, params, *args, method=method)


@functools.partial(jax.jit, static_argnums=(0, 1))
def draw_samples(model, num_samples, params, key, seen):
    """`likelihood.draw_samples` with log p(z) = 0."""
    config = make_config(samples=num_samples)
    return likelihood.draw_samples(key, config, model, params, seen, log_prob=lambda z: jnp.zeros(len(z)))


class Case:
    """A small model with its scorers."""

    def __init__(self, seed=0, means=None, log_var=-0.5, **options):
        self.rng = np.random.default_rng(seed)
        self.config = make_config(**options)
        self.model = models.build(self.config.model, SHAPE)
        self.params = make_params(self.config, self.model, self.rng, log_var)
        self.means = means
        if means is None and self.config.prior.name == "exemplar":
            self.means = self.rng.normal(size=(7, self.config.model.latent_dim)).astype(np.float32)
        prior = PRIORS[self.config.prior.name]
        components = jax.jit(lambda p, means: prior.components(p["prior"], encoder(self.model, p), means))
        self.components = components(self.params, self.means)
        self.images = (255 * self.rng.integers(0, 2, (4, *SHAPE))).astype(np.uint8)

    @functools.lru_cache  # noqa: B019
    def scorer(self, candidates=None):
        return likelihood.make_scorer(self.config, self.model, sharding.make_mesh(), candidates=candidates)

    def score(self, key, image=0, candidates=None) -> likelihood.Scores:
        index = np.array([image])
        scores = self.scorer(candidates)(self.params, self.components, key, self.images[index], index)
        return jax.tree.map(lambda a: float(a[0]), scores)

    def apply(self, *args, method):
        return apply(self.model, self.params, *args, method=method)

    def seen(self, image=0):
        return self.apply(self.images[image][None] / np.float32(255), method="observe")


def log_prior(case: Case, z: np.ndarray) -> np.ndarray:
    """log p(z) of each row of z, in float64."""
    name = case.config.prior.name
    if name == "gaussian":
        return stats.norm.logpdf(z).sum(-1)
    if name == "vamp":
        q = case.apply(case.params["prior"]["pseudo_inputs"], method="encode")
        centres, scales = np.asarray(q.mean, np.float64), np.exp(0.5 * np.asarray(q.log_var, np.float64))
    else:
        centres = np.asarray(case.means, np.float64)
        scales = np.full_like(centres, np.exp(0.5 * float(case.params["prior"]["log_var"])))
    parts = [stats.norm.logpdf(z, m, s).sum(-1) for m, s in zip(centres, scales, strict=True)]
    return special.logsumexp(parts, axis=0) - np.log(len(centres))


def quadrature(case: Case) -> np.ndarray:
    """log p(x) of every image: the integral of p(x, all latents) over a grid."""
    axis = np.linspace(-12, 12, 241)
    step = axis[1] - axis[0]
    grid = np.stack([a.ravel() for a in np.meshgrid(axis, axis)], -1).astype(np.float32)
    if case.config.model.architecture == "vae":
        logits = case.apply(grid, method="logits")
        log_p = log_prior(case, grid.astype(np.float64))
    else:  # one axis is z2, the other z1
        z2, z1 = grid[:, :1], grid[:, 1:]
        logits = case.apply(z2, z1, method="logits")
        p_z1 = jax.tree.map(lambda a: np.asarray(a, np.float64), case.apply(z2, method="prior_z1"))
        log_p = log_prior(case, z2.astype(np.float64))
        log_p += stats.norm.logpdf(z1, p_z1.mean, np.exp(0.5 * p_z1.log_var)).sum(-1)
    logits = np.asarray(logits, np.float64).reshape(len(grid), -1)
    x = case.images.reshape(len(case.images), -1) / 255.0
    log_px = logits @ x.T - np.logaddexp(0, logits).sum(-1, keepdims=True)
    return special.logsumexp(log_p[:, None] + log_px, axis=0) + 2 * np.log(step)


@pytest.mark.parametrize(
    ("architecture", "prior"),
    [("vae", "exemplar"), ("vae", "gaussian"), ("vae", "vamp"), ("hvae", "exemplar")],
)
def test_iwae_equals_quadrature(architecture, prior):
    case = Case(architecture=architecture, prior=prior, dim=2 if architecture == "vae" else 1, samples=40_000)
    for image, want in enumerate(quadrature(case)[:3]):
        got = [case.score(jax.random.key(seed), image).log_likelihood for seed in range(4)]
        spread = np.std(got, ddof=1) / 2
        assert spread < 0.02
        assert np.mean(got) == pytest.approx(want, abs=max(5 * spread, 0.01))


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_iwae_with_one_sample_is_an_elbo_sample(architecture):
    case = Case(architecture=architecture, samples=1)
    elbo_of = jax.jit(lambda *args: evaluation_elbo(args[0], case.model, case.params, *args[1:], prior=exemplar))
    for image in range(3):
        key = jax.random.key(image + 5)
        key_samples = jax.random.split(jax.random.fold_in(key, image))[0]
        key_block = jax.random.split(key_samples, 1)[0]
        elbo = elbo_of(key_block, case.images[image][None], case.components)
        assert case.score(key, image).log_likelihood == pytest.approx(float(elbo.elbo[0]), abs=1e-4)


def test_iwae_grows_with_samples_towards_log_px():
    values = {}
    for samples in (1, 16):
        case = Case(samples=samples)
        scorer = jax.vmap(case.scorer(), in_axes=(None, None, 0, None, None))
        keys = jax.random.split(jax.random.key(0), 4000)
        values[samples] = np.asarray(
            scorer(case.params, case.components, keys, case.images[:1], np.array([0])).log_likelihood, np.float64
        )
    mean = {samples: value.mean() for samples, value in values.items()}
    error = {samples: value.std() / 4000**0.5 for samples, value in values.items()}
    assert mean[1] + 4 * error[1] < mean[16] - 4 * error[16]
    assert mean[16] < quadrature(case)[0] + 4 * error[16]


def brute_force(case: Case, key, image: int) -> float:
    """The log-likelihood from the same samples, with the rest computed by SciPy in float64."""
    key_samples = jax.random.split(jax.random.fold_in(key, image))[0]
    samples = draw_samples(case.model, case.config.eval.iwae_samples, case.params, key_samples, case.seen(image))
    z, rest = np.asarray(samples.z, np.float64), np.asarray(samples.log_w, np.float64)
    return special.logsumexp(rest + log_prior(case, z)) - np.log(len(z))


HARD = {
    "sigma large": dict(log_var=4.0),
    "sigma small": dict(log_var=-5.0),
    "clusters": dict(clusters=True),
    "duplicates": dict(duplicates=True),
    "two blocks and a bit": dict(count=2 * 2048 + 3),
    "one exemplar": dict(count=1),
    "far away": dict(shift=100.0),
}


def hard_case(count=301, log_var=-0.5, clusters=False, duplicates=False, shift=0.0) -> Case:
    rng = np.random.default_rng(7)
    means = rng.normal(size=(count, 3)) + shift
    if clusters:
        means = 0.05 * means + 6 * rng.integers(-1, 2, (count, 3))
    if duplicates:
        means = np.repeat(means[:3], 101, axis=0)[:count]
    return Case(means=means.astype(np.float32), log_var=log_var, dim=3, samples=130)


@pytest.mark.parametrize("name", HARD)
def test_exact_equals_scipy_and_pruned_is_never_above(name):
    case = hard_case(**HARD[name])
    for image in range(2):
        key = jax.random.key(image)
        exact = case.score(key, image)
        want = brute_force(case, key, image)
        assert exact.log_likelihood == pytest.approx(want, rel=1e-5, abs=2e-4)
        assert exact.excess == exact.loss == 0
        rounding = 1e-6 * max(1.0, abs(want))
        few, more = (case.score(key, image, candidates) for candidates in (1, 16))
        assert few.log_likelihood <= more.log_likelihood + rounding
        assert more.log_likelihood <= exact.log_likelihood + rounding
        # In the case "far away", the second exemplar is 300 nats below the first.
        assert few.excess > 0 or name in ("one exemplar", "far away")


def test_all_exemplars_as_candidates_are_exact():
    case = hard_case(count=40)
    exact, pruned = (case.score(jax.random.key(0), 0, candidates) for candidates in (None, 40))
    assert exact == pruned


def test_surplus_samples_of_the_last_block_are_dropped(monkeypatch):
    """130 samples in blocks of at most 50 become three blocks of 44, and two surplus samples are dropped."""
    case = hard_case()
    monkeypatch.setattr(type(case.model), "block_rows", 50)
    draw_samples.clear_cache()
    samples = draw_samples(case.model, 130, case.params, jax.random.key(1), case.seen())
    assert samples.z.shape == (130, 3)
    assert len(np.unique(np.asarray(samples.z)[:, 0])) == 130
    key = jax.random.key(4)
    assert case.score(key).log_likelihood == pytest.approx(brute_force(case, key, 0), rel=1e-5)
    draw_samples.clear_cache()


def test_nearest_equals_a_sort_of_distances(rng):
    means, origin = rng.normal(size=(50, 3)).astype(np.float32), rng.normal(size=3).astype(np.float32)
    want = np.argsort(np.sum((means - origin) ** 2, axis=-1))[:9]
    assert set(np.asarray(likelihood.nearest(origin, means, 9)).tolist()) == set(want.tolist())


def test_audit_is_unbiased_when_pruning_loses_a_lot():
    """Only 5 of 301 exemplars are candidates and sigma is large, so most of the sum is left out. 6,000 audits."""
    case = hard_case(log_var=1.0)
    origin = case.seen().q.mean[0]
    chosen = likelihood.nearest(origin, case.means, 5)
    counted = case.components.at(chosen)
    log_prob = functools.partial(exemplar.log_prob, counted)
    arguments = (case.config, case.model, case.params, case.seen())
    samples = likelihood.draw_samples(jax.random.key(2), *arguments, log_prob=log_prob)
    z, log_pz = np.asarray(samples.z, np.float64), np.asarray(samples.log_pz, np.float64)
    log_w = np.asarray(samples.log_w, np.float64)
    exact = special.logsumexp(log_w - log_pz + log_prior(case, z))
    want = np.exp(exact - special.logsumexp(log_w)) - 1
    assert want > 3
    keys = jax.random.split(jax.random.key(9), 6000)
    components = case.components.replace(means=jnp.asarray(case.means))
    audits = jax.jit(jax.vmap(lambda key: likelihood.audit(key, samples, components, chosen, (2, 4))))(keys)
    audits = np.asarray(audits, np.float64).reshape(6000, -1).mean(-1)
    error = audits.std() / 6000**0.5
    assert abs(audits.mean() - want) < 4 * error
    assert error < 0.05 * want


def test_reported_loss_is_unbiased_although_candidates_are_doubled():
    """Half of 400 evaluations double. The reported loss fits the final candidates, but the deciding loss is too low."""
    case = hard_case(log_var=-0.5)
    keys = jax.random.split(jax.random.key(3), 400)

    def scores(candidates):
        scorer = jax.vmap(case.scorer(candidates), in_axes=(None, None, 0, None, None))
        found = scorer(case.params, case.components, keys, case.images[:1], np.array([0]))
        return jax.tree.map(lambda a: np.asarray(a[:, 0], np.float64), found)

    few, more, exact = scores(100), scores(200), scores(None)
    doubled = few.excess > np.median(few.excess)
    final = jax.tree.map(lambda a, b: np.where(doubled, a, b), more, few)
    lost = np.expm1(exact.log_likelihood - final.log_likelihood)
    reported, deciding = np.expm1(final.loss), np.expm1(np.where(doubled, more.excess, few.excess))
    error = np.std(reported - lost) / 20
    assert abs(np.mean(reported - lost)) < 4 * error
    assert np.mean(deciding[~doubled] - lost[~doubled]) < -3 * np.std((deciding - lost)[~doubled]) / 200**0.5
    assert error < 0.2 * lost.mean()


def test_audits_that_decide_and_that_report_are_independent():
    case = hard_case(log_var=1.0)
    scores = [case.score(jax.random.key(seed), candidates=5) for seed in range(30)]
    assert all(s.excess != s.loss for s in scores)
    assert abs(np.corrcoef([s.excess for s in scores], [s.loss for s in scores])[0, 1]) < 0.9
