"""The dense architectures have the sizes of the paper's supplement and equal a forward pass in NumPy (float64)."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from exvae import models
from exvae.config import get_config
from exvae.models.layers import GatedDense

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


def build(architecture, image_shape=(28, 28, 1), **fields):
    config = get_config().model
    config.architecture = architecture
    config.update(fields)
    return models.build(config, image_shape)


def random_params(model, seed=0):
    """Parameters with the scale of initialised ones, without compiling the initialisation."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    draw = lambda s: (rng.normal(size=s.shape) * math.sqrt(2 / s.shape[0])).astype(np.float32)  # noqa: E731
    return jax.tree.map(draw, shapes)


def layer_sizes(architecture, pixels, dim, lower, hidden):
    """(inputs, outputs, copies) of every matrix. Gated layers and normal heads have two copies."""
    if architecture == "vae":
        return [
            (pixels, hidden, 2), (hidden, hidden, 2), (hidden, dim, 2),  # q(z|x)
            (dim, hidden, 2), (hidden, hidden, 2), (hidden, pixels, 1),  # p(x|z)
        ]  # fmt: skip
    return [
        (pixels, hidden, 2), (hidden, hidden, 2), (hidden, dim, 2),  # q(z2|x)
        (pixels, hidden, 2), (dim, hidden, 2), (2 * hidden, hidden, 2), (hidden, lower, 2),  # q(z1|x,z2)
        (dim, hidden, 2), (hidden, hidden, 2), (hidden, lower, 2),  # p(z1|z2)
        (lower, hidden, 2), (dim, hidden, 2), (2 * hidden, hidden, 2), (hidden, pixels, 1),  # p(x|z1,z2)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "architecture, image_shape, dim, lower, hidden",
    [
        ("vae", (28, 28, 1), 40, 0, 300),
        ("hvae", (28, 28, 1), 40, 0, 300),
        ("hvae", (28, 28, 1), 24, 7, 50),
        ("vae", (5, 9, 3), 3, 0, 11),
        ("hvae", (5, 9, 3), 3, 4, 11),
    ],
)
def test_parameters_are_those_of_the_paper(architecture, image_shape, dim, lower, hidden):
    model = build(architecture, image_shape, latent_dim=dim, lower_latent_dim=lower, hidden_dim=hidden)
    params = jax.eval_shape(lambda key: models.init(key, model)[0], jax.random.key(0))
    want = collections.Counter()
    for inputs, outputs, copies in layer_sizes(architecture, math.prod(image_shape), dim, lower or dim, hidden):
        want[inputs, outputs] += copies
        want[outputs,] += copies
    assert collections.Counter(leaf.shape for leaf in jax.tree.leaves(params)) == want


def test_number_of_parameters_equals_the_formula():
    counts = {}
    for name in ("vae", "hvae"):
        shapes = jax.eval_shape(lambda key, name=name: models.init(key, build(name))[0], jax.random.key(0))
        counts[name] = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    gated = lambda i, o: 2 * (i * o + o)  # noqa: E731
    vae = gated(784, 300) + 2 * gated(300, 300) + gated(300, 40) + gated(40, 300) + 300 * 784 + 784
    hvae = 2 * gated(784, 300) + 2 * gated(300, 300) + 3 * gated(300, 40) + 4 * gated(40, 300) + 2 * gated(600, 300)
    assert counts == {"vae": vae, "hvae": hvae + 300 * 784 + 784}
    assert counts["vae"] == 1_116_864


def test_init_has_the_reference_distribution():
    model = build("vae")  # hvae consists of the same layers
    params = jax.jit(lambda key: models.init(key, model)[0], compiler_options=QUICKLY)(jax.random.key(0))
    values = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        leaf = np.asarray(leaf, np.float64)
        values.append(leaf.ravel()[:20])
        if path[-1].key != "kernel":
            continue
        fan_in, bias = leaf.shape[0], params
        for entry in path[:-1]:
            bias = bias[entry.key]
        bias = np.asarray(bias["bias"], np.float64)
        std = math.sqrt(2 / fan_in)
        assert abs(leaf.std() / std - 1) < 5 / math.sqrt(2 * leaf.size)
        assert abs(leaf.mean()) < 5 * std / math.sqrt(leaf.size)
        assert np.abs(leaf).max() > 3 * std  # not truncated
        bound = 1 / math.sqrt(fan_in)
        assert bias.shape == leaf.shape[1:]
        assert np.abs(bias).max() <= bound
        assert stats.kstest(bias / bound, "uniform", (-1, 2)).pvalue > 1e-4
    assert len(np.unique(np.stack(values), axis=0)) == len(values)  # every tensor has its own random numbers


# A forward pass in NumPy.


def dense(p, h):
    return h @ np.asarray(p["kernel"], np.float64) + np.asarray(p["bias"], np.float64)


def gated(p, h):
    return dense(p["linear"], h) * special.expit(dense(p["gate"], h))


def sequence(p, h):
    for name in sorted(p, key=lambda name: int(name.split("_")[-1])):
        h = gated(p[name], h) if "linear" in p[name] else dense(p[name], h)
    return h


def head(p, h):
    return dense(p["mean"], h), np.minimum(np.maximum(dense(p["log_var"], h), -6.0), 2.0)


def log_normal(z, mean, log_var):
    return stats.norm.logpdf(z, mean, np.exp(0.5 * log_var)).sum(-1)


def log_bernoulli(x, logits):
    return (x * special.log_expit(logits) + (1 - x) * special.log_expit(-logits)).sum(-1)


SHAPE, DIM, LOWER = (4, 3, 2), 3, 5


@pytest.fixture(scope="module", params=["vae", "hvae"])
def small(request):
    """A small model and all its public outputs for one batch."""
    model = build(request.param, SHAPE, latent_dim=DIM, lower_latent_dim=LOWER, hidden_dim=7)
    params = random_params(model)
    # With large weights, some log-variances are clipped at either end, and some lie inside the range.
    wide = jax.tree_util.tree_map_with_path(lambda path, a: a * 20.0 if path[-2].key == "log_var" else a, params)
    x = np.random.default_rng(0).integers(0, 2, (64, *SHAPE)).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def outputs(params, key, x):
        apply = lambda *a, method: model.apply({"params": params}, *a, method=method)  # noqa: E731
        terms = apply(key, x, method="terms")
        out = {"terms": terms, "encode": apply(x, method="encode"), "decode": apply(key, terms.z, method="decode")}
        if request.param == "vae":
            return {**out, "logits": apply(terms.z, method="logits")}
        key_z1 = jax.random.split(key)[1]
        z1_noise = jax.random.normal(key_z1, (len(x), LOWER))
        prior_noise = jax.random.normal(jax.random.split(key)[0], (len(x), LOWER))
        features = apply(x, method="observe").features
        q_z1, p_z1 = apply(features, terms.z, method="posterior_z1"), apply(terms.z, method="prior_z1")
        z1 = q_z1.mean + jnp.exp(0.5 * q_z1.log_var) * z1_noise
        drawn = p_z1.mean + jnp.exp(0.5 * p_z1.log_var) * prior_noise
        logits = apply(terms.z, z1, method="logits")
        return {**out, "q_z1": q_z1, "p_z1": p_z1, "z1": z1, "logits": logits, "drawn": drawn}

    out = jax.tree.map(lambda a: np.asarray(a, np.float64), outputs(wide, jax.random.key(5), x))
    return request.param, wide, x.reshape(64, -1).astype(np.float64), out


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_networks_equal_a_forward_pass_in_numpy(small):
    name, p, x, out = small
    z = out["terms"].z
    if name == "vae":
        close(out["encode"], head(p["q_z"], sequence(p["encoder"], x)))
        close(out["logits"].reshape(64, -1), sequence(p["decoder"], z))
        close(out["decode"].reshape(64, -1), special.expit(sequence(p["decoder"], z)))
        return
    close(out["encode"], head(p["q_z2"], sequence(p["z2_from_x"], x)))
    joint = np.concatenate([gated(p["z1_from_x"], x), gated(p["z1_from_z2"], z)], 1)
    close(out["q_z1"], head(p["q_z1"], gated(p["q_z1_joint"], joint)))
    close(out["p_z1"], head(p["p_z1"], sequence(p["p_z1_body"], z)))
    joint = np.concatenate([gated(p["p_x_z1"], out["z1"]), gated(p["p_x_z2"], z)], 1)
    close(out["logits"].reshape(64, -1), sequence(p["p_x"], joint))
    joint = np.concatenate([gated(p["p_x_z1"], out["drawn"]), gated(p["p_x_z2"], z)], 1)  # z1 ~ p(z1|z2)
    close(out["decode"].reshape(64, -1), special.expit(sequence(p["p_x"], joint)))


def test_terms_equal_densities_recomputed_by_scipy(small):
    name, _, x, out = small
    terms = out["terms"]
    close(terms.q, out["encode"])
    close(terms.log_q, log_normal(terms.z, *out["encode"]))
    close(terms.log_px, log_bernoulli(x, out["logits"].reshape(64, -1)))
    if name == "vae":
        assert terms.log_ratio == 0.0
    else:
        want = log_normal(out["z1"], *out["p_z1"]) - log_normal(out["z1"], *out["q_z1"])
        close(terms.log_ratio, want)


def test_samples_come_from_the_posterior(small):
    _, _, _, out = small
    noise = (out["terms"].z - out["encode"].mean) / np.exp(0.5 * out["encode"].log_var)
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-3


def test_log_variances_are_clipped(small):
    _, _, _, out = small
    for name in ("encode", "q_z1", "p_z1"):
        if name in out:
            log_var = out[name].log_var
            assert log_var.min() == -6.0 and log_var.max() == 2.0
            assert np.any((log_var > -6.0) & (log_var < 2.0))


def test_decode_gives_probabilities_in_the_shape_of_images(small):
    _, _, _, out = small
    assert out["decode"].shape == (64, *SHAPE)
    assert out["decode"].min() >= 0.0 and out["decode"].max() <= 1.0
    assert out["decode"].std() > 0.05


def test_gated_dense_of_two_inputs_equals_joined_inputs():
    """Values and gradients are equal. Each row of the first input belongs to three rows of the second."""
    rng = np.random.default_rng(0)
    few, many = rng.normal(size=(4, 5)).astype(np.float32), rng.normal(size=(12, 2)).astype(np.float32)
    layer = GatedDense(6)
    params = jax.jit(layer.init)(jax.random.key(0), few, many)
    assert params["params"]["gate"]["kernel"].shape == (7, 6)

    def apart(params, few, many):
        return layer.apply(params, few, many)

    def joined(params, few, many):
        return layer.apply(params, jnp.concatenate([jnp.repeat(few, 3, axis=0), many], axis=1))

    weights = rng.normal(size=(12, 6)).astype(np.float32)

    def run(function):
        weighted = lambda *args: (jnp.sum(weights * (out := function(*args))), out)  # noqa: E731
        return jax.jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(params, few, many)

    (((_, ours), our_grads), ((_, want), want_grads)) = run(apart), run(joined)
    np.testing.assert_allclose(ours, want, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), our_grads, want_grads)
