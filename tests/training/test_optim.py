"""The optimizer and the schedules, compared with hand-written loops in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from exvae import objectives
from exvae.config import get_config
from exvae.training import optim

SHAPES = {"kernel": (7, 4), "bias": (4,), "huge": (3, 2), "tiny": (5,), "zero": (2, 2), "late": (3,), "scalar": ()}


def gradients(rng, step):
    """Gradients of very different sizes. One is always zero, another one only at first."""
    grads = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
    grads["huge"] *= np.float32(1e8)
    grads["tiny"] *= np.float32(1e-8)  # about as large as the 1e-7 that is added to the norm
    grads["zero"] *= 0
    grads["late"] *= step >= 5
    return grads


@pytest.mark.parametrize("normalise", [True, False])
def test_optimizer_equals_a_hand_written_adam(normalise):
    config = get_config()
    config.optim.normalise_gradients = normalise
    assert config.optim.learning_rate == 5e-4 and config.optim.schedule == "constant"  # the paper's
    optimizer = optim.optimizer(config, 20)
    rng = np.random.default_rng(0)
    params = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    start = {name: np.asarray(value) for name, value in params.items()}
    want = {name: value.astype(np.float64) for name, value in start.items()}
    m, v = ({name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))

    @jax.jit
    def step(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for t in range(1, 21):
        grads = gradients(rng, t)
        params, state = step(params, state, grads)
        for name, g in grads.items():
            g = np.asarray(g, np.float64)
            if normalise:
                g = g / (math.sqrt(sum(x * x for x in g.ravel())) + 1e-7)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            m_hat, v_hat = m[name] / (1 - 0.9**t), v[name] / (1 - 0.999**t)
            want[name] -= 5e-4 * m_hat / (np.sqrt(v_hat) + 1e-8)
    for name, value in params.items():
        moved, expected = np.asarray(value, np.float64) - start[name], want[name] - start[name]
        np.testing.assert_allclose(moved, expected, rtol=2e-3, atol=3e-6, err_msg=name)
    np.testing.assert_array_equal(params["zero"], start["zero"])


def test_normalised_gradients_have_unit_norm_each():
    transform = optim.normalise_gradients()
    grads = gradients(np.random.default_rng(1), 0)
    got = jax.jit(lambda grads: transform.update(grads, transform.init(grads))[0])(grads)
    for name in ("kernel", "bias", "huge", "scalar"):
        assert np.linalg.norm(got[name]) == pytest.approx(1.0, rel=1e-5)
        np.testing.assert_allclose(got[name], grads[name] / np.linalg.norm(grads[name]), rtol=1e-5)
    norm = np.linalg.norm(grads["tiny"].astype(np.float64))
    np.testing.assert_allclose(got["tiny"], grads["tiny"] / (norm + 1e-7), rtol=1e-5)
    np.testing.assert_array_equal(got["zero"], 0.0)


def test_constant_rate_does_not_change():
    rate = optim.learning_rate(get_config().optim, 1000)
    assert [float(rate(step)) for step in (0, 1, 500, 10**6)] == pytest.approx([5e-4] * 4)


@pytest.mark.parametrize("total, rise", [(5000, 1000), (600, 300)])  # a rise longer than half the run is cut
def test_cosine_rate_rises_and_falls_to_the_floor(total, rise):
    config = get_config().optim
    config.schedule, config.learning_rate, config.rise_steps, config.floor = "cosine", 1e-3, 1000, 0.02
    rate = optim.learning_rate(config, total)
    for step in (0, 1, rise // 2, rise, rise + 1, (rise + total) // 2, total - 1, total, 2 * total):
        if step < rise:
            want = 1e-3 * step / rise
        else:
            done = min(1.0, (step - rise) / (total - rise))
            want = 1e-3 * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
        assert float(rate(step)) == pytest.approx(want, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize(
    "warmup, want", [(100, {1: 0.01, 2: 0.02, 50: 0.5, 100: 1.0, 101: 1.0}), (0, {1: 1.0, 2: 1.0}), (1, {1: 1.0})]
)
def test_kl_weight_rises_by_epochs(warmup, want):
    per_epoch = 7
    for epoch, beta in want.items():
        for step in (per_epoch * (epoch - 1), per_epoch * epoch - 1):  # first and last step of the epoch
            assert float(objectives.kl_weight(jnp.int32(step), per_epoch, warmup)) == pytest.approx(beta)


def test_weight_decay_shrinks_only_the_networks_matrices():
    """If the gradient is zero, a step with rate r multiplies them by 1 - r * decay."""
    config = get_config()
    config.optim.weight_decay, config.optim.learning_rate = 0.3, 0.1
    network = {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}
    params = {"model": network, "prior": {"log_var": jnp.ones(()), "pseudo_inputs": jnp.ones((2, 2, 2, 1))}}
    optimizer = optim.optimizer(config, 10)

    @jax.jit
    def step(params):
        updates, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
        return optax.apply_updates(params, updates)

    new = step(params)
    np.testing.assert_allclose(new["model"]["kernel"], 0.97, rtol=1e-6)
    for value in (new["model"]["bias"], *new["prior"].values()):
        np.testing.assert_array_equal(value, 1.0)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_average_equals_a_hand_written_loop(decay):
    rng = np.random.default_rng(0)
    update = jax.jit(optim.update_average, static_argnames="decay")
    average = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}
    want = {name: np.asarray(value, np.float64) for name, value in average.items()}
    for t in range(1, 171):
        params = {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}
        average = update(average, params, jnp.int32(t), decay=decay)
        n = t // 8
        d = min(decay**8, n / (n + 9)) if n and t % 8 == 0 else float(n > 0)
        for name, value in params.items():
            want[name] = d * want[name] + (1 - d) * value.astype(np.float64)
            np.testing.assert_allclose(average[name], want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} {t}")
