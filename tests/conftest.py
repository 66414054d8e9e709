"""Small configs and data that the tests share."""

import os

# Programs of the tests run for milliseconds: compile them fast, not well. Processes that tests start inherit it.
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"

import copy
import functools
import shutil

import jax
import ml_collections
import numpy as np
import pytest

from exvae import config as configs
from exvae import data, models, once
from exvae.models import celeba, convhvae, pixelsnail
from exvae.run import Run
from exvae.scale import sharding
from exvae.state import init_params
from exvae.training import loop

# Compiled functions are kept between test runs, and between a test and the processes that it starts.
CACHE = os.path.join(os.path.dirname(__file__), "..", ".jax_cache")
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.abspath(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)

TINY_FIELDS = {
    "data.num_images": 400,  # 320 / 40 / 40
    "data.name": "glyphs",
    "model.latent_dim": 4,
    "model.hidden_dim": 16,
    "prior.num_exemplars": 100,
    "prior.num_pseudo_inputs": 8,
    "retrieval.search": "exact",
    "retrieval.num_neighbours": 3,
    "retrieval.rebuild_steps": 5,
    "objective.samples": 1,
    "optim.estimator": "plain",
    "optim.ema": 0.0,
    "optim.weight_decay": 0.0,
    "optim.kl_warmup_epochs": 2,
    "train.epochs": 3,
    "train.batch_size": 40,
    "eval.iwae_samples": 20,
    "eval.candidates": 50,
    "eval.audit": 4,
    "eval.tolerance": 1e9,  # no second round with more candidates, which would be compiled anew
}


@pytest.fixture
def tiny_config() -> ml_collections.ConfigDict:
    """A run of three epochs with eight steps each, seconds long."""
    config = configs.get_config()
    config.update_from_flattened_dict(TINY_FIELDS)
    return config


@pytest.fixture
def tiny_flags() -> list[str]:
    """The same as command line options."""
    return [f"--config.{field}={value}" for field, value in TINY_FIELDS.items()]


@pytest.fixture(autouse=True)
def compiled_anew_where_code_is_changed(request):
    """A test that replaces a part of the package must not meet what was compiled without the change."""
    changes = "monkeypatch" in request.fixturenames
    if changes:
        once.forget()
    yield
    if changes:
        once.forget()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A tiny run of one epoch: its config and its folder, which tests copy."""
    config = configs.get_config()
    config.update_from_flattened_dict({**TINY_FIELDS, "train.epochs": 1})
    folder = tmp_path_factory.mktemp("trained")
    loop.train(config, folder)
    return config, folder


@pytest.fixture
def copied(trained, tmp_path):
    config, folder = trained
    shutil.copytree(folder, tmp_path / "run")
    return copy.deepcopy(config), tmp_path / "run"


@functools.cache
def _glyphs() -> data.Dataset:
    """The tiny data with five classes."""
    config = configs.get_config()
    config.update_from_flattened_dict(TINY_FIELDS)
    dataset = data.load(config.data, binarize=False)
    return data.Dataset(*(data.Split(part.images, part.labels % 5) for part in vars(dataset).values()))


@pytest.fixture
def few_layers(monkeypatch):
    """Convolutional networks that compile faster; tests/models has the whole ones."""
    monkeypatch.setattr(pixelsnail, "BLOCKS", 1)
    for name in ("Z1_STACK", "Z2_STACK"):
        monkeypatch.setattr(convhvae, name, ((4, 3, 2), (2, 3, 2)))
    monkeypatch.setattr(convhvae, "DECODER_LAYERS", 1)
    monkeypatch.setattr(celeba, "WIDTHS", (1, 2))


@pytest.fixture
def make_run(tiny_config, tmp_path):
    """A Run with parameters as they are initialised, as if it had been trained: make_run(prior, architecture)."""

    def make(prior: str = "exemplar", architecture: str = "vae") -> Run:
        config, grey = copy.deepcopy(tiny_config), _glyphs()
        config.prior.name, config.model.architecture = prior, architecture
        model = models.build(config.model, grey.train.images.shape[1:])
        params = jax.jit(lambda: init_params(config, model))()
        return Run(config, tmp_path, grey, sharding.make_mesh(), model, params, 0, grey.train)

    return make
