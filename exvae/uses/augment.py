"""Data augmentation: train a classifier on real images, and on new images that a trained model draws around them."""

from __future__ import annotations

import collections
import glob
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from exvae import data
from exvae.data.batches import epoch_order
from exvae.distributions import to_unit
from exvae.errors import UserError
from exvae.runs import figures, progress
from exvae.runs.checkpoint import Checkpoints
from exvae.runs.folder import write_json
from exvae.runs.records import Records, fingerprint
from exvae.runs.trained import TrainedModel
from exvae.scale import sharding
from exvae.uses import generate
from exvae.uses.classifier import (
    Classifier,
    Source,
    State,
    Step,
    init_state,
    make_optimizer,
    make_source,
    make_step,
    predict,
)

SHOWN = 100  # largest number of misclassified images in the figure
SAVE_SECONDS = 60  # save a checkpoint at the end of an epoch if the last one is older than this
# Fields of config.augment that must be equal in runs that are compared in a plot.
SAME = ("split", "hidden_dim", "epochs", "batch_size", "learning_rate", "label_smoothing")


def train_network(
    run: TrainedModel,
    source: Source,
    start: State,
    train_step: Step,
    *,
    seed: int,
    text: str,
    folder: Path,
) -> tuple[State, float]:
    """Train one classifier, or continue from the checkpoint in `folder`.

    Args:
      start: the initial state.
      text: beginning of all printed lines.
      folder: folder for checkpoints.

    Returns:
      The last state, and the seconds of training.
    """
    options = run.config.augment
    n, size = len(source.labels), options.batch_size
    key = jax.random.fold_in(jax.random.key(seed), 1)
    fresh = sharding.replicate(run.mesh, start)
    checkpoints = Checkpoints(folder)
    try:
        state, meta = checkpoints.restore_latest(lambda meta: fresh) or (fresh, {"seconds": 0.0})
        if int(state.step):
            print(f"{text}: resuming from epoch {int(state.step) // (n // size)}", flush=True)
        saved = time.monotonic()
        began = saved - meta["seconds"]
        countdown = progress.Countdown(options.epochs * n, text)
        queue: collections.deque[Array] = collections.deque()
        for epoch in range(int(state.step) // (n // size), options.epochs):
            for number, index in enumerate(epoch_order(seed, epoch, n, size)):
                state, loss = train_step(state, run.params, source, key, sharding.split(run.mesh, index))
                queue.append(loss)
                last = number + 1 == n // size
                while len(queue) > (0 if last else sharding.STEPS_AHEAD):
                    if not np.isfinite(float(queue.popleft())):
                        raise FloatingPointError(f"{text}: the loss is not finite in epoch {epoch + 1}")
                countdown.show(epoch * n + (number + 1) * size)
            if time.monotonic() - saved > SAVE_SECONDS:
                checkpoints.save_latest(int(state.step), state, {"seconds": time.monotonic() - began})
                saved = time.monotonic()
        countdown.end()
    finally:
        checkpoints.close()
    return state, time.monotonic() - began


def main(run: TrainedModel) -> None:
    """Run the task `augment`: classifiers for every lambda, their errors, a plot, and misclassified images."""
    options, grey = run.config.augment, run.grey
    if any(part.labels is None for part in vars(grey).values()):
        raise UserError("augmentation needs labels, and these images have no labels")
    known = data.join(grey.train, grey.valid) if options.split == "test" else grey.train
    held_out = getattr(grey, options.split)
    if options.batch_size > len(known) or options.batch_size % run.mesh.size:
        rule = f"at most {len(known)} (the training images) and a multiple of {run.mesh.size} (the devices)"
        raise UserError(f"config.augment.batch_size={options.batch_size} must be {rule}")
    print(
        f"{run.workdir}: {run.config.prior.name} prior, 2x{options.hidden_dim} classifier, {len(known)} images, "
        f"{options.epochs} epochs; error on {len(held_out)} images of {options.split}",
        flush=True,
    )
    parts = [known.images, known.labels, held_out.images, held_out.labels]
    settings = {name: options[name] for name in SAME} | {"data": fingerprint(parts)}
    settings_here = settings | {"params": fingerprint(run.params)}
    records = Records(run.workdir, settings_here, folder="augmentation", key="network")
    try:
        found = train_networks(run, known, held_out, records)
    finally:
        records.close()
    results = {"prior": run.config.prior.name, "settings": settings, "errors": summarise(found)}
    write_json(results_path(run.workdir, options.split), results)
    for line in results["errors"]:
        deviation = "" if line["std"] is None else f" ± {100 * line['std']:.2f} (standard deviation)"
        print(f"lambda {line['lambda']:g}: {options.split} error {100 * line['mean']:.2f} %{deviation}")
    save_figures(run, results, found, held_out)


def train_networks(
    run: TrainedModel, known: data.Split, held_out: data.Split, records: Records
) -> list[list[dict[str, Any]]]:
    """Train the networks that have no record yet.

    Returns:
      For every lambda, the records of its networks.
    """
    options = run.config.augment
    # Labels may be any integers. The classifier numbers the classes that occur.
    classes, numbers = np.unique(np.concatenate([known.labels, held_out.labels]), return_inverse=True)
    known = data.Split(known.images, numbers[: len(known)])
    classifier = Classifier(options.hidden_dim, len(classes))
    optimizer = make_optimizer(run.config, options.epochs * (len(known) // options.batch_size))
    source: Source | None = None
    found: list[list[dict[str, Any]]] = []
    for lambda_ in dict.fromkeys(map(float, options.lambdas)):
        train_step = make_step(run.config, classifier, run.model, optimizer, lambda_=lambda_)
        found.append([])
        for seed in range(options.networks):
            name = f"lambda={lambda_},network={seed}"
            folder = records.path.with_name(f"{records.path.stem}-{name}")
            record = records.get(name)
            if record is None:
                text = f"lambda {lambda_:g}, network {seed + 1} of {options.networks}"
                if source is None:
                    with progress.phase(f"encoding {len(known):,} images"):
                        source = make_source(run, known)
                start = init_state(jax.random.key(seed), classifier, optimizer, run.model.image_shape)
                state, seconds = train_network(run, source, start, train_step, seed=seed, text=text, folder=folder)
                labels = classes[predict(classifier, state.params, held_out.images)]
                wrong = np.flatnonzero(labels != held_out.labels)
                record = {"network": name, "lambda": lambda_, "error": len(wrong) / len(labels), "seconds": seconds}
                record |= {"wrong": wrong.tolist(), "predicted": labels[wrong].tolist()}
                records.add([record])
                print(f"{text}: error {100 * record['error']:.2f} %", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            found[-1].append(record)
    return found


def summarise(found: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Compute the mean and standard deviation of the errors, over the networks of each lambda."""
    lines = []
    for networks in found:
        errors = [record["error"] for record in networks]
        std = float(np.std(errors, ddof=1)) if len(errors) > 1 else None
        lines.append({"lambda": networks[0]["lambda"], "mean": float(np.mean(errors)), "std": std, "errors": errors})
    return sorted(lines, key=lambda line: line["lambda"])


def lines_of(results: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Return the lambdas, and the errors and their standard deviations in percent."""
    errors = results["errors"]
    return (
        [line["lambda"] for line in errors],
        [100 * line["mean"] for line in errors],
        [100 * (line["std"] or 0.0) for line in errors],
    )


def results_path(workdir: Path, split: str) -> Path:
    """Return the path of the file with the errors of a run."""
    return workdir / f"augment_{split}.json"


def save_figures(
    run: TrainedModel, results: dict[str, Any], found: list[list[dict[str, Any]]], held_out: data.Split
) -> None:
    """Plot the error over lambda, of this run and of others (Figure 6 of the paper), and misclassified images."""
    options, folder = run.config.augment, run.workdir / "figures"
    curves = {run.workdir: results}
    others = [Path(folder) for folder in sorted(glob.glob(options.compare))] if options.compare else []
    if options.compare and not others:
        print(f"config.augment.compare={options.compare} matches no folder")
    for other in others:
        if other.resolve() == run.workdir.resolve():
            continue
        try:
            theirs = json.loads(results_path(other, options.split).read_text())
            lines_of(theirs)
            same = theirs["settings"] == results["settings"] and bool(theirs["prior"])
        except (OSError, ValueError, KeyError, TypeError):
            same = False
        if same:
            curves[other] = theirs
        else:
            print(f"{other}: no augmentation results with the same data and settings; left out of the plot")
    path, names = folder / f"lambda_{options.split}.png", [workdir.name for workdir in curves]
    path.unlink(missing_ok=True)  # it may be from an earlier command with other settings
    if max(len(curve["errors"]) for curve in curves.values()) > 1:
        lines = {
            f"{workdir.name if names.count(workdir.name) == 1 else workdir} ({curve['prior']})": lines_of(curve)
            for workdir, curve in curves.items()
        }
        figures.save_lines(path, lines, "lambda, the weight of real images", f"{options.split} error, %")
        print(f"figure   {path}")
    best = min(found, key=lambda networks: np.mean([record["error"] for record in networks]))[0]
    path = folder / f"misclassified_{options.split}.png"
    path.unlink(missing_ok=True)
    if best["wrong"] and held_out.labels is not None:
        wrong = best["wrong"][:SHOWN]
        captions = [f"{held_out.labels[i]} as {label}" for i, label in zip(wrong, best["predicted"], strict=False)]
        figures.save_captioned(path, np.asarray(to_unit(held_out.images[wrong])), captions, columns=min(10, len(wrong)))
        print(f"figure   {path}")
    print(f"numbers  {results_path(run.workdir, options.split)}")


def batches(
    key: Array,
    run: TrainedModel,
    images: UInt8[np.ndarray, "n H W C"],
    labels: Shaped[np.ndarray, " labels"],
    *,
    size: int,
    real: float,
) -> Iterator[tuple[Float[np.ndarray, "B H W C"], Shaped[np.ndarray, " B"]]]:
    """Return an endless iterator over batches (x, y) of shuffled epochs.

    Args:
      size: the batch size.
      real: the probability that an image is used itself. Otherwise a new image with the same label replaces it.
    """
    if len(labels) != len(images):
        raise UserError(f"{len(labels)} labels for {len(images)} images")
    if not 0 <= real <= 1 or not 1 <= size <= len(images):
        raise UserError(f"real={real} must lie in 0..1 and batch_size={size} in 1..{len(images)}")

    def endless() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        key_order, key_steps = jax.random.split(key)
        seed, step, epoch = int(jax.random.bits(key_order)), 0, 0
        while True:
            for index in epoch_order(seed, epoch, len(images), size):
                key_new, key_real = jax.random.split(jax.random.fold_in(key_steps, step))
                keep = np.asarray(jax.random.bernoulli(key_real, real, (size, 1, 1, 1)))
                new = generate.around(key_new, run, images[index])
                yield np.where(keep, to_unit(images[index]), new), labels[index]
                step += 1
            epoch += 1

    return endless()
