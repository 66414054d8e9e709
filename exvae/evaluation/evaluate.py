"""The task `evaluate`: test results of a trained model. A killed evaluation resumes from the records of its images."""

from __future__ import annotations

import copy
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Float, Int, UInt8
from ml_collections import ConfigDict

from exvae.arrays import Array
from exvae.encoding import encode
from exvae.evaluation.elbo import Evaluator, active_units, make_evaluator, mean_elbo
from exvae.evaluation.likelihood import Scores, make_scorer
from exvae.keys import LIKELIHOOD, TEST, stream
from exvae.objectives import encoder
from exvae.priors import Prior
from exvae.runs import folder, progress, writer
from exvae.runs.records import Memory, Records, fingerprint
from exvae.runs.trained import TrainedModel
from exvae.scale import sharding


def main(run: TrainedModel) -> None:
    """Run the task `evaluate`: compute the test results of the best parameters and write results.json."""
    workdir = run.workdir
    epoch = run.step // (len(run.dataset.train) // run.config.train.batch_size)
    print(f"{workdir}: {run.config.model.architecture}, {run.config.prior.name} prior, best epoch {epoch}", flush=True)
    save = functools.partial(folder.update_results, workdir, run.config, epoch)
    values = evaluate(run, make_evaluator(run.config, run.model, run.mesh), save)
    save(values)
    writer.append_metrics(workdir, run.step, epoch, "test", values)
    print(f"{describe(values)}\nnumbers  {workdir}/results.json")


def describe(test: dict[str, Any]) -> str:
    """Describe the test results in two or three lines."""
    error = "" if test["log_likelihood_error"] is None else f" ± {test['log_likelihood_error']:.3f}"
    text = (
        f"test  elbo {test['elbo']:.2f}  reconstruction {test['reconstruction']:.2f}  kl {test['kl']:.2f}  "
        f"active units {test['active_units']}\n"
        f"log-likelihood {test['log_likelihood']:.3f}{error} (standard error; {test['num_images']} images, "
        f"{test['iwae_samples']} samples)  {test['bits_per_dim']:.4f} bits/dim"
    )
    if "loss" in test:
        interval = "" if test["loss_low"] is None else f" (95 %: {test['loss_low']:.1e} to {test['loss_high']:.1e})"
        text += (
            f"\npruned: {test['loss']:.1e}{interval} below the value with all {test['exemplars']} exemplars (audit); "
            f"largest loss {test['loss_largest']:.1e}; candidates doubled for {test['images_doubled']} images"
        )
    return text


def evaluate(
    run: TrainedModel, evaluator: Evaluator, save: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """Compute the values under `test` in results.json.

    Args:
      save: called with the values that are quick to compute, if there is no results.json yet.
    """
    config, test = run.config, run.dataset.test
    means, count = None, 0
    if run.prior.USES_EXEMPLARS:  # split over the devices as in validation, so that both share one compiled function
        with progress.phase(f"encoding {len(run.exemplars):,} exemplars"):
            count = len(run.means)
        padding = sharding.round_up(count, run.mesh) - count
        means = sharding.split(run.mesh, np.pad(run.means, ((0, padding), (0, 0))))
    components = evaluator.components(run.params, means, count)
    values: dict[str, Any] = {}
    with progress.phase("ELBO of the test images"):
        values |= mean_elbo(stream(run.key, TEST), evaluator, run.params, test.images, components)
        values["exemplars"] = count
        values["active_units"] = active_units(encode(run.mesh, run.model, run.params, test.images).mean)
    if not (run.workdir / "results.json").exists():
        save(values)
    records = open_records(run)
    try:
        values |= log_likelihood(run, records)
        seconds = scoring_seconds(run, records)
    finally:
        records.close()
    # results.json holds the last evaluation. Each kind of evaluation also has a summary next to its records.
    if isinstance(records, Records):
        summary = {"eval": config.eval.to_dict(), "test": values, "seconds": seconds}
        folder.write_json(records.path.with_suffix(".json"), summary)
    return values


SCORES = ("log_likelihood", "excess", "loss", "candidates")  # values in the record of an image


def open_records(run: TrainedModel) -> Memory:
    """Open the records of the images scored so far. Only the main process has the file. It sends them to the others."""
    records = Records(run.workdir, settings_of(run)) if sharding.is_main() else Memory()
    if jax.process_count() > 1:
        nothing = dict.fromkeys(SCORES, math.nan)
        lines = [records.get(image) or nothing for image in range(len(run.dataset.test))]
        found = sharding.agree(np.array([[record[name] for name in SCORES] for record in lines], np.float32))
        if not sharding.is_main():
            known = np.flatnonzero(~np.isnan(found[:, 0])).tolist()
            rows = [(*found[i, :-1].tolist(), int(found[i, -1])) for i in known]
            records.add([{"image": i, **dict(zip(SCORES, r, strict=True))} for i, r in zip(known, rows, strict=True)])
    return records


def exemplar_means(run: TrainedModel) -> Float[Array, "N D"] | None:
    """Return mu(x_n) on every device, or None if the prior has no exemplars."""
    return sharding.replicate(run.mesh, run.means) if run.prior.USES_EXEMPLARS else None


def settings_of(run: TrainedModel) -> dict[str, Any]:
    """Return everything that a record depends on."""
    options = run.config.eval
    uses_exemplars = run.prior.USES_EXEMPLARS
    settings = {
        "iwae_samples": options.iwae_samples,
        "seed": run.config.seed,
        "test": fingerprint(run.dataset.test.images),
        "params": fingerprint(run.params),
    }
    if uses_exemplars:
        settings |= {"method": options.method, "exemplars": fingerprint(run.exemplars.images)}
    if uses_exemplars and options.method == "pruned":
        settings |= {name: options[name] for name in ("candidates", "audit", "tolerance")}
    return settings


def log_likelihoods(
    run: TrainedModel, images: UInt8[np.ndarray, "n H W C"], num_samples: int
) -> Float[np.ndarray, " n"]:
    """Estimate log p(x) of any images. The audit of each image decides how many candidates it gets."""
    config, memory = copy.deepcopy(run.config), Memory()
    config.eval.iwae_samples = num_samples
    score_images(run, config, images, np.arange(len(images)), memory, quiet=True)
    return np.array([_recorded(memory, image)["log_likelihood"] for image in range(len(images))])


def log_likelihood(run: TrainedModel, records: Memory) -> dict[str, Any]:
    """Estimate the log-likelihood of the test images, and the loss due to pruning."""
    config = run.config
    order = subset(config.seed, len(run.dataset.test), config.eval.num_images)
    score_images(run, config, run.dataset.test.images, order, records)
    found = [_recorded(records, int(image)) for image in order]
    value, loss = (np.array([record[name] for record in found]) for name in ("log_likelihood", "loss"))
    values: dict[str, Any] = {
        "log_likelihood": float(np.mean(value)),
        "log_likelihood_error": standard_error(value),
        "bits_per_dim": float(-np.mean(value) / (math.prod(run.model.image_shape) * math.log(2))),
        "num_images": len(order),
        "iwae_samples": config.eval.iwae_samples,
        "method": config.eval.method,
    }
    if config.eval.method == "pruned" and run.prior.USES_EXEMPLARS:
        mean, error = float(np.mean(loss)), standard_error(loss)
        values |= {
            "loss": mean,
            "loss_low": None if error is None else max(0.0, mean - 1.96 * error),
            "loss_high": None if error is None else mean + 1.96 * error,
            "loss_largest": float(np.max(loss)),
            "images_doubled": sum(record["candidates"] > config.eval.candidates for record in found),
        }
    return values


def scoring_seconds(run: TrainedModel, records: Memory) -> float:
    """Return the seconds spent on the log-likelihood in all sessions. Old records without seconds count as 0."""
    order = subset(run.config.seed, len(run.dataset.test), run.config.eval.num_images)
    return sum(_recorded(records, int(image)).get("seconds", 0.0) for image in order)


def _recorded(records: Memory, image: int) -> dict[str, Any]:
    """Return the record of an image that was scored."""
    record = records.get(image)
    assert record is not None, f"image {image} was not scored"
    return record


def standard_error(values: Float[np.ndarray, " n"]) -> float | None:
    """Return the standard error of the mean, or None for a single value."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values))) if len(values) > 1 else None


def subset(seed: int, num_test: int, num_images: int) -> Int[np.ndarray, " n"]:
    """Return the indices of `num_images` random test images (0: all). A larger subset starts with the smaller ones."""
    order = np.random.default_rng(seed).permutation(num_test)
    return order[: num_images or num_test]


def score_images(
    run: TrainedModel,
    config: ConfigDict,
    images: UInt8[np.ndarray, "n H W C"],
    order: Int[np.ndarray, " m"],
    records: Memory,
    *,
    quiet: bool = False,
) -> None:
    """Score and record the images of `order` that have no final record yet.

    The first pass uses config.eval.candidates. Further passes double the candidates of the images whose audit finds a
    loss above config.eval.tolerance.
    """
    means = exemplar_means(run)
    components = _components(run.model, run.prior, run.params, means)
    num_exemplars = 0 if means is None else len(means)
    first = min(config.eval.candidates, num_exemplars) if config.eval.method == "pruned" else num_exemplars

    def needed(image: int) -> int | None:
        """Return the number of candidates for the next pass over this image, or None if it is done."""
        record = records.get(image)
        if record is None:
            return first
        if record["excess"] <= config.eval.tolerance:  # always true with all exemplars, because the excess is 0
            return None
        return min(2 * record["candidates"], num_exemplars)

    while waiting := {int(i): count for i in order if (count := needed(int(i))) is not None}:
        candidates = min(waiting.values())
        scorer = make_scorer(config, run.model, run.mesh, candidates=candidates)
        index = [image for image, count in waiting.items() if count == candidates]
        text = f"log-likelihood, {candidates} of {num_exemplars} exemplars" if num_exemplars else "log-likelihood"
        _score(
            run.mesh,
            functools.partial(scorer, run.params, components, stream(run.key, LIKELIHOOD)),
            images,
            index,
            candidates=candidates,
            records=records,
            countdown=progress.Countdown(len(index), text, quiet=quiet),
        )


@functools.partial(jax.jit, static_argnums=(0, 1))
def _components(model: nn.Module, prior: Prior, params: dict, means: Float[Array, "N D"] | None) -> Any:
    return prior.components(params["prior"], encoder(model, params), means)


def _score(
    mesh: Mesh,
    score: Callable[[UInt8[Array, "B H W C"], Int[Array, " B"]], Scores],
    images: UInt8[np.ndarray, "n H W C"],
    order: list[int],
    *,
    candidates: int,
    records: Memory,
    countdown: progress.Countdown,
) -> None:
    """Make one pass over the images of `order`. Each device scores one image at a time."""
    for start in range(0, len(order), mesh.size):
        index = np.array(order[start : start + mesh.size], np.int32)
        padded = np.resize(index, mesh.size)
        began = time.monotonic()
        scores = sharding.fetch(score(*sharding.split(mesh, (images[padded], padded))))
        if not np.all(np.isfinite(scores.log_likelihood)):
            bad = padded[~np.isfinite(scores.log_likelihood)][0]
            raise FloatingPointError(f"the log-likelihood of image {bad} is not finite")
        rows = zip(index.tolist(), *(np.minimum(a, 1e30).tolist() for a in scores), strict=False)
        seconds = (time.monotonic() - began) / len(index)
        before = {image: (records.get(image) or {}).get("seconds", 0.0) for image in index.tolist()}
        records.add(
            [
                {"image": image, "log_likelihood": value, "excess": excess, "loss": loss, "candidates": candidates,
                 "seconds": before[image] + seconds}
                for image, value, excess, loss in rows
            ]
        )  # fmt: skip
        countdown.show(start + len(index))
    countdown.end()
