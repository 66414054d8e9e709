"""Uses of the latent means: classification, plots of the latent space, and the exemplars that explain an image."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt8

from exvae import data
from exvae.data.batches import map_batches, padded_batches
from exvae.distributions import LOG_2PI, to_unit
from exvae.encoding import encode
from exvae.errors import UserError
from exvae.evaluation.elbo import active_units
from exvae.evaluation.pixels import nearest_distance
from exvae.priors.parzen import exemplar_log_prob
from exvae.retrieval import exact
from exvae.runs import figures, outputs
from exvae.runs.folder import write_json
from exvae.runs.progress import phase
from exvae.runs.trained import TrainedModel
from exvae.uses import generate

BATCH = 500  # images per batch of a search
KS = (3, 5, 7, 9, 11, 13, 15)  # numbers of neighbours to try
EXPLAINED = 8  # images in the figure of explanations, unless config.represent.explain selects them
GATHERED = 2**22  # values of neighbours' latent means in memory at a time


@functools.partial(jax.jit, static_argnames="k")
def _nearest(queries: Float[Array, "B D"], table: Float[Array, "N D"], k: int) -> Int[Array, "B K"]:
    return exact.best_of(*exact.nearest_of(queries, table, jnp.arange(len(table)), k), k)


@functools.partial(jax.jit, static_argnames="ks")
def _classes(
    queries: Float[Array, "B D"], table: Float[Array, "N D"], labels: Int[Array, " N"], ks: tuple[int, ...]
) -> Int[Array, "k B"]:
    """Return for every k the class of each query."""
    return vote(labels[_nearest(queries, table, max(ks))], ks)


def vote(labels: Int[Array, "B K"], ks: tuple[int, ...]) -> Int[Array, "k B"]:
    """Return for every k the most frequent of the first k labels. In a tie, the smallest label wins."""
    same = labels[:, :, None] == labels[:, None, :]  # (B, K, K)
    winners = []
    for k in ks:
        counts = jnp.sum(same[:, :k, :k], axis=-1)  # how often each neighbour's label occurs
        most = counts == jnp.max(counts, axis=-1, keepdims=True)
        winners.append(jnp.min(jnp.where(most, labels[:, :k], jnp.iinfo(jnp.int32).max), axis=-1))
    return jnp.stack(winners)


def knn_errors(
    known: Float[np.ndarray, "N D"],
    known_labels: Int[np.ndarray, " N"],
    queries: Float[np.ndarray, "n D"],
    labels: Int[np.ndarray, " n"],
    ks: tuple[int, ...] = KS,
) -> dict[int, float]:
    """Return for every k the fraction of queries whose k nearest known points vote for another label."""
    ks = tuple(k for k in ks if k <= len(known))
    if not ks:
        raise UserError(f"kNN classification needs at least {KS[0]} known images, not {len(known)}")
    table, table_labels, wrong = jnp.asarray(known), jnp.asarray(known_labels), np.zeros(len(ks))
    for start, batch in padded_batches(queries, BATCH):
        found = _classes(batch, table, table_labels, ks)
        truth = labels[start : start + BATCH]
        wrong += np.sum(np.asarray(found)[:, : len(truth)] != truth, axis=1)
    return {k: float(count / len(queries)) for k, count in zip(ks, wrong, strict=True)}


def classify(means: dict[str, np.ndarray], dataset: data.Dataset) -> dict[str, Any]:
    """Compute kNN errors as in Table 4 of the paper: choose k on valid with train, then test with train+valid."""
    labels = {name: part.labels for name, part in vars(dataset).items()}
    if any(part is None for part in labels.values()):
        raise UserError("kNN classification needs labels, and these images have none")
    valid = knn_errors(means["train"], labels["train"], means["valid"], labels["valid"])
    known, known_labels = (np.concatenate([parts["train"], parts["valid"]]) for parts in (means, labels))
    test = knn_errors(known, known_labels, means["test"], labels["test"])
    best = min(valid, key=lambda k: valid[k])
    return {"valid": valid, "test": test, "k": best, "error": test[best]}


class Explanation(NamedTuple):
    """The exemplars nearest to the code of each image, and the fraction of p(z|X) that comes from each."""

    index: Int[np.ndarray, "n K"]  # type: ignore[assignment]  # hides tuple.index, which is not needed here
    responsibility: Float[np.ndarray, "n K"]  # r(z|x_n) / sum_m r(z|x_m) at z = mu(x), over all exemplars m


@functools.partial(jax.jit, static_argnames="k")
def _explain(z: Float[Array, "B D"], means: Float[Array, "N D"], log_var: Float[Array, ""], k: int) -> Any:
    index = _nearest(z, means, k)
    squares = jnp.sum(jnp.square(z[:, None] - means[index]), axis=-1)  # (B, K)
    constant = 0.5 * z.shape[1] * (LOG_2PI + log_var)
    log_sum = exemplar_log_prob(z, means, log_var, count=1.0)  # log sum_m r(z|x_m)
    return index, jnp.exp(-0.5 * squares * jnp.exp(-log_var) - constant - log_sum[:, None])


def explain(run: TrainedModel, images: UInt8[np.ndarray, "n H W C"], k: int) -> Explanation:
    """Find the k exemplars with the largest responsibilities for each image, in decreasing order."""
    if not run.prior.USES_EXEMPLARS:
        raise UserError(f"the {run.config.prior.name} prior has no exemplars to explain an image with")
    if not 1 <= k <= len(run.exemplars):
        raise UserError(f"k={k} must lie in 1..{len(run.exemplars)} (the exemplars)")
    means = jnp.asarray(run.means)
    size = int(np.clip(GATHERED // (k * means.shape[1]), 1, BATCH))
    z = np.asarray(encode(run.mesh, run.model, run.params, images).mean)
    log_var = run.params["prior"]["log_var"]
    return Explanation(*map_batches(lambda _, batch: _explain(batch, means, log_var, k), z, size))


def memorisation(key: Array, run: TrainedModel, count: int) -> dict[str, Float[np.ndarray, " n"]]:
    """Compute pixel distances to the nearest training image, for samples and three kinds of reference images.

    The mean of a decoder is smoother than a real image, and therefore closer to all images. Compare samples with
    reconstructions for this reason. Reconstructions of training images show the distances of a model that copies.
    """
    key_samples, *keys = jax.random.split(key, 3)
    train, test = (
        images[generate.pick(key, np.arange(len(images)), count)]
        for key, images in zip(keys, (run.grey.train.images, run.grey.test.images), strict=True)
    )
    pictures = {
        "samples": generate.sample(key_samples, run, count).images,
        "held-out images, reconstructed": generate.reconstruct(run, test),
        "training images, reconstructed": generate.reconstruct(run, train),
        "held-out images": np.asarray(to_unit(test)),
    }
    table = jnp.asarray(run.grey.train.images)
    return {name: nearest_distance(images, table) for name, images in pictures.items()}


def main(run: TrainedModel, out: str = "") -> None:
    """Run the task `represent`: kNN errors, t-SNE, active units, explanations, memorisation; save latent means."""
    options = run.config.represent
    folder = run.workdir / "figures"
    num_test = len(run.grey.test)
    explained = np.unique(np.linspace(0, num_test - 1, EXPLAINED, dtype=int))
    if options.explain:
        explained = np.asarray(options.explain)
    if max(explained) >= num_test:
        raise UserError(f"config.represent.explain: there is no test image {max(explained)}, only 0..{num_test - 1}")
    parts = vars(run.grey)
    with phase(f"encoding {sum(map(len, parts.values())):,} images"):
        means = {
            name: np.asarray(encode(run.mesh, run.model, run.params, part.images).mean) for name, part in parts.items()
        }
    binary = encode(run.mesh, run.model, run.params, run.dataset.test.images).mean  # as in --task=evaluate
    results: dict[str, Any] = {"active_units": active_units(binary), "latent_dim": run.model.latent_dim}
    print(f"active units {results['active_units']} of {results['latent_dim']}", flush=True)

    try:
        results["knn"] = knn = classify(means, run.grey)
        errors = "  ".join(f"k={k} {100 * error:.2f} %" for k, error in knn["test"].items())
        print(
            f"kNN test error  {errors}\n{100 * knn['error']:.2f} % with k={knn['k']}, the best on validation",
            flush=True,
        )
    except UserError as error:
        print(f"{error}: left out")

    with phase("distances to the training images"):
        distances = memorisation(jax.random.key(run.config.seed), run, options.memorisation_images)
    results["memorisation"] = {name: float(np.median(values)) for name, values in distances.items()}
    figures.save_histograms(folder / "memorisation.png", distances, "distance to the nearest training image")
    medians = "  ".join(f"{name} {value:.2f}" for name, value in results["memorisation"].items())
    print(f"median distance to the nearest training image: {medians}", flush=True)

    if run.prior.USES_EXEMPLARS:
        results["explanations"] = save_explanations(run, explained, folder / "explanations.png")
    write_json(run.workdir / "represent.json", results)
    labels = {f"{name}_labels": part.labels for name, part in parts.items() if part.labels is not None}
    outputs.save(out or str(run.workdir / "latents.npz"), {}, means | labels)
    if options.tsne_images:
        some = generate.pick(jax.random.key(run.config.seed), np.arange(num_test), options.tsne_images)
        classes = run.grey.test.labels
        with phase(f"t-SNE of {len(some):,} images"):
            save_tsne(means["test"][some], None if classes is None else classes[some], folder / "tsne.png")
    print(f"figures  {folder}/*.png\nnumbers  {run.workdir}/represent.json")


def save_explanations(run: TrainedModel, index: Int[np.ndarray, " n"], path: Path) -> list[dict[str, Any]]:
    """Write rows of a test image, its reconstruction and the exemplars that explain it with their responsibilities.

    Returns:
      The exemplars and responsibilities of each image, for represent.json.
    """
    images = run.grey.test.images[index]
    found = explain(run, images, min(10, len(run.exemplars)))
    sources = to_unit(run.exemplars.images[found.index])  # (n, 10, H, W, C)
    rows = np.concatenate([to_unit(images)[:, None], generate.reconstruct(run, images)[:, None], sources], axis=1)
    captions = [
        caption
        for number, weights in zip(index, found.responsibility, strict=True)
        for caption in (f"test {number}", "rec.", *(f"{value:.3f}" for value in weights))
    ]
    marked = np.tile(np.arange(rows.shape[1]) == 0, len(rows))
    figures.save_captioned(path, rows.reshape(-1, *images.shape[1:]), captions, columns=rows.shape[1], marked=marked)
    return [
        {"image": int(number), "exemplars": near.tolist(), "responsibilities": np.round(weights, 6).tolist()}
        for number, near, weights in zip(index, *found, strict=True)
    ]


def save_tsne(means: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"] | None, path: Path) -> None:
    """Plot the latent means in two dimensions with scikit-learn's t-SNE and its default settings."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # active waiting would make it many times slower on busy cores
    from sklearn.manifold import TSNE

    if len(means) < 2:
        return
    print(f"t-SNE of {len(means)} test images ...", flush=True)
    start = "pca" if min(means.shape) > 1 else "random"
    points = TSNE(perplexity=min(30.0, (len(means) - 1) / 3), init=start, random_state=0).fit_transform(means)
    figures.save_scatter(path, points, labels)
