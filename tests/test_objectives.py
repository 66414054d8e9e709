"""Algorithm 1: its ELBO (recomputed in NumPy from the model's outputs), its bounds, its gradient and its table."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from scipy import special

from exvae import keys, models
from exvae.algorithm import Batch, Problem, algorithm_1
from exvae.config import get_config
from exvae.distributions import binarize, to_unit
from exvae.retrieval import slots
from exvae.retrieval.draw import draw_exemplars
from exvae.scale import sharding
from exvae.state import TrainState, learned

SHAPE, DIM = (3, 3, 1), 2
N, M, B, C = 24, 10, 6, 18
NEIGHBOURS = (1, M)
MESH = sharding.make_mesh()
QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower

pytestmark = pytest.mark.xdist_group("objectives")  # one process compiles for all these tests


def make_config(*, prior="exemplar", search="none", k=3, scored="union", m=M, leave_one_out=True):
    config = get_config()
    config.model.latent_dim, config.model.hidden_dim = DIM, 8
    config.prior.name, config.prior.num_exemplars, config.prior.leave_one_out = prior, m, leave_one_out
    config.prior.num_pseudo_inputs = 5
    config.retrieval.search, config.retrieval.num_neighbours, config.retrieval.scored = search, k, scored
    return config


def all_configs():
    """The settings that are compared, by name."""
    configs = {
        "o1": make_config(m=N),
        "no_regularizer": make_config(m=N, leave_one_out=False),
        "two_of_all": make_config(m=N, search="exact", k=2),
        "all_of_all": make_config(m=N, search="exact", k=N),
        "scann_own": make_config(search="scann", scored="own"),
        "scann_union": make_config(search="scann"),
    }
    for loo, neighbours in ((True, NEIGHBOURS), (False, NEIGHBOURS[:1])):
        configs[f"none_0_{loo}"] = make_config(leave_one_out=loo)
        for scored, k in itertools.product(("own", "union"), neighbours):
            configs[f"{scored}_{k}_{loo}"] = make_config(search="exact", k=k, scored=scored, leave_one_out=loo)
    return configs


CONFIGS = all_configs()


def draw_of(key, m):
    return draw_exemplars(np.asarray(jax.random.key_data(key)), 0, N, m)


def step_keys(key):
    """The keys of the pixels, of z and of dropout in the first step of a run with this key."""
    return jax.random.split(keys.stream(key, keys.TRAIN, 0), 3)


class Lookup:
    """An index that always returns the same candidates."""

    def __init__(self, candidates):
        self.candidates = candidates

    def search(self, index):
        return self.candidates


class World:
    """A small model, a training set with two equal images, and an outdated table of means."""

    def __init__(self):
        self.rng = rng = np.random.default_rng(0)
        self.model = models.build(make_config().model, SHAPE)
        shapes = jax.eval_shape(lambda key: models.init(key, self.model)[0], jax.random.key(0))
        network = jax.tree.map(lambda s: rng.normal(scale=1.5 * s.shape[0] ** -0.5, size=s.shape), shapes)
        prior = {"log_var": np.float64(-0.5), "pseudo_inputs": rng.uniform(-0.5, 1.5, (5, *SHAPE))}
        self.params = jax.tree.map(jnp.float32, {"model": network, "prior": prior})
        images = rng.integers(0, 256, (N, *SHAPE), dtype=np.uint8)
        images[1] = images[0]
        self.images = jnp.asarray(images)
        self.means = np.asarray(self.encode(self.images.astype(jnp.float32) / 255)[0], np.float64)
        self.table = jnp.asarray(self.means + 0.2 * rng.normal(size=self.means.shape), jnp.float32)
        self.sigma_square = float(np.exp(np.float32(-0.5)))

    def apply(self, *arguments, method):
        return self.model.apply({"params": self.params["model"]}, *arguments, method=method)

    def encode(self, x):
        return jax.jit(lambda x: self.apply(x, method="encode"))(x)

    def step(self, key, config, batch, table, params=None):
        """The first step of a run: algorithm_1 with an optimizer that returns the gradient itself."""
        params, optimizer = self.params if params is None else params, optax.identity()
        state = TrainState(
            step=jnp.int32(0),
            params=params,
            average=None,
            opt_state=optimizer.init(learned(params)),
            key=jax.random.key_data(key),
            table=None if config.retrieval.search == "none" else table,
            indexed=None,
            sums={},
            stopping=None,
        )
        return algorithm_1(Problem(config, self.model, MESH, optimizer, N, 1), state, batch)

    @functools.cached_property
    def _training(self):
        """All settings in one compilation. The same key and parameters give the same draw and the same z."""

        def run(key, batches, table):
            steps = {name: self.step(key, config, batches[name], table) for name, config in CONFIGS.items()}
            return {name: (info.elbo, info.exemplars, state.table) for name, (state, info) in steps.items()}

        return jax.jit(run, compiler_options=QUICKLY)

    def train(self, key, index, *, table=None, candidates=None):
        """{name: (Elbo, Exemplars, new table)} for every setting of CONFIGS."""
        candidates = np.zeros((B, C), np.int32) if candidates is None else candidates
        batches = {name: self.batch(key, config, index, candidates) for name, config in CONFIGS.items()}
        return jax.device_get(self._training(key, batches, self.table if table is None else jnp.asarray(table)))

    def batch(self, key, config, index, candidates=None):
        """The batch that the host passes to a step."""
        lookup = Lookup(candidates) if config.retrieval.search == "scann" else None
        chosen = slots.choose_on_host(config, draw_of(key, config.prior.num_exemplars), index, lookup)
        return Batch(jnp.asarray(index), chosen, store=self.images)

    def sample(self, key, index, m):
        """z, log q(z|x), log p(x|z), mu(x) and the drawn set, from the outputs of `encode` and `logits`."""
        outputs = self._outputs(key, jnp.asarray(index))
        x, z, mean, log_var, logits = (np.asarray(a, np.float64) for a in outputs)
        drawn = draw_of(key, m).contains(np.arange(N))
        log_q = -0.5 * (np.log(2 * np.pi) + log_var + (z - mean) ** 2 / np.exp(log_var)).sum(-1)
        signs = np.where(x == 1, 1.0, -1.0).reshape(len(x), -1)
        log_px = special.log_expit(signs * logits.reshape(len(x), -1)).sum(-1)
        return z, log_q, log_px, mean, set(np.flatnonzero(drawn))

    @functools.cached_property
    def _outputs(self):
        def outputs(key, index):
            key_x, key_z, _ = step_keys(key)
            x = binarize(key_x, self.images[index])
            q = self.apply(x, method="encode")
            z = q.mean + jnp.exp(0.5 * q.log_var) * jax.random.normal(key_z, q.mean.shape)
            return x, z, q.mean, q.log_var, self.apply(z, method="logits")

        return jax.jit(outputs, compiler_options=QUICKLY)

    def log_pz(self, z, seen, count):
        """log 1/count sum over the set `seen` of N(z | mu_j, sigma^2 I)."""
        squares = ((z - self.means[sorted(seen)]) ** 2).sum(-1)
        return (
            special.logsumexp(-0.5 * squares / self.sigma_square)
            - np.log(count)
            - 0.5 * DIM * np.log(2 * np.pi * self.sigma_square)
        )

    def nearest(self, mean, k, allowed):
        table = np.asarray(self.table, np.float64)
        return set(sorted(allowed, key=lambda j: ((table[j] - mean) ** 2).sum())[:k])


@pytest.fixture(scope="module")
def world():
    return World()


@pytest.fixture(scope="module", params=[True, False], ids=["leave_one_out", "all_in"])
def trained(request, world):
    """The results of six batches, for all settings with M exemplars drawn."""
    loo = request.param
    runs = []
    for seed in range(6):
        key, index = jax.random.key(seed), np.random.default_rng(seed).permutation(N)[:B]
        out = world.train(key, index)
        suffix = f"_{loo}"
        runs.append((key, index, {name.removesuffix(suffix): v for name, v in out.items() if name.endswith(suffix)}))
    assert len(out) == len(CONFIGS) and len(runs[0][2]) == (5 if loo else 3)
    return loo, runs


def test_training_elbo_equals_the_sum_over_the_right_exemplars(world, trained):
    loo, runs = trained
    in_draw = 0
    for key, index, out in runs:
        z, log_q, log_px, mean, drawn = world.sample(key, index, M)
        assert len(drawn) == M
        others = [drawn - {i} if loo else drawn for i in index]
        for name, (elbo, *_) in out.items():
            scored, k = name.split("_")
            own = [world.nearest(mean[b], int(k), others[b]) for b in range(B)]
            union = set().union(*own)
            for b, i in enumerate(index):
                seen = {"none": others[b], "own": own[b], "union": union - {i} if loo else union}[scored]
                count = M - 1 if loo and i in drawn else M
                in_draw += i in drawn
                want = log_q[b] - world.log_pz(z[b], seen, count)
                np.testing.assert_allclose(elbo.kl[b], want, rtol=2e-4, atol=2e-4, err_msg=f"{name} {b}")
                np.testing.assert_allclose(elbo.reconstruction[b], log_px[b], rtol=2e-4)
                np.testing.assert_allclose(elbo.elbo[b], log_px[b] - want, rtol=2e-4, atol=2e-4)
    assert 0 < in_draw < len(runs) * len(out) * B  # some images are in the draw and some are not


def test_truncation_to_neighbours_is_a_lower_bound(trained):
    loo, runs = trained
    neighbours, gaps = NEIGHBOURS if loo else NEIGHBOURS[:1], []
    for _, _, out in runs:
        exact = out["none_0"][0].elbo
        for k in neighbours:
            own, union = out[f"own_{k}"][0].elbo, out[f"union_{k}"][0].elbo
            assert np.all(own <= union + 1e-5) and np.all(union <= exact + 1e-5)
            np.testing.assert_array_equal(out[f"own_{k}"][0].reconstruction, out["none_0"][0].reconstruction)
            gaps.append((k, np.mean(union - own), np.mean(exact - union)))
    smallest = [gap[1:] for gap in gaps if gap[0] == neighbours[0]]
    assert (np.min if loo else np.max)(smallest) > 1e-4  # the bounds are not trivially equal


def test_more_neighbours_tighten_the_bound_up_to_equality(trained):
    loo, runs = trained
    for _, _, out in runs:
        exact = out["none_0"][0].elbo
        for scored in ("own", "union"):
            few = out[f"{scored}_{NEIGHBOURS[0]}"][0].elbo
            assert np.any(few < exact - 1e-4) and np.all(few <= exact + 1e-5)
            if loo:  # K = M is computed with leave-one-out only
                np.testing.assert_allclose(out[f"{scored}_{M}"][0].elbo, exact, rtol=1e-5)


def test_table_gets_the_means_of_the_batch_and_then_of_the_exemplars(world, trained):
    loo, runs = trained
    for key, index, out in runs:
        _, _, _, mean, drawn = world.sample(key, index, M)
        for name, (_, exemplars, table) in out.items():
            held = exemplars.index[exemplars.index >= 0]
            assert len(set(held)) == len(held)
            scored, k = name.split("_")
            want = drawn
            if scored != "none":
                others = [drawn - {i} if loo else drawn for i in index]
                want = set().union(*(world.nearest(mean[b], int(k), others[b]) for b in range(B)))
            assert set(held) == want
            got = exemplars.means[exemplars.index >= 0]
            np.testing.assert_allclose(got, world.means[held], rtol=1e-4, atol=1e-5)  # of images that are not binarized
            if scored == "none":
                assert table is None
                continue
            rows = np.array(world.table, np.float64)
            rows[index] = mean  # of the binarized images
            rows[held] = world.means[held]
            np.testing.assert_allclose(table, rows, rtol=1e-4, atol=1e-5)
    assert any(set(index) & set(out["union_1"][1].index) for _, index, out in runs)  # some rows were written twice


def test_leaving_one_out_of_all_divides_by_the_others(world):
    """Objective O1 (M = N, Eq. (10)), and the same without leave-one-out and with two neighbours only."""
    key, index = jax.random.key(11), np.array([0, 1, 5, 9, 20, 23])
    out = {name: elbo for name, (elbo, *_) in world.train(key, index).items()}
    z, log_q, log_px, mean, drawn = world.sample(key, index, N)
    assert len(drawn) == N
    everyone = set(range(N))
    for b, i in enumerate(index):
        o1 = world.log_pz(z[b], everyone - {i}, N - 1)
        no_loo = world.log_pz(z[b], everyone, N)
        union = set().union(*(world.nearest(mean[c], 2, everyone - {j}) for c, j in enumerate(index)))
        rat = world.log_pz(z[b], union - {i}, N - 1)
        for name, log_pz in (("o1", o1), ("no_regularizer", no_loo), ("two_of_all", rat)):
            np.testing.assert_allclose(out[name].elbo[b], log_px[b] - log_q[b] + log_pz, rtol=2e-4, atol=2e-4)
    elbos = np.stack([out[name].elbo for name in ("o1", "no_regularizer", "two_of_all", "none_0_True")])
    assert np.abs(elbos[:, None] - elbos[None]).max(-1)[np.triu_indices(4, 1)].min() > 1e-3  # all four numbers differ


def test_shared_neighbours_count_once(world):
    # In this table, three exemplars are nearest to all images.
    table = np.full((N, DIM), 50.0, np.float32)
    table[[2, 7, 21]] = 0.0
    index = np.array([2, 3, 7, 8, 9, 10])
    key = jax.random.key(4)
    elbo, exemplars, _ = world.train(key, index, table=table)["two_of_all"]
    held = set(exemplars.index) - {-1}
    assert held <= {2, 7, 21} and len(held) >= 2
    z, log_q, log_px, _, _ = world.sample(key, index, N)
    want = [log_px[b] - log_q[b] + world.log_pz(z[b], held - {i}, N - 1) for b, i in enumerate(index)]
    np.testing.assert_allclose(elbo.elbo, want, rtol=2e-4, atol=2e-4)


def test_candidates_from_the_host_are_cut_to_the_draw(world):
    index = np.array([0, 4, 8, 12, 16, 23])
    squares = ((world.means[index][:, None] - world.means[None]) ** 2).sum(-1)
    candidates = np.argsort(squares, axis=1)[:, :C].astype(np.int32)  # including the image itself
    key = jax.random.key(6)
    z, log_q, log_px, _, drawn = world.sample(key, index, M)
    own = [[c for c in row if c in drawn and c != i][:3] for row, i in zip(candidates, index, strict=True)]
    union = set().union(*own)
    out = world.train(key, index, candidates=candidates)
    for scored in ("own", "union"):
        elbo, *_ = out[f"scann_{scored}"]
        for b, i in enumerate(index):
            seen = set(own[b]) if scored == "own" else union - {i}
            want = log_px[b] - log_q[b] + world.log_pz(z[b], seen, M - (i in drawn))
            np.testing.assert_allclose(elbo.elbo[b], want, rtol=2e-4, atol=2e-4)


def test_gradient_flows_through_exemplar_means_and_sigma(world):
    key, index = jax.random.key(2), np.array([3, 5, 0, 1, 17, 22])
    _, _, _, _, drawn = world.sample(key, index, M)
    drawn = np.array(sorted(drawn))
    count = M - np.isin(index, drawn)

    def dense(params, stop=False):
        """The same objective as one dense expression, differentiated by JAX."""
        key_x, key_z, _ = step_keys(key)
        apply = lambda *a, method: world.model.apply({"params": params["model"]}, *a, method=method)  # noqa: E731
        x = binarize(key_x, world.images[index])
        q = apply(x, method="encode")
        z = q.mean + jnp.exp(0.5 * q.log_var) * jax.random.normal(key_z, q.mean.shape)
        means = apply(to_unit(world.images[drawn]), method="encode").mean
        means = jax.lax.stop_gradient(means) if stop else means
        variance = jnp.exp(params["prior"]["log_var"])
        densities = -0.5 * jnp.sum((z[:, None] - means) ** 2, -1) / variance - 0.5 * DIM * jnp.log(
            2 * jnp.pi * variance
        )
        densities = jnp.where(drawn[None] == index[:, None], -jnp.inf, densities)
        log_pz = jax.nn.logsumexp(densities, axis=1) - jnp.log(count)
        logits = apply(z, method="logits")
        log_px = jnp.sum(jax.nn.log_sigmoid(jnp.where(x == 1, logits, -logits)), (1, 2, 3))
        log_q = jnp.sum(-0.5 * jnp.log(2 * jnp.pi) - 0.5 * q.log_var - 0.5 * (z - q.mean) ** 2 / jnp.exp(q.log_var), 1)
        return -jnp.mean(log_px + log_pz - log_q)

    # All exemplars, and neighbours with K = M, have the same value.
    configs = make_config(), make_config(search="exact", k=M, scored="own")
    for config in configs:
        config.optim.kl_warmup_epochs = 0

    batches = [world.batch(key, config, index) for config in configs]

    def run(params):
        steps = [
            world.step(key, config, batch, world.table, params) for config, batch in zip(configs, batches, strict=True)
        ]
        both = [(info.loss, info.grads) for _, info in steps]
        return both, jax.value_and_grad(dense)(params), jax.grad(lambda p: dense(p, stop=True))(params)

    run = jax.jit(run, compiler_options=QUICKLY)
    both, (wanted_value, want), stopped = jax.device_get(run(world.params))
    values, grads = zip(*both, strict=True)
    np.testing.assert_allclose(values, wanted_value, rtol=1e-5)
    scale = max(np.abs(leaf).max() for leaf in jax.tree.leaves(want))
    for got in grads:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5 * scale)
    assert abs(want["prior"]["log_var"]) > 0.1 / B
    through = jax.tree.map(lambda a, b: np.abs(a - b).max(), want["model"]["encoder"], stopped["model"]["encoder"])
    assert min(jax.tree.leaves(through)) > 1e-3 * scale


def test_table_chooses_neighbours_but_is_not_scored(world):
    key, index = jax.random.key(1), np.arange(B)
    straight, moved = (world.train(key, index, table=table) for table in (world.table, world.table * 3 + 1))
    np.testing.assert_allclose(straight["all_of_all"][0].elbo, moved["all_of_all"][0].elbo, rtol=1e-6)
    assert np.any(straight["two_of_all"][0].elbo != moved["two_of_all"][0].elbo)


@pytest.mark.parametrize(("scored", "samples"), [("own", 3), ("union", 2)])
def test_several_codes_of_an_image_use_the_same_exemplars(world, scored, samples):
    """With objective.samples > 1, each code uses the exemplars of its image, and the table gets each mean once."""
    k, key, index = 2, jax.random.key(5), np.arange(B)
    config = make_config(search="exact", k=k, scored=scored)
    config.objective.samples = samples
    batch = world.batch(key, config, index)
    step = jax.jit(lambda batch: world.step(key, config, batch, world.table), compiler_options=QUICKLY)
    state, (elbo, *_, exemplars) = step(batch)
    key_x, key_z, _ = step_keys(key)
    q = jax.tree.map(lambda a: np.asarray(a, np.float64), world.encode(binarize(key_x, world.images[index])))
    eps = np.asarray(jax.random.normal(key_z, ((1 if samples == 2 else samples) * B, DIM)), np.float64)
    eps = np.stack([eps, -eps], axis=1).reshape(-1, DIM) if samples == 2 else eps
    drawn = set(np.flatnonzero(draw_of(key, M).contains(np.arange(N))))
    own = [world.nearest(q.mean[i], k, drawn - {i}) for i in index]
    for row in range(samples * B):
        i = row // samples
        z = q.mean[i] + np.exp(0.5 * q.log_var[i]) * eps[row]
        log_q = -0.5 * (np.log(2 * np.pi) + q.log_var[i] + eps[row] ** 2).sum()
        seen = own[i] if scored == "own" else set.union(*own) - {i}
        np.testing.assert_allclose(elbo.kl[row], log_q - world.log_pz(z, seen, M - (i in drawn)), rtol=1e-4, atol=1e-4)
    only_own = sorted(set(index) - set(np.asarray(exemplars.index)))
    assert only_own
    np.testing.assert_allclose(state.table[np.array(only_own)], q.mean[only_own], rtol=1e-5, atol=1e-5)
