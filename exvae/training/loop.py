"""The training loop: epochs, validation, checkpoints, and the final evaluation."""

from __future__ import annotations

import collections
import functools
import time
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from exvae import keys
from exvae.arrays import Array
from exvae.data.batches import epoch_order
from exvae.errors import Diverged
from exvae.evaluation.elbo import mean_elbo
from exvae.evaluation.evaluate import describe as describe_values
from exvae.evaluation.evaluate import evaluate
from exvae.retrieval import table
from exvae.runs import folder
from exvae.runs.checkpoint import Checkpoints
from exvae.runs.progress import Progress, phase
from exvae.runs.trained import TrainedModel
from exvae.runs.writer import MetricsWriter, NoWriter, Writer
from exvae.scale import sharding
from exvae.state import TrainState
from exvae.training import stopping
from exvae.training.feed import Feeder, uses_exemplars, uses_index
from exvae.training.setup import Setup, describe, prepare, start
from exvae.training.stopwatch import Stopwatch
from exvae.uses import gallery

Indices = Int[np.ndarray, " B"]
Stepped = tuple[TrainState, Array | float]  # the state after a step, and the mean ELBO
AGREE_STEPS = 20  # steps between two agreements of several processes on whether to save a checkpoint


class Tools(NamedTuple):
    """The objects that the loop uses besides the setup."""

    checkpoints: Checkpoints
    writer: Writer
    progress: Progress
    stopwatch: Stopwatch
    feeder: Feeder


def main(config: ConfigDict, workdir: Path) -> None:
    """The task `train`: train, evaluate, and print where the results are."""
    results = train(config, workdir)
    print(
        f"best epoch {results['best_epoch']}\n{describe_values(results['test'])}\n"
        f"numbers  {workdir}/results.json  {workdir}/metrics.jsonl  (tensorboard --logdir={workdir})\n"
        f"samples  {workdir}/figures/samples.png"
    )


def train(config: ConfigDict, workdir: Path) -> dict:
    """Train from the start or from the last checkpoint, evaluate the best parameters, and return results.json."""
    setup = prepare(config, workdir)
    chex.clear_trace_counter()  # each run may trace its step once, even if the process has trained other runs
    print(f"{describe(setup)}\n{setup.store.describe()}", flush=True)
    checkpoints = Checkpoints(workdir)
    state, spent = start(setup, checkpoints)
    writer: Writer = MetricsWriter(workdir, int(state.step)) if sharding.is_main() else NoWriter()
    try:
        tools = Tools(
            checkpoints=checkpoints,
            writer=writer,
            progress=Progress(setup.config.train.epochs * setup.steps_per_epoch, setup.config.train.batch_size),
            stopwatch=Stopwatch(spent),
            feeder=Feeder(setup.config, setup.model, setup.mesh, setup.store, state),
        )
        state = _loop(setup, tools, state)
        checkpoints.wait()
        return _finish(setup, tools, state)
    finally:
        writer.close()
        checkpoints.close()


def _loop(setup: Setup, tools: Tools, state: TrainState) -> TrainState:
    """Train until the last epoch, or until the validation ELBO has stopped improving."""
    config = setup.config
    first = int(state.step) // setup.steps_per_epoch
    for epoch in range(first + 1, config.train.epochs + 1):
        if stopping.is_over(state.stopping, config.train.patience):
            print(f"no better validation ELBO for {config.train.patience} epochs: stopped after epoch {epoch - 1}")
            break
        state = _run_epoch(setup, tools, state, epoch, compile_first=epoch == first + 1)
        state = _end_epoch(setup, tools, state, epoch)
        tools.checkpoints.save_latest(int(state.step), state, _meta(setup, tools))
    return state


def _run_epoch(setup: Setup, tools: Tools, state: TrainState, epoch: int, *, compile_first: bool = False) -> TrainState:
    """Take the remaining steps of an epoch."""
    config = setup.config
    order = epoch_order(config.seed, epoch, len(setup.store), config.train.batch_size)
    step = int(state.step)
    queue: collections.deque[tuple[int, Array | float]] = collections.deque()  # steps whose ELBO is not checked yet
    saved = time.monotonic()
    if not compile_first:
        tools.progress.begin(step)
    for index in order[step % setup.steps_per_epoch :]:
        state, elbo = (_first_step if compile_first else _step)(setup, tools, state, step, index)
        step += 1
        if compile_first:  # the time left is estimated from the steps after it
            tools.progress.begin(step)
            compile_first = False
        queue.append((step, elbo))
        if len(queue) > sharding.STEPS_AHEAD:
            tools.progress.show(step, epoch, check_finite(*queue.popleft()))
        # After the last step of an epoch, validation comes before the checkpoint.
        if step % setup.steps_per_epoch and _is_due(
            step, time.monotonic() - saved > 60 * config.train.checkpoint_minutes
        ):
            while queue:
                check_finite(*queue.popleft())
            tools.checkpoints.save_latest(step, state, _meta(setup, tools))
            saved = time.monotonic()
    while queue:
        check_finite(*queue.popleft())
    return state


def _step(setup: Setup, tools: Tools, state: TrainState, step: int, index: Indices) -> Stepped:
    """Take one step. The result is not waited for."""
    state = tools.feeder.swap_index(state, step)
    return setup.train_step(state, tools.feeder(state, step, index))


def _first_step(setup: Setup, tools: Tools, state: TrainState, step: int, index: Indices) -> Stepped:
    """Like `_step`, but wait for the result, and say what takes so long."""
    state = tools.feeder.swap_index(state, step)
    with phase("building the index" if uses_index(setup.config) else "choosing the exemplars"):
        batch = tools.feeder(state, step, index)
    with phase("compiling the training step"):
        state, elbo = setup.train_step(state, batch)
    with phase("taking the first step"):  # it starts when the table is encoded
        return state, jax.block_until_ready(elbo)


def _meta(setup: Setup, tools: Tools) -> dict[str, Any]:
    """Return the metadata of a checkpoint."""
    rows = sharding.round_up(len(setup.store), setup.mesh)
    return {**tools.stopwatch.spent(), "images": setup.checksum, "rows": rows}


def _is_due(step: int, due: bool) -> bool:
    """Return whether to save now. Clocks differ, so the main process decides for all, every AGREE_STEPS steps."""
    if jax.process_count() == 1:
        return due
    return step % AGREE_STEPS == 0 and bool(sharding.agree(np.int32(due)))


def check_finite(step: int, elbo: Array | float) -> float:
    """Return the ELBO as a number. Raise Diverged if it is not finite, so that no checkpoint holds NaN."""
    value = float(elbo)
    if not np.isfinite(value):
        raise Diverged(f"the ELBO or a gradient is not finite at step {step}; the last good checkpoint is kept")
    return value


def _end_epoch(setup: Setup, tools: Tools, state: TrainState, epoch: int) -> TrainState:
    """Validate, save the best parameters, log and refresh the table. Skip validation and refresh if not due."""
    config, step = setup.config, int(state.step)
    rate = tools.progress.rate(step)
    train_metrics = {name: float(value) / setup.steps_per_epoch for name, value in state.sums.items()}
    text = f"epoch {epoch}  train elbo {train_metrics['elbo']:.2f}"
    is_due = epoch % config.train.validate_epochs == 0 or epoch == config.train.epochs
    tools.progress.pause()
    with phase("validating"):
        valid = _validate(setup, state, epoch) if is_due else None
    others = {**_sigma(config, state), **tools.feeder.metrics, "images_per_second": rate}
    tools.writer.write(step, epoch, "train", {**train_metrics, **others})
    if valid is not None:
        tools.writer.write(step, epoch, "valid", valid)
        reconstruction, kl = (f"{valid[name]:.2f}" for name in ("reconstruction", "kl"))
        text += f"  valid elbo {valid['elbo']:.2f}  (reconstruction {reconstruction}, kl {kl})"
        state = _keep_best(setup, tools, state, epoch, valid["elbo"])
    tools.progress.epoch(f"{text}  {rate:.0f} images/s")
    encode_all = functools.partial(setup.evaluator.encode_all, state.params, setup.store)
    refreshed = table.refresh(state.table, encode_all, epoch=epoch, every=config.retrieval.refresh_epochs)
    return state.replace(table=refreshed, sums=jax.tree.map(jnp.zeros_like, state.sums))


def _validate(setup: Setup, state: TrainState, epoch: int) -> dict[str, float]:
    """Compute the ELBO, reconstruction and KL of the validation images, with all exemplars."""
    params = state.best_guess
    means = setup.evaluator.encode_all(params, setup.store) if uses_exemplars(setup.config) else None
    key = keys.stream(jax.random.wrap_key_data(state.key), keys.VALID, epoch)
    components = setup.evaluator.components(params, means, len(setup.store))
    valid = mean_elbo(key, setup.evaluator, params, setup.dataset.valid.images, components)
    check_finite(int(state.step), valid["elbo"])
    return valid


def _keep_best(setup: Setup, tools: Tools, state: TrainState, epoch: int, elbo: float) -> TrainState:
    """Save the parameters if they are the best so far, and update the early stopping record."""
    config = setup.config
    warmup, every = config.optim.kl_warmup_epochs, config.train.validate_epochs
    new = stopping.update(state.stopping, epoch, elbo, warmup_epochs=warmup, every=every)
    if int(new.best_epoch) == epoch:
        tools.checkpoints.save_best(int(state.step), state.best_guess, {"images": setup.checksum})
    return state.replace(stopping=sharding.replicate(setup.mesh, new))


def _sigma(config: ConfigDict, state: TrainState) -> dict[str, float]:
    """Return sigma of an exemplar prior, for the log."""
    return {"sigma": float(jnp.exp(0.5 * state.params["prior"]["log_var"]))} if uses_exemplars(config) else {}


def _finish(setup: Setup, tools: Tools, state: TrainState) -> dict:
    """Draw samples with the best parameters, evaluate them on the test images, and write results.json."""
    spent = tools.stopwatch.spent()
    best = tools.checkpoints.restore_best(state.params)
    assert best is not None, "the last epoch is always validated, so there is a best checkpoint"
    best_step, params, _ = best
    epoch = best_step // setup.steps_per_epoch
    trained = TrainedModel(
        config=setup.config,
        workdir=setup.workdir,
        grey=setup.grey,
        mesh=setup.mesh,
        model=setup.model,
        params=params,
        step=best_step,
        exemplars=setup.exemplars,
    )
    with phase("drawing samples"):
        gallery.save_samples(keys.stream(trained.key, keys.SAMPLES), trained)
    save = functools.partial(folder.update_results, setup.workdir, setup.config, epoch, spent=spent)
    values = evaluate(trained, setup.evaluator, save)
    tools.writer.write(best_step, epoch, "test", values)
    return save(values)
