"""Small configs and data that the tests share."""

import os

# Programs of the tests run for milliseconds, so XLA compiles them fast and optimises little, also in subprocesses.
os.environ["OMP_NUM_THREADS"] = "1"  # waiting OpenMP threads (t-SNE) would slow down other processes
QUICKLY = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
QUICKLY += " --xla_cpu_parallel_codegen_split_count=1 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICKLY}"

import collections
import contextlib
import copy
import fcntl
import functools
import gc
import math
import shutil
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import ml_collections
import numpy as np
import pytest
from jax.sharding import Mesh

from exvae import config as configs
from exvae import data, models, once
from exvae.models import celeba, convhvae, pixelsnail
from exvae.run import Run
from exvae.scale import sharding
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
    "eval.tolerance": 1e9,  # no second round with more candidates, which needs another compilation
}


@pytest.fixture
def tiny_config() -> ml_collections.ConfigDict:
    """The config of a run that takes seconds: three epochs of eight steps."""
    config = configs.get_config()
    config.update_from_flattened_dict(TINY_FIELDS)
    return config


@pytest.fixture
def tiny_flags() -> list[str]:
    """The fields of `tiny_config` as command line options."""
    return [f"--config.{field}={value}" for field, value in TINY_FIELDS.items()]


# Modules whose code is part of the compiled functions that `once` keeps, and JAX, which compiles them.
COMPILED = (
    "exvae.models", "exvae.priors", "exvae.retrieval", "exvae.objectives", "exvae.distributions", "exvae.encoding",
    "exvae.evaluation.likelihood", "exvae.training.step", "exvae.training.optim", "exvae.scale", "jax",
)  # fmt: skip


class Patch(pytest.MonkeyPatch):
    """Clears the functions that `once` keeps if a test patches code that is part of them, and again afterwards."""

    changed = False

    def setattr(self, target: Any, *args: Any, **options: Any) -> None:
        owner = target if isinstance(target, str) else getattr(target, "__module__", None) or target.__name__
        if owner.startswith(COMPILED):
            once.forget()
            self.changed = True
        super().setattr(target, *args, **options)

    def undo(self) -> None:
        super().undo()
        if self.changed:
            once.forget()


@pytest.fixture
def monkeypatch() -> Iterator[pytest.MonkeyPatch]:
    with Patch.context() as patch:
        yield patch


# Tests that share compiled functions or a trained run go to one process. Other tests are grouped by file.
GROUPS = {
    "trained": (
        "tests/evaluation/test_evaluate_task.py", "tests/test_run.py", "tests/test_launch.py",
        "tests/training/test_loop.py", "tests/training/test_average.py", "tests/reproduce/test_trials.py",
        "tests/sweeps/test_sweep.py::test_summary_reads_the_files", "tests/test_docs.py",
    ),
    "uses": ("tests/uses/",),
}  # fmt: skip
# The longest groups start first. Otherwise one process would still run such a group after the others have finished.
LONGEST = ("trained", "tests/test_every_architecture.py", "uses", "tests/test_objectives.py", "tests/evaluation/")


def group_of(nodeid: str) -> str:
    named = (name for name, places in GROUPS.items() if nodeid.startswith(places))
    return next(named, nodeid.split("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return next((i for i, group in enumerate(LONGEST) if group_of(item.nodeid).startswith(group)), len(LONGEST))

    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Collects garbage rarely. Otherwise 5 % of the tests' time goes into scanning modules, which are never freed."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 1000)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Assigns whole groups to processes. (The groups of xdist itself do not work with the installed pytest.)"""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return Scheduling(config, log)


@contextlib.contextmanager
def compilations() -> Iterator[collections.Counter]:
    """Counts the programs that XLA compiles or loads from its cache on disk, by the name of the function."""
    counts = collections.Counter()

    def count(event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[fun_name.removeprefix("jit_").removeprefix("jit(").removesuffix(")")] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(count)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def several_devices(monkeypatch):
    """`several_devices(4)` returns a mesh that acts like four devices: `sharding.per_device` is a vmap over parts."""

    def part(leaf: Any, count: int) -> Any:
        return leaf.reshape(count, -1, *leaf.shape[1:])

    def per_device(mesh: Any, function: Any, in_specs: Any, out_specs: Any) -> Any:
        def run(*args: Any) -> Any:
            axes = tuple(None if arg is None or spec == sharding.WHOLE else 0 for arg, spec in zip(args, in_specs))  # noqa: B905
            args = [part(arg, mesh.size) if axis == 0 else arg for arg, axis in zip(args, axes, strict=True)]
            out = jax.vmap(function, axes, axis_name=sharding.AXIS, axis_size=mesh.size)(*args)
            return out[0] if out_specs == sharding.WHOLE else out.reshape(-1, *out.shape[2:])

        return run

    monkeypatch.setattr(sharding, "per_device", per_device)
    return lambda count: mock.NonCallableMagicMock(spec=Mesh, size=count)  # passes the type checks


@pytest.fixture(scope="session")
def trained(tmp_path_factory, worker_id):
    """The config and folder of a tiny run of one epoch. All pytest processes share it, so tests change only copies."""
    config = configs.get_config()
    config.update_from_flattened_dict({**TINY_FIELDS, "train.epochs": 1})
    place = tmp_path_factory.getbasetemp()
    place = place if worker_id == "master" else place.parent
    with open(place / "trained.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not (place / "trained" / "results.json").exists():
            loop.train(config, place / "trained")
    return config, place / "trained"


@pytest.fixture
def copied(trained, tmp_path):
    config, folder = trained
    shutil.copytree(folder, tmp_path / "run")
    return copy.deepcopy(config), tmp_path / "run"


@functools.cache
def _glyphs() -> data.Dataset:
    """The tiny data, with labels reduced to five classes."""
    config = configs.get_config()
    config.update_from_flattened_dict(TINY_FIELDS)
    dataset = data.load(config.data, binarize=False)
    return data.Dataset(*(data.Split(part.images, part.labels % 5) for part in vars(dataset).values()))


def drawn_params(config: Any, model: Any) -> dict:
    """Parameters with the distribution of initialised ones, drawn by NumPy so that nothing is compiled."""
    return {**_drawn_network(model), "prior": _drawn_prior(config, model)}


@functools.cache
def _drawn_network(model: Any) -> dict:
    real = getattr(models.init, "real", models.init)
    params, statistics = jax.eval_shape(lambda: real(jax.random.key(0), model))
    rng = np.random.default_rng(0)

    def draw(path: tuple, leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        name, shape = path[-1].key, leaf.shape
        if name in ("kernel", "gate_kernel", "direction"):
            scale = math.sqrt((2 if len(shape) == 2 else 1 / 3) / math.prod(shape[:-1]))
            return rng.normal(scale=scale, size=shape).astype(np.float32)
        if "bias" in name:
            return rng.uniform(-0.1, 0.1, size=shape).astype(np.float32)
        constants = {"mean": 0.0, "var": 1.0, "scale": 1.0, "gain": 3**-0.5, "log_scale": math.log(0.03)}
        return np.full(shape, constants[name], np.float32)

    params, statistics = (jax.tree_util.tree_map_with_path(draw, tree) for tree in (params, statistics))
    return {"model": params, **statistics}


def _drawn_prior(config: Any, model: Any) -> dict:
    rng = np.random.default_rng(1)
    pseudo_inputs = rng.normal(0.05, 0.01, (config.prior.num_pseudo_inputs, *model.image_shape)).astype(np.float32)
    return {
        "exemplar": {"log_var": np.float32(0.4)},
        "gaussian": {},
        "vamp": {"pseudo_inputs": pseudo_inputs},
    }[config.prior.name]


@pytest.fixture
def quick_start():
    """Starts runs from `drawn_params`, because compiling the initialisation takes as long as the rest of a tiny run.

    The run of `trained` and runs in subprocesses use the real initialisation.
    """

    def init(key: jax.Array, model: Any) -> tuple[dict, dict]:
        network = dict(_drawn_network(model))
        return network.pop("model"), network

    init.real = models.init
    with pytest.MonkeyPatch.context() as patch:  # no function that `once` keeps contains the initialisation
        patch.setattr(models, "init", init)
        yield


@pytest.fixture
def unevaluated(monkeypatch):
    """Ends runs without drawing samples and without evaluating test images, because both compile further functions."""
    monkeypatch.setattr(loop.gallery, "save_samples", lambda *_: None)
    monkeypatch.setattr(loop, "evaluate", lambda run, evaluator, save: {"elbo": 0.0, "reconstruction": 0.0, "kl": 0.0})


@pytest.fixture(scope="module")
def few_layers():
    """Convolutional networks with fewer layers, which compile faster. tests/models tests the full networks."""
    with Patch.context() as patch:
        patch.setattr(pixelsnail, "BLOCKS", 1)
        for name in ("Z1_STACK", "Z2_STACK"):
            patch.setattr(convhvae, name, ((4, 3, 2), (2, 3, 2)))
        patch.setattr(convhvae, "DECODER_LAYERS", 1)
        patch.setattr(celeba, "WIDTHS", (1, 2))
        _drawn_network.cache_clear()
        yield
    _drawn_network.cache_clear()


@pytest.fixture
def make_run(tiny_config, tmp_path):
    """`make_run(prior, architecture)` returns a Run with random parameters, without training."""

    def make(prior: str = "exemplar", architecture: str = "vae") -> Run:
        config, grey = copy.deepcopy(tiny_config), _glyphs()
        config.prior.name, config.model.architecture = prior, architecture
        model = models.build(config.model, grey.train.images.shape[1:])
        params = sharding.replicate(sharding.make_mesh(), drawn_params(config, model))
        return Run(config, tmp_path, grey, sharding.make_mesh(), model, params, 0, grey.train)

    return make
