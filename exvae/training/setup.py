"""Preparation of a run: data, model, compiled functions, and the state to start from."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import optax
from flax import linen as nn
from jax.sharding import Mesh
from ml_collections import ConfigDict

from exvae import config as configs
from exvae import data, models
from exvae.data import splits
from exvae.data.store import Store
from exvae.errors import UserError
from exvae.evaluation.elbo import Evaluator, make_evaluator
from exvae.retrieval import table
from exvae.retrieval.index import INDEXES
from exvae.runs import folder
from exvae.runs.checkpoint import Checkpoints
from exvae.runs.progress import phase
from exvae.runs.records import fingerprint
from exvae.scale import sharding
from exvae.state import TrainState, init_state, state_shardings
from exvae.training import optim
from exvae.training.feed import uses_exemplars, uses_index, uses_table
from exvae.training.step import TrainStep, make_train_step

QUICKLY = {"xla_backend_optimization_level": 2}  # for a program that runs once; the bits are those of level 3


class Setup(NamedTuple):
    """Everything that is constant during a run."""

    config: ConfigDict
    workdir: Path
    grey: data.Dataset
    dataset: data.Dataset  # like `grey`, but valid and test are binarized if the model is Bernoulli
    exemplars: data.Split  # exemplars of the final evaluation
    store: Store  # training images
    mesh: Mesh
    model: nn.Module
    optimizer: optax.GradientTransformation
    train_step: TrainStep
    evaluator: Evaluator
    steps_per_epoch: int
    checksum: int  # of the training images


def prepare(config: ConfigDict, workdir: Path) -> Setup:
    """Read the data, check the config against them, open the run's folder, and build everything that the run needs."""
    configs.validate(config)
    if uses_index(config):
        INDEXES[config.retrieval.search].require()
    grey = data.load(config.data, binarize=False)
    dataset = splits.as_modelled(grey, config.model.likelihood)
    config = configs.resolve(config, len(dataset.train))
    # Read now, although they are needed only at the end: a wrong file should raise an error immediately.
    exemplars = data.load_exemplars(config.eval.exemplars, grey, memory_mib=config.data.memory_mib)
    mesh = sharding.make_mesh(config.train.batch_size)
    folder.open_workdir(workdir, config.to_dict())
    sizes = {"num_train": len(dataset.train), "steps_per_epoch": len(dataset.train) // config.train.batch_size}
    model = models.build(config.model, dataset.train.images.shape[1:])
    optimizer = optim.optimizer(config, config.train.epochs * sizes["steps_per_epoch"])
    return Setup(
        config=config,
        workdir=workdir,
        grey=grey,
        dataset=dataset,
        exemplars=exemplars,
        store=Store(mesh, dataset.train.images, config.data.device_mib, config.data.memory_mib),
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        train_step=make_train_step(config, model, mesh, optimizer, **sizes),
        evaluator=make_evaluator(config, model, mesh),
        steps_per_epoch=sizes["steps_per_epoch"],
        checksum=fingerprint(dataset.train.images),
    )


def describe(setup: Setup) -> str:
    """Describe the run in one line."""
    config, sizes = setup.config, [len(part) for part in vars(setup.dataset).values()]
    height, width, channels = setup.model.image_shape
    prior = f"{config.prior.name} prior"
    if uses_exemplars(config):
        search = f", K={config.retrieval.num_neighbours}, {config.retrieval.search} search" * uses_table(config)
        prior += f" (M={config.prior.num_exemplars}{search})"
    devices = f"{setup.mesh.size} {jax.default_backend()} device{'s' if setup.mesh.size > 1 else ''}"
    if jax.process_count() > 1:
        devices += f" of {jax.process_count()} processes"
    data_text = f"{config.data.name} {' / '.join(map(str, sizes))} images of {height}x{width}x{channels}"
    return f"{data_text}, {config.model.architecture}, {prior}, {devices} -> {setup.workdir}"


def start(setup: Setup, checkpoints: Checkpoints) -> tuple[TrainState, dict[str, Any]]:
    """Return the last saved state and its metadata, or the initial state with a filled table (Algorithm 1)."""
    config, mesh, num_train = setup.config, setup.mesh, len(setup.store)

    def init() -> TrainState:
        return init_state(config, setup.model, setup.optimizer)

    # One compilation, not one per tensor. It is traced here, and a resumed run does not compile it.
    options = QUICKLY if jax.default_backend() == "cpu" else None
    initial = jax.jit(init, out_shardings=state_shardings(mesh), compiler_options=options)
    like = sharding.shapes(mesh, jax.eval_shape(initial))
    restored = checkpoints.restore_latest(lambda meta: _with_tables(setup, like, meta.get("rows", num_train)))
    if restored is not None:
        state, meta = restored
        if meta["images"] != setup.checksum:
            raise UserError(f"--workdir={setup.workdir} holds a run on other training images: choose another")
        print(f"resuming from step {int(state.step)} in {setup.workdir}")
        resized = (table.resize(mesh, part, num_train) for part in (state.table, state.indexed))
        return state.replace(**dict(zip(("table", "indexed"), resized, strict=True))), meta
    with phase("initialising the parameters"):
        state = initial()
    if uses_table(config):
        with phase(f"encoding {num_train:,} images"):
            encode_all = functools.partial(setup.evaluator.encode_all, state.params, setup.store)
            filled = table.fill(encode_all, indexed=uses_index(config))
        state = state.replace(table=filled[0], indexed=filled[1])
    return state, {}


def _with_tables(setup: Setup, state: TrainState, num_rows: int) -> TrainState:
    """Add tables of `num_rows` rows to `state`, as in the checkpoint."""
    if not uses_table(setup.config):
        return state
    saved = table.like(setup.mesh, num_rows, setup.config.model.latent_dim)
    return state.replace(table=saved, indexed=(saved, saved) if uses_index(setup.config) else None)
