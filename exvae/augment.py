"""Data augmentation: a classifier on real images and on new ones that a trained model draws around them."""

from __future__ import annotations

import glob
import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, Shaped, UInt8

from exvae import data, figures, generate, metrics
from exvae.checkpoint import Checkpoints
from exvae.data.batches import epoch_order, padded_batches
from exvae.distributions import Normal, sample_normal, to_unit
from exvae.errors import UserError
from exvae.models.encoding import encode
from exvae.models.layers import Dense
from exvae.priors import PRIORS
from exvae.records import Records, fingerprint

if TYPE_CHECKING:
    from exvae.run import Run

MOMENTUM, LAST_RATE = 0.9, 0.01  # of SGD; the last rate as a fraction of the first
BATCH = 1000  # images classified at a time
SHOWN = 100  # misclassified images in the figure, at most
SAME = ("split", "hidden_dim", "epochs", "batch_size", "learning_rate", "label_smoothing")  # for runs to be compared


class Classifier(nn.Module):
    """H-H-classes with ReLU; permutation invariant: it sees pixels, not their places."""

    hidden_dim: int
    num_classes: int

    @nn.compact
    def __call__(self, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
        h = x.reshape(len(x), -1)
        for _ in range(2):
            h = nn.relu(Dense(self.hidden_dim)(h))
        return Dense(self.num_classes)(h)


class Source(NamedTuple):
    """What a step draws from, on the devices. The model does not change: its codes are computed once."""

    images: UInt8[Array, "N H W C"]
    labels: Int[Array, " N"]
    codes: Normal  # r(z|x) of every image, or q(z|x) where the prior is not over exemplars


@struct.dataclass
class State:
    """Everything that training a classifier changes."""

    step: Int[Array, ""]
    params: dict
    opt_state: optax.OptState


def synthesize(key: Array, model: nn.Module, params: dict, codes: Normal) -> Float[Array, "B H W C"]:
    """Decoder means at z ~ r(z|x), rounded to the 256 levels of real images. Nothing flows back into the model."""
    key_z, key_x = jax.random.split(key)
    mean = generate.decode(key_x, model, params, sample_normal(key_z, codes), draw=False)
    return jax.lax.stop_gradient(jnp.round(mean * 255.0) * (1.0 / 255.0))


def loss_fn(
    classifier: Classifier,
    params: dict,
    real: Array,
    new: Array | None,
    labels: Array,
    lambda_: float,
    smoothing: float,
) -> Float[Array, ""]:
    """- lambda log p(y|x) - (1 - lambda) log p(y|x~), averaged over the batch; labels smoothed.

    Real and new images pass the network as one batch. With lambda = 1 there are no new ones, with 0 no real ones.
    """
    parts = [(weight, x) for weight, x in ((lambda_, real), (1.0 - lambda_, new)) if weight > 0]
    logits = classifier.apply({"params": params}, jnp.concatenate([x for _, x in parts]))
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classifier.num_classes), smoothing)
    losses = optax.softmax_cross_entropy(logits.reshape(len(parts), *targets.shape), targets)  # (parts, B)
    return sum(weight * jnp.mean(part) for (weight, _), part in zip(parts, losses, strict=True))


def make_optimizer(options: Any, num_steps: int) -> optax.GradientTransformation:
    rate = options.learning_rate
    return optax.sgd(optax.linear_schedule(rate, LAST_RATE * rate, num_steps), momentum=MOMENTUM)


def make_step(classifier: Classifier, model: nn.Module, optimizer, *, lambda_: float, smoothing: float) -> Callable:
    """The compiled step: (state, model's params, source, key, index) -> (state, loss), new images drawn afresh."""

    @jax.default_matmul_precision("highest")
    def step(state: State, model_params: dict, source: Source, key: Array, index: Int[Array, " B"]):
        real, new = to_unit(source.images[index]), None
        if lambda_ < 1:
            codes = jax.tree.map(lambda leaf: leaf[index], source.codes)
            new = synthesize(jax.random.fold_in(key, state.step), model, model_params, codes)
        loss, grads = jax.value_and_grad(
            lambda params: loss_fn(classifier, params, real, new, source.labels[index], lambda_, smoothing)
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


def init_state(key: Array, classifier: Classifier, optimizer, image_shape: tuple[int, ...]) -> State:
    params = classifier.init(key, jnp.zeros((1, *image_shape)))["params"]
    return State(jnp.int32(0), params, optimizer.init(params))


def make_source(run: Run, split: data.Split) -> Source:
    q = encode(run.model, run.params, split.images)
    codes = PRIORS[run.config.prior.name].transition(run.params, jax.tree.map(jnp.asarray, q))
    return Source(jnp.asarray(split.images), jnp.asarray(split.labels), codes)


def predict(classifier: Classifier, params: dict, images: UInt8[np.ndarray, "n H W C"]) -> Int[np.ndarray, " n"]:
    forward = jax.jit(lambda p, x: jnp.argmax(classifier.apply({"params": p}, to_unit(x)), axis=-1))
    parts = [forward(params, batch) for _, batch in padded_batches(images, BATCH)]
    return np.concatenate(jax.device_get(parts))[: len(images)]


def train_network(
    run: Run, source: Source, held_out: data.Split, classifier: Classifier, lambda_: float, seed: int, folder: Path
) -> dict:
    """Train one classifier, going on from `folder` if it was begun there; its error and what it got wrong."""
    options = run.config.augment
    n, batch_size = len(source.labels), options.batch_size
    per_epoch = n // batch_size
    optimizer = make_optimizer(options, options.epochs * per_epoch)
    train_step = make_step(classifier, run.model, optimizer, lambda_=lambda_, smoothing=options.label_smoothing)
    key_init, key = jax.random.split(jax.random.key(seed))
    state = jax.jit(lambda: init_state(key_init, classifier, optimizer, run.model.image_shape))()
    checkpoints = Checkpoints(folder)
    try:
        state, meta = checkpoints.restore_latest(state) or (state, {"seconds": 0.0})
        began = saved = time.monotonic()
        began -= meta["seconds"]
        text = f"lambda {lambda_:g}, network {seed + 1} of {options.networks}"
        countdown = metrics.Countdown(options.epochs * n, text)
        for epoch in range(int(state.step) // per_epoch, options.epochs):
            for index in epoch_order(seed, epoch, n, batch_size):
                state, loss = train_step(state, run.params, source, key, index)
            if not np.isfinite(float(loss)):
                raise FloatingPointError(f"{text}: the loss is not finite in epoch {epoch + 1}")
            countdown.show((epoch + 1) * n)
            if time.monotonic() - saved > 60 * run.config.train.checkpoint_minutes:
                checkpoints.save_latest(int(state.step), state, {"seconds": time.monotonic() - began})
                saved = time.monotonic()
    finally:
        checkpoints.close()
    found = predict(classifier, state.params, held_out.images)
    wrong = np.flatnonzero(found != held_out.labels)
    return {
        "network": f"{lambda_:g}/{seed}",
        "lambda": lambda_,
        "seed": seed,
        "error": len(wrong) / len(found),
        "wrong": wrong.tolist(),
        "predicted": found[wrong].tolist(),
        "seconds": time.monotonic() - began,
    }


def main(run: Run) -> None:
    """The task `augment`: classifiers for every lambda, their errors, the plot over lambda, what the best got wrong."""
    options, grey = run.config.augment, run.grey
    if any(part.labels is None for part in vars(grey).values()):
        raise UserError("augmentation is of labelled images, and these have no labels")
    known = data.join(grey.train, grey.valid) if options.split == "test" else grey.train
    held_out = getattr(grey, options.split)
    if options.batch_size > len(known):
        raise UserError(f"config.augment.batch_size={options.batch_size} exceeds the {len(known)} training images")
    classes = 1 + max(int(part.labels.max()) for part in (known, held_out))
    classifier = Classifier(options.hidden_dim, classes)
    print(
        f"{run.workdir}: {run.config.prior.name} prior, 2x{options.hidden_dim} classifier, {len(known)} images, "
        f"{options.epochs} epochs; error on {len(held_out)} images of {options.split}",
        flush=True,
    )
    source = make_source(run, known)
    settings = {name: options[name] for name in SAME}
    records = Records(
        run.workdir,
        settings | {"params": fingerprint(run.params), "images": fingerprint([known.images, known.labels])},
        folder="augmentation",
        key="network",
    )
    try:
        for lambda_ in map(float, options.lambdas):
            for seed in range(options.networks):
                name = f"{lambda_:g}/{seed}"
                if records.get(name) is not None:
                    continue
                folder = records.path.with_suffix("") / name.replace("/", "-")
                record = train_network(run, source, held_out, classifier, lambda_, seed, folder)
                records.add([record])
                shutil.rmtree(folder)
                print(f"lambda {lambda_:g}, network {seed + 1}: error {100 * record['error']:.2f} %", flush=True)
        found = [
            [records.get(f"{float(lambda_):g}/{seed}") for seed in range(options.networks)]
            for lambda_ in options.lambdas
        ]
    finally:
        records.close()
    summary = summarise(found)
    results = {"prior": run.config.prior.name, "settings": settings, "errors": summary}
    metrics.write_json(results_path(run.workdir, options.split), results)
    for line in summary:
        deviation = "" if line["std"] is None else f" ± {100 * line['std']:.2f} (standard deviation)"
        print(f"lambda {line['lambda']:g}: {options.split} error {100 * line['mean']:.2f} %{deviation}")
    save_figures(run, results, found, held_out)


def summarise(found: list[list[dict]]) -> list[dict]:
    """Mean and standard deviation over the networks of each lambda."""
    lines = []
    for networks in found:
        errors = [record["error"] for record in networks]
        std = float(np.std(errors, ddof=1)) if len(errors) > 1 else None
        lines.append({"lambda": networks[0]["lambda"], "mean": float(np.mean(errors)), "std": std, "errors": errors})
    return sorted(lines, key=lambda line: line["lambda"])


def results_path(workdir: Path, split: str) -> Path:
    return workdir / f"augment_{split}.json"


def save_figures(run: Run, results: dict, found: list[list[dict]], held_out: data.Split) -> None:
    """Error over lambda, with that of other runs beside it (the paper's Figure 6), and misclassified images."""
    options, folder = run.config.augment, run.workdir / "figures"
    curves = {run.workdir: results}
    for other in map(Path, sorted(glob.glob(options.compare))) if options.compare else ():
        path = results_path(other, options.split)
        theirs = json.loads(path.read_text()) if path.is_file() else None
        if other.resolve() == run.workdir.resolve():
            continue
        if theirs is None or theirs["settings"] != results["settings"]:
            print(f"{other}: no augmentation with these settings, left out of the plot")
        else:
            curves[other] = theirs
    if max(len(curve["errors"]) for curve in curves.values()) > 1:
        path = folder / f"lambda_{options.split}.png"
        lines = {
            f"{workdir.name} ({curve['prior']})": tuple(
                [scale * (line[name] or 0.0) for line in curve["errors"]]
                for name, scale in (("lambda", 1.0), ("mean", 100.0), ("std", 100.0))
            )
            for workdir, curve in curves.items()
        }
        figures.save_lines(path, lines, "lambda, the weight of real images", f"{options.split} error, %")
        print(f"figure   {path}")
    best = min(found, key=lambda networks: np.mean([record["error"] for record in networks]))[0]
    if best["wrong"]:
        path = folder / "misclassified.png"
        wrong = best["wrong"][:SHOWN]
        captions = [f"{held_out.labels[i]} as {label}" for i, label in zip(wrong, best["predicted"], strict=False)]
        figures.save_captioned(path, to_unit(held_out.images[wrong]), captions, columns=min(10, len(wrong)))
        print(f"figure   {path}")
    print(f"numbers  {results_path(run.workdir, options.split)}")


def batches(
    key: Array, run: Run, images: UInt8[np.ndarray, "n H W C"], labels: Shaped[np.ndarray, " n"], size: int, real: float
) -> Iterator[tuple[Float[np.ndarray, "B H W C"], Shaped[np.ndarray, " B"]]]:
    """Epochs without end of (x, y), each image itself with probability `real` and else a new one with its label."""
    if len(labels) != len(images):
        raise UserError(f"{len(labels)} labels for {len(images)} images")
    if not 0 <= real <= 1 or not 1 <= size <= len(images):
        raise UserError(f"real={real} must lie in 0..1 and batch_size={size} in 1..{len(images)}")

    def endless() -> Iterator:
        seed, step, epoch = int(jax.random.bits(key)), 0, 0
        while True:
            for index in epoch_order(seed, epoch, len(images), size):
                key_new, key_real = jax.random.split(jax.random.fold_in(key, step))
                keep = np.asarray(jax.random.bernoulli(key_real, real, (size, 1, 1, 1)))
                new = generate.around(key_new, run, images[index])
                yield np.where(keep, to_unit(images[index]), new), labels[index]
                step += 1
            epoch += 1

    return endless()
