"""Every architecture and likelihood: training, a resume after a stop, tasks and the Python interface."""

import json

import jax
import numpy as np
import pytest
from PIL import Image

import exvae
import launch
from exvae import config as configs
from exvae.training import loop
from tests.training.test_average import restored, to_float64
from tests.training.test_loop import assert_same_run, metric_lines

KINDS = {
    "pixelsnail": ("pixelsnail", "bernoulli", (6, 6, 1)),
    "celeba": ("celeba", "discretized_logistic", (16, 16, 3)),
    "grey vae": ("vae", "discretized_logistic", (6, 6, 1)),
    "colour convhvae": ("convhvae", "bernoulli", (9, 9, 3)),
}
# The default is the exemplar prior. An average (optim.ema) includes batch statistics.
MORE_FIELDS = {
    "grey vae": {"prior.name": "vamp"},
    "celeba": {"optim.estimator": "stl", "optim.ema": 0.9},
    "colour convhvae": {
        "prior.name": "gaussian",
        "data.image_size": 9,
        "data.colour": True,
        "model.lower_latent_dim": 3,
    },
}
IMAGES = 88  # the number in figures/samples.png, because drawing compiles for each number of images
FIELDS = {
    "model.latent_dim": 4, "model.hidden_dim": 8, "model.channels": 4, "prior.num_exemplars": 40,
    "prior.num_pseudo_inputs": 5, "retrieval.search": "exact", "retrieval.num_neighbours": 2,
    "optim.kl_warmup_epochs": 1, "optim.learning_rate": 3e-3, "train.epochs": 2, "train.batch_size": 24,
    "eval.iwae_samples": 10, "eval.candidates": 30, "eval.audit": 2, "eval.tolerance": 1e9,
    "generate.num_images": IMAGES, "generate.num_sources": 8, "represent.tsne_images": 0,
    "represent.memorisation_images": 12, "represent.explain": tuple(range(12)),
}  # fmt: skip


def make_config(kind, folder):
    """A config, and its data: 120 images of two classes, bright and dark, with grey levels."""
    architecture, likelihood, shape = KINDS[kind]
    config = configs.get_config()
    config.update_from_flattened_dict({**FIELDS, **MORE_FIELDS.get(kind, {})})
    config.model.architecture, config.model.likelihood = architecture, likelihood
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 120)
    if config.data.colour:
        save_pictures(rng, labels, folder / "images")
        config.data.name = f"images:{folder}/images"
        return config
    smooth = rng.uniform(size=(120, 2, 2, shape[2])).repeat(shape[0] // 2, 1).repeat(shape[1] // 2, 2)
    images = 255 * (0.25 + 0.5 * labels[:, None, None, None] + 0.25 * (smooth - 0.5))
    np.savez(folder / "blobs.npz", images=images.astype(np.uint8), labels=labels)
    config.data.name = f"npz:{folder}/blobs.npz"
    return config


def save_pictures(rng, labels, folder):
    """Writes a folder of images of several sizes, with one subfolder for each class."""
    for number, label in enumerate(labels):
        place = folder / f"class {label}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 100 + 150 * label, (20 + number % 40, 30, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")


def stop_and_resume(config, workdir, monkeypatch):
    """Stops a run in the second epoch, one step after a checkpoint, and resumes it."""
    real = loop.check_finite

    def interrupt(at, elbo):
        if at == 6:
            raise KeyboardInterrupt
        return real(at, elbo)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "check_finite", interrupt)
        patch.setattr(loop, "_is_due", lambda step, due: step == 5)
        loop.train(config, workdir)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_finish", lambda *_: {})  # equal parameters have the same evaluation
        loop.train(config, workdir)


def check_learning(workdir):
    # Training, not validation, because the running statistics need some tens of steps.
    first, last = [line["elbo"] for line in metric_lines(workdir) if line["split"] == "train"]
    assert last > first


def check_figures(kind, config, workdir):
    test = json.loads((workdir / "results.json").read_text())["test"]
    assert test["exemplars"] == (96 if config.prior.name == "exemplar" else 0)
    assert test["bits_per_dim"] == pytest.approx(-test["log_likelihood"] / (np.prod(KINDS[kind][2]) * np.log(2)))
    assert test["log_likelihood"] >= test["elbo"] - 1.0


def check_tasks(config, workdir):
    """Runs two tasks. Training already ends with the task `evaluate`, and the other tasks use the same functions."""
    launch.perform("sample", config, workdir, str(workdir / "sample.npz"))
    assert {"random.png", "plates.png"} <= {path.name for path in (workdir / "figures").iterdir()}
    if config.model.architecture == "pixelsnail":  # draws pixel by pixel, which compiles slowly
        return
    launch.perform("represent", config, workdir, str(workdir / "represent.npz"))
    assert (workdir / "figures" / "memorisation.png").exists()
    assert json.loads((workdir / "represent.json").read_text())["knn"]["error"] < 0.5


def check_python(kind, config, workdir):
    run = exvae.load(workdir)
    run.config.eval = config.eval  # training has compiled the evaluation with these options
    images, binary = run.grey.test.images, KINDS[kind][1] == "bernoulli"
    assert np.isin(run.dataset.test.images, (0, 255)).all() == binary
    nats = run.log_likelihood(images[:3])
    assert np.isfinite(nats).all() and (nats < 0).all()
    levels = np.unique(run.sample(jax.random.key(0), 4, draw=True) * 255)
    np.testing.assert_allclose(levels, levels.round(), atol=1e-3)
    assert set(levels.round()) <= {0, 255} if binary else len(levels) > 8
    np.testing.assert_allclose(run.reconstruct(images[::-1])[::-1], run.reconstruct(images), atol=1e-5)


@pytest.mark.usefixtures("few_layers", "quick_start")
@pytest.mark.parametrize("kind", ["pixelsnail", "celeba", "grey vae"])
def test_architecture_learns_resumes_bit_for_bit_and_runs_its_tasks(kind, tmp_path, monkeypatch):
    config = make_config(kind, tmp_path)
    loop.train(config, tmp_path / "run")
    check_learning(tmp_path / "run")
    check_figures(kind, config, tmp_path / "run")
    check_python(kind, config, tmp_path / "run")
    if config.model.architecture != "vae":  # other tests cover the vae
        stop_and_resume(config, tmp_path / "stopped", monkeypatch)
        assert_same_run(config, tmp_path / "run", tmp_path / "stopped", evaluated=False)
        check_tasks(config, tmp_path / "run")


@pytest.mark.usefixtures("few_layers", "quick_start", "unevaluated")
def test_users_colour_images_train_a_convolutional_model(tmp_path):
    """z1 and z2 have different sizes. The test above evaluates PixelSNAIL, which has the same encoders."""
    loop.train(make_config("colour convhvae", tmp_path), tmp_path / "run")
    check_learning(tmp_path / "run")
    assert np.isfinite([line["elbo"] for line in metric_lines(tmp_path / "run")]).all()


@pytest.mark.usefixtures("few_layers", "quick_start")
def test_average_includes_parameters_and_batch_statistics(tmp_path):
    config = make_config("celeba", tmp_path)
    setup, state = restored(config, tmp_path / "run")
    feeder = loop.Feeder(setup.config, setup.model, setup.mesh, setup.store, state)
    want = to_float64(state.params)
    assert any("batch_stats" in name for name in want) and any("['model']" in name for name in want)
    for t in range(1, 18):
        state, _ = setup.train_step(state, feeder(state, t - 1, np.arange(24, dtype=np.int32)))
        d = {8: 1 / 10, 16: 2 / 11}.get(t, float(t > 8))  # before step 8, the average equals the parameters
        want = {name: d * want[name] + (1 - d) * value for name, value in to_float64(state.params).items()}
        average = to_float64(state.average)
        assert average.keys() == want.keys()
        for name, value in average.items():
            np.testing.assert_allclose(value, want[name], rtol=1e-5, atol=1e-6, err_msg=f"{name} {t}")
