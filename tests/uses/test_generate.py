"""Samples, interpolations and chains."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from scipy import stats

from exvae import objectives
from exvae.data import Split
from exvae.distributions import Normal
from exvae.errors import UserError
from exvae.priors import PRIORS
from exvae.runs import outputs
from exvae.uses import gallery, generate

KEY = jax.random.key(0)


class Identity(nn.Module):
    """A model in which an image is its own code, so that decoded images show the density of the codes."""

    block_rows = 4000

    image_shape: tuple[int, int, int] = (2, 2, 1)
    latent_dim: int = 4

    def encode(self, x):
        mean = x.reshape(len(x), -1)
        return Normal(mean, jnp.full_like(mean, jnp.log(0.09)))

    def decode(self, key, z, draw):
        x = z.reshape(-1, *self.image_shape)
        return (x > 0.5).astype(jnp.float32) if draw else x


@pytest.fixture
def identity_run(make_run, rng):
    """A run with five exemplars of labels 0, 1, 1, 2, 2 and sigma = 0.2."""

    def make(prior):
        images = rng.integers(0, 256, (5, 2, 2, 1), dtype=np.uint8)
        params = {"model": {}, "prior": {"log_var": jnp.log(0.04)}}
        split = Split(images, np.array([0, 1, 1, 2, 2], np.int32))
        return dataclasses.replace(make_run(prior), model=Identity(), params=params, exemplars=split)

    return make


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("prior", "sigma"), [("exemplar", 0.2), ("gaussian", 0.3), ("vamp", 0.3)])
def test_codes_have_the_mean_and_variance_of_r(identity_run, monkeypatch, prior, sigma, temperature):
    """r(z|x) = N(mu(x), sigma^2 I), Eq. (7); q(z|x) for the other priors."""
    monkeypatch.setattr(Identity, "block_rows", 1500)  # several blocks, each with its own noise
    run = identity_run(prior)
    x, n = run.exemplars.images[:1], 8000
    z = generate.around(KEY, run, np.repeat(x, n, axis=0), temperature=temperature).reshape(n, 4)
    scale = temperature * sigma
    np.testing.assert_allclose(z.mean(0), x.reshape(4) / 255, atol=5 * scale / np.sqrt(n))
    np.testing.assert_allclose(z.var(0), scale**2, rtol=5 * np.sqrt(2 / n))
    assert abs(np.corrcoef(z.T) - np.eye(4)).max() < 5 / np.sqrt(n)
    assert stats.kstest((z[:, 0] - x[0, 0, 0, 0] / 255) / scale, "norm").pvalue > 1e-3
    assert len(np.unique(z[:, 0])) > 0.99 * n


def test_samples_start_from_exemplars_drawn_uniformly(identity_run):
    run = identity_run("exemplar")
    samples = generate.sample(KEY, run, 5000, temperature=0.0)
    assert stats.chisquare(np.bincount(samples.sources, minlength=5)).pvalue > 1e-3
    np.testing.assert_allclose(samples.images, run.exemplars.images[samples.sources] / 255, atol=1e-6)


@pytest.mark.parametrize("prior", ["exemplar", "gaussian", "vamp"])
def test_class_conditional_samples_start_from_that_class_only(identity_run, prior):
    run = identity_run(prior)
    images = run.sample(KEY, 200, label=2, temperature=0.0).reshape(200, 4)
    wanted = run.exemplars.images[3:].reshape(2, 4) / 255
    distances = np.abs(images[:, None] - wanted).max(-1)
    assert distances.min(1).max() < 1e-6
    assert (distances.argmin(1) == 0).any() and (distances.argmin(1) == 1).any()
    chosen = run.sample(KEY, 50, index=[4, 0], label=2, temperature=0.0).reshape(50, 4)
    np.testing.assert_allclose(chosen, np.tile(wanted[1], (50, 1)), atol=1e-6)


def test_prior_samples_have_its_moments(make_run):
    for prior in ("gaussian", "vamp", "exemplar"):
        run = make_run(prior)
        module = PRIORS[prior]
        encode = objectives.encoder(run.model, run.params)
        parts = module.components(run.params["prior"], encode, run.means if prior == "exemplar" else None)
        z = np.asarray(module.sample(KEY, parts, (20_000, 4), 0.5))
        mean, second = np.zeros(4), 0.25 * np.ones(4)
        if prior == "vamp":
            mean = np.mean(parts.mean, 0)
            second = np.mean(np.square(parts.mean) + 0.25 * np.exp(parts.log_var), 0)
        if prior == "exemplar":
            mean = np.mean(parts.means, 0)
            second = np.mean(np.square(parts.means) + 0.25 * np.exp(parts.log_var), 0)
        spread = 5 * np.sqrt(second / len(z))
        assert (abs(z.mean(0) - mean) < spread).all()
        np.testing.assert_allclose(np.mean(z**2, 0), second, rtol=0.1)


def test_drawn_pixels_are_binary_with_the_decoder_mean_as_probability(make_run):
    run = make_run()
    copies = np.repeat(run.exemplars.images[:1], 4000, axis=0)
    drawn = generate.around(KEY, run, copies, temperature=0.0, draw=True)
    assert set(np.unique(drawn)) <= {0.0, 1.0}
    (mean,) = generate.around(KEY, run, copies[:1], temperature=0.0)
    error = np.sqrt(mean * (1 - mean) / 4000) + 1e-4
    assert (abs(drawn.mean(0) - mean) < 5 * error).all()


def test_same_key_gives_the_same_images_and_another_key_others(make_run):
    for prior in ("exemplar", "gaussian", "vamp"):
        run = make_run(prior)
        one, again, other = (run.sample(jax.random.key(seed), 6) for seed in (1, 1, 2))
        np.testing.assert_array_equal(one, again)
        assert (one != other).any(axis=(1, 2, 3)).all()
        assert len(np.unique(one.reshape(6, -1), axis=0)) == 6


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_interpolation_ends_are_the_reconstructions(make_run, architecture):
    run = make_run("exemplar", architecture)
    a, b = run.exemplars.images[:3], run.exemplars.images[3:6]
    frames = run.interpolate(a, b, 5)
    assert frames.shape == (3, 5, 28, 28, 1)
    np.testing.assert_allclose(frames[:, 0], run.reconstruct(a), atol=1e-6)
    np.testing.assert_allclose(frames[:, -1], run.reconstruct(b), atol=1e-6)
    variables = {"params": run.params["model"]}
    ends = [run.model.apply(variables, jnp.asarray(x / 255, jnp.float32), method="latents") for x in (a, b)]
    middle = run.model.apply(
        variables, jax.tree.map(lambda u, v: (u + v) / 2, *ends), jnp.full((1, 1, 1, 1), 0.5), method="render"
    )
    np.testing.assert_allclose(frames[:, 2], middle, atol=1e-5)
    np.testing.assert_array_equal(run.interpolate(a, b, 2)[:, 0], frames[:, 0])


def test_reconstruction_of_a_hierarchical_model_uses_both_latents(make_run):
    run = make_run("exemplar", "hvae")
    x = jnp.asarray(run.exemplars.images[:2] / 255, jnp.float32)

    @jax.jit
    def mean_image(x):
        bound = run.model.bind({"params": run.params["model"]})
        z2 = bound.encode(x).mean
        z1 = bound.posterior_z1(bound.observe(x).features, z2).mean
        return jax.nn.sigmoid(bound.logits(z2, z1))

    np.testing.assert_allclose(run.reconstruct(run.exemplars.images[:2]), mean_image(x), atol=1e-5)


def test_crossover_takes_half_of_each_latent(make_run):
    run = make_run()
    a, b = run.exemplars.images[:2], run.exemplars.images[2:5]
    mixed = generate.crossover(run, a, b)
    first, second = run.encode(a).mean, run.encode(b).mean
    for i, j in np.ndindex(2, 3):
        z = np.concatenate([first[i, :2], second[j, 2:]])[None]
        want = run.model.apply({"params": run.params["model"]}, KEY, z, method="decode")[0]
        np.testing.assert_allclose(mixed[i, j], want, atol=1e-5)
    np.testing.assert_allclose(generate.crossover(run, a, a)[[0, 1], [0, 1]], run.reconstruct(a), atol=1e-5)


@pytest.mark.parametrize("architecture", ["vae", "hvae"])
def test_grid_has_the_reconstruction_in_its_middle_and_moves_along_two_directions(make_run, architecture):
    run = make_run("exemplar", architecture)
    image = run.exemplars.images[0]
    cells = generate.grid(run, image, 5)
    np.testing.assert_allclose(cells[2, 2], run.reconstruct(image[None])[0], atol=1e-5)
    assert len(np.unique(cells.reshape(25, -1).round(6), axis=0)) == 25


def test_chain_uses_each_image_as_the_exemplar_of_the_next(identity_run, make_run):
    run = identity_run("exemplar")
    start = np.zeros((2000, 2, 2, 1), np.float32)
    chain = generate.iterate(KEY, run, start, 3, temperature=1.0, draw=False)
    np.testing.assert_allclose(chain.var(axis=(0, 2, 3, 4)), 0.04 * np.array([1, 2, 3]), rtol=0.1)  # a random walk
    steps = np.diff(np.concatenate([start[:, None], chain], axis=1), axis=1).reshape(2000, 3, 4)
    assert abs(np.corrcoef(steps[:, 0, 0], steps[:, 1, 0])[0, 1]) < 0.1  # fresh noise
    run = make_run()
    (first,) = generate.iterate(KEY, run, run.exemplars.images[:1] / np.float32(255), 1, temperature=0.0, draw=False)
    np.testing.assert_allclose(first, run.reconstruct(run.exemplars.images[:1]), atol=1e-6)


@pytest.mark.parametrize(
    ("index", "label", "message"),
    [
        ([320], None, "there is no exemplar 320: they are numbered 0..319"),
        ([-1], None, "there is no exemplar -1"),
        (None, 9, "there is no exemplar with label 9: labels are 0..4"),
        ([0, 1], "other", "none of the chosen exemplars has label"),
    ],
)
def test_exemplars_that_do_not_exist_are_refused(make_run, index, label, message):
    run = make_run()
    if label == "other":
        label = min(set(range(5)) - set(run.exemplars.labels[:2].tolist()))
    with pytest.raises(UserError, match=message):
        run.sample(KEY, 2, index=index, label=label)


def test_label_of_exemplars_without_labels_is_refused(make_run):
    run = make_run().with_exemplars(make_run().exemplars.images)
    with pytest.raises(UserError, match="these images have no labels"):
        run.sample(KEY, 2, label=1)


@pytest.mark.parametrize("prior", ["exemplar", "gaussian", "vamp"])
def test_tasks_write_figures_arrays_and_single_images(make_run, prior, tmp_path):
    run = make_run(prior)
    options = run.config.generate
    options.num_images, options.num_sources, options.steps = 7, 2, 4
    gallery.sample_task(run, str(tmp_path / "s.npz"))
    gallery.interpolate_task(run, str(tmp_path / "i.npz"))
    gallery.iterate_task(run, str(tmp_path / "chains"))
    names = {path.stem for path in (tmp_path / "figures").glob("*.png")}
    assert names == {"random", "plates", "interpolation", "grid", "crossover", "chain_images", "chain_noise"}
    with np.load(tmp_path / "s.npz") as saved:
        assert (saved["images"].shape, saved["images"].dtype) == ((7, 28, 28, 1), np.uint8)
        if prior == "exemplar":
            np.testing.assert_array_equal(saved["labels"], run.exemplars.labels[saved["sources"]])
        first = saved["images"]
    with np.load(tmp_path / "i.npz") as saved:
        assert saved["interpolation"].shape == (2, 4, 28, 28, 1)
        assert (saved["grid"].shape, saved["crossover"].shape) == ((2, 5, 5, 28, 28, 1), (2, 2, 28, 28, 1))
        ends = run.reconstruct(run.exemplars.images[saved["sources"][0::2]])
        np.testing.assert_allclose(saved["interpolation"][:, 0] / 255, ends, atol=0.51 / 255)
    assert len(list((tmp_path / "chains" / "from_noise").glob("*.png"))) == 8
    assert np.asarray(Image.open(tmp_path / "chains" / "from_images" / "00007.png")).shape == (28, 28)
    gallery.sample_task(run, str(tmp_path / "again.npz"))
    with np.load(tmp_path / "again.npz") as saved:
        np.testing.assert_array_equal(saved["images"], first)
    options.seed = 1
    gallery.sample_task(run, str(tmp_path / "pngs"))
    pngs = [np.asarray(Image.open(path)) for path in sorted((tmp_path / "pngs").glob("*.png"))]
    assert len(pngs) == 7
    assert (np.stack(pngs)[..., None] != first).any()


@pytest.fixture
def drawn(monkeypatch) -> dict:
    """The images that the tasks pass to the figures, by file name."""
    seen = {}
    for name in ("save_grid", "save_plates"):
        monkeypatch.setattr(gallery.figures, name, lambda path, images, *_, **__: seen.__setitem__(path.stem, images))
    return seen


def distance_to(images: np.ndarray, sources: np.ndarray) -> np.ndarray:
    """For each image, the largest difference of a pixel to the nearest source."""
    flat, known = images.reshape(-1, 1, 4), sources.reshape(1, -1, 4) / 255
    return np.abs(flat - known).max(-1).min(1)


def test_sample_task_uses_label_temperature_and_draw(identity_run, drawn):
    run = identity_run("exemplar")
    options = run.config.generate
    options.label, options.temperature, options.num_sources = 2, 0.0, 9
    gallery.sample_task(run)
    of_class = run.exemplars.images[3:]
    assert distance_to(drawn["random"], of_class).max() < 1e-6
    assert drawn["plates"].shape[:2] == (2, 12)  # no exemplar occurs twice
    assert distance_to(drawn["plates"], of_class).max() < 1e-6
    options.temperature = 1.0
    gallery.sample_task(run)
    spread = drawn["plates"][:, 1:] - drawn["plates"][:, :1]
    assert spread.std() == pytest.approx(0.2, rel=0.3)
    assert distance_to(drawn["random"], of_class).max() > 0.05
    options.draw = True
    gallery.sample_task(run)
    assert set(np.unique(drawn["random"])) <= {0.0, 1.0} and set(np.unique(drawn["plates"][:, 1:])) <= {0.0, 1.0}


def test_chains_start_from_exemplars_and_from_noise(identity_run, drawn):
    run = identity_run("exemplar")
    options = run.config.generate
    options.num_sources, options.temperature, options.steps = 5, 0.0, 3
    gallery.iterate_task(run)
    assert drawn["chain_images"].shape[:2] == drawn["chain_noise"].shape[:2] == (5, 4)
    assert distance_to(drawn["chain_images"], run.exemplars.images).max() < 1e-6
    assert distance_to(drawn["chain_noise"][:, 0], run.exemplars.images).min() > 0.02
    np.testing.assert_allclose(drawn["chain_noise"], np.repeat(drawn["chain_noise"][:, :1], 4, axis=1), atol=1e-6)


def test_grid_follows_the_two_main_directions_of_the_nearest_exemplars(make_run, monkeypatch):
    monkeypatch.setattr(generate, "NEIGHBOURS", 30)
    run = make_run()
    image = run.exemplars.images[5]
    origin = run.encode(image[None]).mean[0].astype(np.float64)
    near = np.argsort(np.sum((run.means - origin) ** 2, axis=1))[:30]
    values, vectors = np.linalg.eigh(np.cov(run.means[near].T.astype(np.float64), bias=True))
    cells = generate.grid(run, image, 5)
    for axis, place in ((0, (4, 2)), (1, (2, 4))):  # two standard deviations down, or right
        step = 2.0 * np.sqrt(values[-1 - axis]) * vectors[:, -1 - axis]
        candidates = [
            run.model.apply(
                {"params": run.params["model"]}, KEY, (origin + sign * step)[None].astype(np.float32), method="decode"
            )
            for sign in (1, -1)  # the sign of an eigenvector is arbitrary
        ]
        assert min(np.abs(cells[place] - candidate[0]).max() for candidate in candidates) < 1e-4


def test_one_dimensional_codes_have_a_grid(make_run, tiny_config):
    tiny_config.model.latent_dim = 1
    run = make_run()
    cells = generate.grid(run, run.exemplars.images[0], 3)
    np.testing.assert_allclose(cells[1, 0], cells[1, 2], atol=1e-6)
    assert (cells[0, 1] != cells[2, 1]).any()


def test_saved_samples_can_be_exemplars_and_data(make_run, tmp_path):
    from exvae import data

    run = make_run()
    run.config.generate.num_images = 30
    gallery.sample_task(run, str(tmp_path / "s.npz"))
    split = data.load_exemplars(f"npz:{tmp_path}/s.npz", run.grey)
    assert len(split) == 30 and split.labels is not None
    gallery.sample_task(run, str(tmp_path / "folder"))
    again = data.load_exemplars(f"images:{tmp_path}/folder", run.grey)
    np.testing.assert_array_equal(again.images, split.images)


def test_chosen_exemplars_have_one_plate_each_in_the_given_order(make_run, monkeypatch):
    run = make_run()
    run.config.generate.index = (9, 4)
    seen = []
    monkeypatch.setattr(gallery.figures, "save_plates", lambda path, plates: seen.append(plates))
    gallery.sample_task(run)
    np.testing.assert_allclose(seen[0][:, 0], run.exemplars.images[[9, 4]] / 255, atol=1e-6)
    assert seen[0].shape[:2] == (2, 12)
    run.config.generate.index = (3,)
    with pytest.raises(UserError, match="must be even, not 1"):
        gallery.interpolate_task(run)


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("full", "new or empty"),
        ("file.txt", "must be a .npz file"),
        ("file", "new or empty"),
        ("file/x.npz", "cannot be written"),
        ("folder.npz", "is a folder"),
    ],
)
def test_out_with_other_files_in_the_way_is_refused(tmp_path, out, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.png").touch()
    (tmp_path / "file.txt").touch()
    (tmp_path / "file").touch()
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(UserError, match=message):
        outputs.check(str(tmp_path / out))
