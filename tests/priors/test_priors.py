"""Priors equal brute force in float64: explicit loops for values, central differences for gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from exvae.config import get_config
from exvae.distributions import Normal
from exvae.priors import exemplar, gaussian, parzen, vamp
from exvae.retrieval import NOBODY

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower
FORMS = ("all", "leave_one_out", "subsampled", "own_neighbours")


def brute(z, means, log_var, *, count, exemplar_index=None, leave_out=None, neighbours=None):
    """log 1/count sum_j N(z_b | mu_j, sigma^2 I), one pair (b, j) at a time."""
    dim, count = z.shape[1], np.broadcast_to(count, len(z))
    numbers = np.arange(len(means)) if exemplar_index is None else exemplar_index
    out = []
    for b in range(len(z)):
        seen = []
        for j, number in enumerate(numbers):
            allowed = number != NOBODY
            allowed &= leave_out is None or number != leave_out[b]
            allowed &= neighbours is None or number in set(neighbours[b])
            if allowed:
                square = sum((z[b, d] - means[j, d]) ** 2 for d in range(dim))
                seen.append(-0.5 * (dim * math.log(2 * math.pi) + dim * log_var + square / math.exp(log_var)))
        top = max(seen, default=-math.inf)
        out.append(top + math.log(sum(math.exp(s - top) for s in seen)) - math.log(count[b]) if seen else top)
    return np.array(out)


def differences(f, x, h=1e-5):
    """Gradient of a scalar function by central differences."""
    grad = np.zeros(np.shape(x))
    for position in np.ndindex(grad.shape):
        step = np.zeros(grad.shape)
        step[position] = h
        grad[position] = (f(x + step) - f(x - step)) / (2 * h)
    return grad


def form(name, rng, batch, slots):
    """Arguments of exemplar_log_prob for one of the paper's objectives."""
    if name == "all":
        return {"count": float(slots)}
    if name == "leave_one_out":
        return {"count": float(slots - 1), "leave_out": rng.permutation(slots)[:batch]}
    # The training set is larger than the draw, every third slot is empty, and some rows of the batch are in the draw.
    index = rng.permutation(3 * slots)[:slots]
    index[::3] = NOBODY
    drawn = index[index != NOBODY]
    leave_out = rng.permutation(3 * slots)[:batch]
    leave_out[: batch // 2] = rng.permutation(drawn)[: batch // 2]
    count = len(drawn) + 2.0 - np.isin(leave_out, drawn)  # not the number of slots, and not the same in every row
    arguments = {"count": count.astype(np.float32), "exemplar_index": index, "leave_out": leave_out}
    if name == "own_neighbours":
        neighbours = np.stack([rng.permutation(np.append(drawn, 3 * slots + 5))[:4] for _ in range(batch)])
        neighbours[:, -1] = NOBODY  # must not match the empty slots
        arguments["neighbours"] = neighbours
    return arguments


def data(rng, batch, slots, dim):
    means = rng.normal(size=(slots, dim)).astype(np.float32)
    z = rng.normal(size=(batch, dim)).astype(np.float32)
    return z, means, rng.uniform(0.5, 1.5, batch).astype(np.float32)


def compiled(arguments):
    """A new jitted function: (z, means, log_var, weights) -> values, gradients of their weighted sum."""
    arguments = {name: jnp.asarray(value) for name, value in arguments.items()}

    def run(z, means, log_var, weights):
        values, pull = jax.vjp(lambda *a: parzen.exemplar_log_prob(*a, **arguments), z, means, log_var)
        return values, pull(weights)

    return jax.jit(run, compiler_options=QUICKLY)


@pytest.mark.parametrize("name", FORMS)
def test_exemplar_prior_value_and_gradients_equal_brute_force(name):
    rng = np.random.default_rng(FORMS.index(name))
    z, means, weights = data(rng, 5, 13, 3)
    arguments, log_var = form(name, rng, 5, 13), np.float32(-0.4)
    values, grads = compiled(arguments)(z, means, log_var, weights)
    z, means, log_var, weights = (np.asarray(a, np.float64) for a in (z, means, log_var, weights))
    want = brute(z, means, log_var, **arguments)
    assert np.all(np.isfinite(want))
    np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5)
    wanted = (
        differences(lambda a: weights @ brute(a, means, log_var, **arguments), z),
        differences(lambda a: weights @ brute(z, a, log_var, **arguments), means),
        differences(lambda a: weights @ brute(z, means, a, **arguments), log_var),
    )
    for got, expected in zip(grads, wanted, strict=True):
        assert got.shape == expected.shape
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=2e-5)


def dense(z, means, log_var, weights, seen, count):
    """Values and gradients in float64, from all responsibilities at once."""
    z, means, log_var, weights = (np.asarray(a, np.float64) for a in (z, means, log_var, weights))
    delta = means[None] - z[:, None]  # (B, U, D)
    squares = (delta**2).sum(-1) * np.exp(-log_var)
    exponents = np.where(seen, -0.5 * squares, -np.inf)
    top = special.logsumexp(exponents, axis=1)
    pull = weights[:, None] * np.exp(exponents - top[:, None])
    toward = pull[..., None] * delta * np.exp(-log_var)
    dim = z.shape[1]
    values = top - np.log(count) - 0.5 * dim * (np.log(2 * np.pi) + log_var)
    return values, (toward.sum(1), -toward.sum(0), (pull * 0.5 * squares).sum() - 0.5 * dim * weights.sum())


@pytest.mark.parametrize("block", [1, 5, 12, 13, 64])
def test_exemplar_prior_does_not_depend_on_the_block(monkeypatch, block):
    # 13 exemplars: no multiple of 5 or 12, and less than a block of 64. All cases share one compilation.
    monkeypatch.setattr(parzen, "BLOCK", block)
    rng = np.random.default_rng(7)
    z, means, weights = data(rng, 4, 13, 3)
    leave_out = np.array([0, 12, 5, NOBODY - 5])
    seen = np.arange(13)[None] != leave_out[:, None]
    run = compiled({"count": 12.0, "leave_out": leave_out})
    repeated = means.copy()
    repeated[::2] = means[3]
    for exemplars in (means, repeated):
        for log_var in (-7.0, 0.3, 12.0):
            values, grads = run(z, exemplars, np.float32(log_var), weights)
            want, wanted = dense(z, exemplars, log_var, weights, seen, 12.0)
            # The square is expanded in float32, so its rounding error is also divided by sigma^2.
            noise = 3e-6 * max(1.0, math.exp(-log_var))
            np.testing.assert_allclose(values, want, rtol=1e-6, atol=noise)
            for got, expected in zip(grads, wanted, strict=True):
                scale = np.abs(expected).max()
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=scale * 2 * noise + 1e-9)


@pytest.mark.parametrize("block", [1, 2048])
def test_exemplar_prior_of_one_exemplar_is_a_normal(monkeypatch, block):
    monkeypatch.setattr(parzen, "BLOCK", block)
    rng = np.random.default_rng(8)
    z, means, weights = data(rng, 4, 1, 3)
    values, (grad_z, grad_means, _) = compiled({"count": 1.0})(z, means, np.float32(0.8), weights)
    want = stats.norm.logpdf(z.astype(np.float64), means, math.exp(0.4)).sum(-1)
    np.testing.assert_allclose(values, want, rtol=1e-5)
    pull = weights[:, None] * (means - z) * math.exp(-0.8)
    np.testing.assert_allclose(grad_z, pull, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grad_means, -pull.sum(0, keepdims=True), rtol=1e-4, atol=1e-5)


def test_exemplar_prior_integrates_to_one():
    grid = np.linspace(-15, 15, 201)
    z = np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2).astype(np.float32)
    means = np.random.default_rng(0).normal(scale=2, size=(9, 2)).astype(np.float32)
    log_pz = jax.jit(lambda z: parzen.exemplar_log_prob(z, means, jnp.float32(0.5), count=9.0))(z)
    assert np.exp(np.asarray(log_pz, np.float64)).sum() * 0.15**2 == pytest.approx(1.0, abs=1e-5)


def test_exemplar_prior_far_from_everything_is_finite():
    z, means = np.array([[300.0] * 3, [20.0] * 3], np.float32), np.zeros((5, 3), np.float32)
    values, grads = compiled({"count": 5.0})(z, means, np.float32(-2.0), np.ones(2, np.float32))
    want = stats.norm.logpdf(z.astype(np.float64), 0.0, math.exp(-1.0)).sum(-1)
    np.testing.assert_allclose(values, want, rtol=1e-6)
    # Responsibilities are exp(exponent - log_sum): their error is the float32 rounding of exponents -1e6 and -4e3.
    np.testing.assert_allclose(grads[0][0], -z[0] * math.exp(2.0), rtol=0.1)
    np.testing.assert_allclose(grads[0][1], -z[1] * math.exp(2.0), rtol=1e-3)


@pytest.mark.parametrize("block", [3, 2048])
def test_leave_one_out_excludes_only_the_own_exemplar(monkeypatch, block):
    monkeypatch.setattr(parzen, "BLOCK", block)
    rng = np.random.default_rng(9)
    z, means, _ = data(rng, 8, 8, 3)
    own = rng.permutation(8)

    @jax.jit
    def run(means):
        return parzen.exemplar_log_prob(z, means, jnp.float32(0.0), count=7.0, leave_out=jnp.asarray(own))

    before = np.asarray(run(means))
    for j in range(8):
        moved = means.copy()
        moved[j] += 1.0
        same = np.asarray(run(moved)) == before
        np.testing.assert_array_equal(same, own == j)


def test_leave_one_out_compares_indices_not_values_or_slots():
    # Exemplars 40 and 41 are the same point, in slots 1 and 0. The row that leaves out 41 still counts 40.
    z, means = jnp.zeros((2, 2)), np.array([[1, 1], [1, 1], [5, 5]], np.float32)
    index, leave_out = jnp.array([41, 40, NOBODY]), jnp.array([41, 0])
    run = jax.jit(
        lambda z: parzen.exemplar_log_prob(
            z, means, jnp.float32(0.0), count=1.0, exemplar_index=index, leave_out=leave_out
        )
    )
    got = run(z)
    one = stats.norm.logpdf([1.0, 1.0]).sum()
    np.testing.assert_allclose(got, [one, one + math.log(2)], rtol=1e-6)


@pytest.mark.parametrize("block", [2, 2048])
def test_rows_without_exemplars_are_minus_infinity_with_zero_gradient(monkeypatch, block):
    monkeypatch.setattr(parzen, "BLOCK", block)
    rng = np.random.default_rng(10)
    z, means, weights = data(rng, 4, 5, 3)
    index = np.array([7, NOBODY, 8, NOBODY, NOBODY])
    leave_out = np.array([0, 7, 8, 0])
    neighbours = np.array([[7, 8], [7, NOBODY], [7, NOBODY], [NOBODY, 9]])
    arguments = {"count": 2.0, "exemplar_index": index, "leave_out": leave_out, "neighbours": neighbours}
    values, grads = compiled(arguments)(z, means, np.float32(-0.2), weights)
    seen = np.zeros((4, 5), bool)
    seen[0, [0, 2]] = seen[2, 0] = True
    blind = np.array([False, True, False, True])
    np.testing.assert_array_equal(np.isneginf(values), blind)
    want, wanted = dense(z[~blind], means, -0.2, weights[~blind], seen[~blind], 2.0)
    np.testing.assert_allclose(values[~blind], want, rtol=1e-5)
    np.testing.assert_array_equal(grads[0][blind], 0.0)
    np.testing.assert_allclose(grads[0][~blind], wanted[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(grads[1], wanted[1], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(grads[1])[index == NOBODY], 0.0)
    # A row without exemplars still has the normalising constant, with gradient -D/2 in log sigma^2.
    np.testing.assert_allclose(grads[2], wanted[2] - 1.5 * weights[blind].sum(), rtol=1e-4)


@pytest.mark.parametrize("own", [False, True])
def test_exemplar_prior_does_not_store_the_distance_matrix(own):
    batch, n, dim = 32, 100_000, 4

    def loss(z, means, log_var, index, leave_out, neighbours):
        out = parzen.exemplar_log_prob(
            z, means, log_var, count=1.0 * n, exemplar_index=index, leave_out=leave_out, neighbours=neighbours
        )
        return out.sum()

    floats, ints = (lambda *s, t=t: jax.ShapeDtypeStruct(s, t) for t in (jnp.float32, jnp.int32))
    arguments = (floats(batch, dim), floats(n, dim), floats(), ints(n), ints(batch), ints(batch, 10) if own else None)
    memory = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < batch * n * 4 / 2


def test_gaussian_prior_equals_scipy():
    z = np.random.default_rng(0).normal(scale=4, size=(7, 5)).astype(np.float32)
    want = stats.multivariate_normal(np.zeros(5), np.eye(5)).logpdf(z.astype(np.float64))
    np.testing.assert_allclose(gaussian.gaussian_log_prob(z), want, rtol=1e-6)


def vamp_brute(z, mean, log_var):
    parts = [stats.multivariate_normal(m, np.diag(np.exp(v))).logpdf(z) for m, v in zip(mean, log_var, strict=True)]
    return special.logsumexp(parts, axis=0) - math.log(len(mean))


def test_vamp_prior_value_and_gradients_equal_scipy():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(4, 3)).astype(np.float32)
    mean = rng.normal(size=(6, 3)).astype(np.float32)
    log_var = rng.uniform(-3, 2, size=(6, 3)).astype(np.float32)
    weights = rng.uniform(0.5, 1.5, 4).astype(np.float32)

    @jax.jit
    def run(z, mean, log_var):
        values, pull = jax.vjp(lambda z, m, v: vamp.vamp_log_prob(z, Normal(m, v)), z, mean, log_var)
        return values, pull(weights)

    values, grads = run(z, mean, log_var)
    z, mean, log_var = (a.astype(np.float64) for a in (z, mean, log_var))
    np.testing.assert_allclose(values, vamp_brute(z, mean, log_var), rtol=1e-5)
    wanted = (
        differences(lambda a: weights @ vamp_brute(a, mean, log_var), z),
        differences(lambda a: weights @ vamp_brute(z, a, log_var), mean),
        differences(lambda a: weights @ vamp_brute(z, mean, a), log_var),
    )
    for got, expected in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)


def test_vamp_prior_with_one_variance_equals_the_exemplar_prior():
    rng = np.random.default_rng(2)
    z, mean, _ = data(rng, 4, 6, 3)
    got = jax.jit(vamp.vamp_log_prob)(z, Normal(mean, np.full_like(mean, -0.9)))
    want = jax.jit(lambda z: parzen.exemplar_log_prob(z, mean, jnp.float32(-0.9), count=6.0))(z)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_parameters_start_as_in_the_reference():
    config = get_config()
    draw = jax.vmap(lambda key: exemplar.init(key, config.prior, (8, 8, 1))["log_var"])
    log_vars = np.asarray(jax.jit(draw)(jax.random.split(jax.random.key(0), 2000)))
    assert abs(log_vars.mean()) < 4.5 / np.sqrt(2000) and abs(log_vars.std() - 1) < 4.5 / np.sqrt(4000)
    config.prior.num_pseudo_inputs = 50
    pseudo = np.asarray(vamp.init(jax.random.key(1), config.prior, (8, 8, 1))["pseudo_inputs"])
    assert pseudo.shape == (50, 8, 8, 1)
    assert pseudo.mean() == pytest.approx(0.05, abs=1e-3) and pseudo.std() == pytest.approx(0.01, rel=0.1)
    assert gaussian.init(jax.random.key(1), config.prior, (8, 8, 1)) == {}
