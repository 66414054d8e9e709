"""Training: the loop around the step."""

from __future__ import annotations

import collections
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jaxtyping import Array

from exvae import config as configs
from exvae import data, models
from exvae.data import splits
from exvae.data.batches import epoch_order
from exvae.data.store import Store
from exvae.errors import UserError
from exvae.evaluation.evaluate import Evaluator, evaluate, make_evaluator, mean_elbo
from exvae.evaluation.evaluate import describe as describe_figures
from exvae.retrieval import scann
from exvae.run import Run
from exvae.runs import metrics
from exvae.runs.checkpoint import Checkpoints
from exvae.runs.records import fingerprint
from exvae.scale import sharding
from exvae.training import optim
from exvae.training.feed import Feeder, uses_exemplars, uses_scann, uses_table
from exvae.training.step import (
    SAMPLES,
    STEPS_AHEAD,
    VALID,
    TrainState,
    init_state,
    make_train_step,
    state_shardings,
    stream,
)
from exvae.uses import gallery

AGREE_STEPS = 20  # several processes decide together every so many steps whether to save


class Diverged(Exception):
    """NaN or infinity in the loss or a gradient."""


class Stopwatch:
    """Seconds of training on the wall clock and of all cores together, before a kill and after."""

    def __init__(self, before: dict):
        """
        Args:
          before: what a checkpoint says was spent; {} at the start.
        """
        self._wall = time.monotonic() - before.get("seconds", 0.0)
        # Runs that are older than this figure do not have it.
        known = "cpu_seconds" in before or not before
        self._cpu = time.process_time() - before.get("cpu_seconds", 0.0) if known else None

    def spent(self) -> dict[str, float]:
        cpu = {} if self._cpu is None else {"cpu_seconds": time.process_time() - self._cpu}
        return {"seconds": time.monotonic() - self._wall, **cpu}


class Setup(NamedTuple):
    """What stays the same during a run."""

    config: Any
    workdir: Path
    grey: data.Dataset
    dataset: data.Dataset  # for a Bernoulli model with valid and test binarized
    exemplars: data.Split  # of the evaluation at the end
    store: Store  # training images
    mesh: jax.sharding.Mesh
    model: nn.Module
    optimizer: optax.GradientTransformation
    train_step: Any
    evaluator: Evaluator
    steps_per_epoch: int
    checksum: int  # of the training images


def prepare(config: Any, workdir: Path) -> Setup:
    """Read the data, check the config against them, open the run's folder and build what the run needs."""
    configs.validate(config)
    if uses_scann(config):
        scann.require()
    grey = data.load(config.data, binarize=False)
    dataset = splits.as_modelled(grey, config.model.likelihood)
    config = configs.resolve(config, len(dataset.train))
    # Needed at the end, but a wrong file is better found now.
    exemplars = data.load_exemplars(config.eval.exemplars, grey, memory_mib=config.data.memory_mib)
    mesh = sharding.make_mesh(config.train.batch_size)
    metrics.open_workdir(workdir, config.to_dict())
    steps_per_epoch = len(dataset.train) // config.train.batch_size
    model = models.build(config.model, dataset.train.images.shape[1:])
    optimizer = optim.optimizer(config, config.train.epochs * steps_per_epoch)
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
        train_step=make_train_step(config, model, mesh, optimizer, steps_per_epoch),
        evaluator=make_evaluator(config, model, mesh),
        steps_per_epoch=steps_per_epoch,
        checksum=fingerprint(dataset.train.images),
    )


def main(config: Any, workdir: Path) -> None:
    """The task `train`: train, evaluate, say where to look."""
    results = train(config, workdir)
    print(
        f"best epoch {results['best_epoch']}\n{describe_figures(results['test'])}\n"
        f"figures  {workdir}/results.json  {workdir}/metrics.jsonl  (tensorboard --logdir={workdir})\n"
        f"samples  {workdir}/figures/samples.png"
    )


def describe(setup: Setup) -> str:
    """The run in one line."""
    config, sizes = setup.config, [len(part) for part in vars(setup.dataset).values()]
    height, width, channels = setup.model.image_shape
    prior = f"{config.prior.name} prior"
    if uses_exemplars(config):
        prior += f" (M={config.prior.num_exemplars}"
        prior += (
            f", K={config.retrieval.num_neighbours}, {config.retrieval.search} search)" if uses_table(config) else ")"
        )
    devices = f"{setup.mesh.size} {jax.default_backend()} device{'s' if setup.mesh.size > 1 else ''}"
    if jax.process_count() > 1:
        devices += f" of {jax.process_count()} processes"
    data_text = f"{config.data.name} {' / '.join(map(str, sizes))} images of {height}x{width}x{channels}"
    return f"{data_text}, {config.model.architecture}, {prior}, {devices} -> {setup.workdir}"


def train(config: Any, workdir: Path) -> dict:
    """Train to the end, or go on from the last checkpoint; evaluate the best parameters; return results.json."""
    setup = prepare(config, workdir)
    print(f"{describe(setup)}\n{setup.store.describe()}", flush=True)
    checkpoints = Checkpoints(workdir)
    state, spent = _start(setup, checkpoints)
    stopwatch = Stopwatch(spent)
    writer = metrics.MetricsWriter(workdir, int(state.step)) if sharding.is_main() else metrics.NoWriter()
    try:
        state = _loop(setup, state, checkpoints, writer, stopwatch)
        checkpoints.wait()
        return _finish(setup, state, checkpoints, writer, stopwatch.spent())
    finally:
        writer.close()
        checkpoints.close()


def _start(setup: Setup, checkpoints: Checkpoints) -> tuple[TrainState, dict]:
    """The last saved state and its checkpoint's meta, or a fresh state with its table filled (Algorithm 1)."""
    config, mesh, num_train = setup.config, setup.mesh, len(setup.store)
    init = lambda: init_state(config, setup.model, setup.optimizer)  # noqa: E731
    like = sharding.shapes(mesh, jax.eval_shape(init))  # a run that goes on compiles no initialisation
    restored = checkpoints.restore_latest(lambda meta: _with_tables(setup, like, meta.get("rows", num_train)))
    if restored is not None:
        state, meta = restored
        if meta["images"] != setup.checksum:
            raise UserError(f"--workdir={setup.workdir} holds a run on other training images: choose another")
        print(f"going on from step {int(state.step)} in {setup.workdir}")
        resize = functools.partial(sharding.resize, mesh, num_rows=sharding.round_up(num_train, mesh))
        tables = jax.tree.map(resize, (state.table, state.indexed))
        return state.replace(table=tables[0], indexed=tables[1]), meta
    state = jax.jit(init, out_shardings=state_shardings(mesh))()  # one compilation instead of one for each tensor
    if uses_table(config):
        table = setup.evaluator.encode_all(state.params, setup.store)
        indexed = (jnp.copy(table), jnp.copy(table)) if uses_scann(config) else None
        state = state.replace(table=table, indexed=indexed)
    return state, {}


def _with_tables(setup: Setup, state: TrainState, num_rows: int) -> TrainState:
    """`state` with tables of so many rows: those of a checkpoint are rounded up to the devices that it was made on."""
    if not uses_table(setup.config):
        return state
    fits = num_rows % setup.mesh.size == 0
    place = sharding.part(setup.mesh) if fits else sharding.whole(setup.mesh)
    table = jax.ShapeDtypeStruct((num_rows, setup.config.model.latent_dim), jnp.float32, sharding=place)
    return state.replace(table=table, indexed=(table, table) if uses_scann(setup.config) else None)


def _meta(setup: Setup, stopwatch: Stopwatch) -> dict:
    """What a checkpoint says besides the state."""
    rows = sharding.round_up(len(setup.store), setup.mesh)
    return {**stopwatch.spent(), "images": setup.checksum, "rows": rows}


def _loop(setup: Setup, state: TrainState, checkpoints: Checkpoints, writer, stopwatch: Stopwatch) -> TrainState:
    """Epochs until the last one or until the validation ELBO has stopped improving."""
    config, per_epoch = setup.config, setup.steps_per_epoch
    progress = metrics.Progress(config.train.epochs * per_epoch, config.train.batch_size)
    first = int(state.step) // per_epoch
    feeder = Feeder(config, setup.model, setup.mesh, setup.store, state)
    for epoch in range(first + 1, config.train.epochs + 1):
        if int(state.stopping.bad_epochs) >= config.train.patience:
            print(f"no better validation ELBO for {config.train.patience} epochs: stopped after epoch {epoch - 1}")
            break
        state = _run_epoch(setup, state, epoch, checkpoints, progress, stopwatch, feeder)
        state = _end_epoch(setup, state, epoch, checkpoints, writer, progress, feeder)
        checkpoints.save_latest(int(state.step), state, _meta(setup, stopwatch))
    return state


def _run_epoch(setup: Setup, state: TrainState, epoch: int, checkpoints, progress, stopwatch, feeder) -> TrainState:
    """The steps of an epoch that are still to be taken."""
    config = setup.config
    order = epoch_order(config.seed, epoch, len(setup.store), config.train.batch_size)
    step = int(state.step)
    queue = collections.deque()
    saved = time.monotonic()
    progress.begin(step)
    for index in order[step % setup.steps_per_epoch :]:
        state = feeder.swap_index(state, step)
        state, elbo = setup.train_step(state, feeder(state, step, index))
        step += 1
        queue.append((step, elbo))
        if len(queue) > STEPS_AHEAD:
            progress.show(step, epoch, check_finite(*queue.popleft()))
        # The epoch's last step is saved after its validation.
        if step % setup.steps_per_epoch and _is_due(
            step, time.monotonic() - saved > 60 * config.train.checkpoint_minutes
        ):
            while queue:
                check_finite(*queue.popleft())
            checkpoints.save_latest(step, state, _meta(setup, stopwatch))
            saved = time.monotonic()
    while queue:
        check_finite(*queue.popleft())
    return state


def _is_due(step: int, due: bool) -> bool:
    """Whether to save now. Processes have clocks of their own: now and then they ask the main one's."""
    if jax.process_count() == 1:
        return due
    return step % AGREE_STEPS == 0 and bool(sharding.agree(np.int32(due)))


def check_finite(step: int, elbo: Array | float) -> float:
    """The ELBO as a number; NaN ends the run before it reaches a checkpoint."""
    elbo = float(elbo)
    if not np.isfinite(elbo):
        raise Diverged(f"the ELBO or a gradient is not finite at step {step}; the last good checkpoint is kept")
    return elbo


def _end_epoch(setup: Setup, state: TrainState, epoch: int, checkpoints, writer, progress, feeder) -> TrainState:
    """Validate if it is due, keep the best parameters, log."""
    config, step = setup.config, int(state.step)
    rate = progress.rate(step)
    train_figures = {name: float(value) / setup.steps_per_epoch for name, value in state.sums.items()}
    text = f"epoch {epoch}  train elbo {train_figures['elbo']:.2f}"
    is_due = epoch % config.train.validate_epochs == 0 or epoch == config.train.epochs
    valid = _validate(setup, state, epoch) if is_due else None
    writer.write(
        step, epoch, "train", {**train_figures, **_extra(config, state), **feeder.figures, "images_per_second": rate}
    )
    if valid is not None:
        writer.write(step, epoch, "valid", valid)
        reconstruction, kl = (f"{valid[name]:.2f}" for name in ("reconstruction", "kl"))
        text += f"  valid elbo {valid['elbo']:.2f}  (reconstruction {reconstruction}, kl {kl})"
        state = _keep_best(setup, state, epoch, valid["elbo"], checkpoints)
    progress.epoch(f"{text}  {rate:.0f} images/s")
    refresh = config.retrieval.refresh_epochs
    if state.table is not None and refresh and epoch % refresh == 0:
        state = state.replace(table=setup.evaluator.encode_all(state.params, setup.store))
    return state.replace(sums=jax.tree.map(jnp.zeros_like, state.sums))


def _validate(setup: Setup, state: TrainState, epoch: int) -> dict[str, float]:
    """ELBO and its parts on the validation images, with all exemplars."""
    params = state.best_guess
    means = setup.evaluator.encode_all(params, setup.store) if uses_exemplars(setup.config) else None
    key = stream(jax.random.wrap_key_data(state.key), VALID, epoch)
    valid = mean_elbo(setup.evaluator, params, key, setup.dataset.valid.images, means, len(setup.store))
    check_finite(int(state.step), valid["elbo"])
    return valid


def _keep_best(setup: Setup, state: TrainState, epoch: int, elbo: float, checkpoints: Checkpoints) -> TrainState:
    """Save the parameters if none before were as good, and count the epochs since."""
    stopping = state.stopping.update(
        epoch, elbo, setup.config.optim.kl_warmup_epochs, setup.config.train.validate_epochs
    )
    if int(stopping.best_epoch) == epoch:
        checkpoints.save_best(int(state.step), state.best_guess, {"images": setup.checksum})
    return state.replace(stopping=sharding.replicate(setup.mesh, stopping))


def _extra(config: Any, state: TrainState) -> dict[str, float]:
    if not uses_exemplars(config):
        return {}
    return {"sigma": float(jnp.exp(0.5 * state.params["prior"]["log_var"]))}


def _finish(setup: Setup, state: TrainState, checkpoints: Checkpoints, writer, spent: dict) -> dict:
    """Samples and test figures of the best parameters, results.json."""
    best_step, params, _ = checkpoints.restore_best(state.params)
    epoch = best_step // setup.steps_per_epoch
    run = Run(setup.config, setup.workdir, setup.grey, setup.mesh, setup.model, params, best_step, setup.exemplars)
    gallery.save_samples(stream(run.key, SAMPLES), run)
    save = functools.partial(metrics.update_results, setup.workdir, setup.config, epoch, spent=spent)
    values = evaluate(run, setup.evaluator, save)
    writer.write(best_step, epoch, "test", values)
    return save(values)
