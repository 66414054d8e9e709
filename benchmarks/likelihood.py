"""Time and memory of the log-likelihood of an image, exact and pruned, compared with the rate of a matrix product.

python -m benchmarks.likelihood [--out=FILE.json]                    for several S and N (synthetic means)
python -m benchmarks.likelihood --workdir=runs/mnist --images=200    on a trained run: exact against pruned

The first command needs no data: it uses a model at its real size (--architecture) and N random means. The second scores
the same images with both methods and the same samples. It shows the error of pruning, the audit's estimate of this
error, and the speedup. Variants alternate in one run, because the speed of a shared machine varies. Times are medians.
"""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from benchmarks.flops import image_gflop, square_product
from exvae import config as configs
from exvae import keys, models, run, state
from exvae.evaluation import evaluate, likelihood
from exvae.priors import exemplar
from exvae.scale import sharding

EXEMPLARS = flags.DEFINE_list("exemplars", ["10000", "50000", "100000", "1000000"], "N, numbers of synthetic means")
SAMPLES = flags.DEFINE_list("samples", ["500", "5000"], "S, importance samples")
ARCHITECTURE = flags.DEFINE_string("architecture", "vae", "vae, hvae, convhvae, pixelsnail")
REPEATS = flags.DEFINE_integer("repeats", 9, "measurements of a fast variant; a slow one has at least two")
WORKDIR = flags.DEFINE_string("workdir", "", "folder of a trained run with the exemplar prior")
IMAGES = flags.DEFINE_integer("images", 200, "test images of the run to score")
DATA_DIR = flags.DEFINE_string("data_dir", "", "folder with the data files, if not the run's own")
OUT = flags.DEFINE_string("out", "", "also write the figures to this JSON file")

T = TypeVar("T")


def peak_gib() -> float:
    """The peak memory of the process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Call a function, and return the seconds and its result."""
    began = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - began, result


def product_rate() -> Callable[[], float]:
    """Return a function that measures the rate of the square product in GFLOP/s."""
    call, gflop = square_product()
    return lambda: gflop / timed(call)[0]


def synthetic() -> list[dict[str, Any]]:
    """Measure every N and S, alternating between exact and pruned."""
    rows, rate = [], product_rate()
    rng = np.random.default_rng(0)
    image = jnp.asarray(255 * (rng.random((1, 28, 28, 1)) < 0.2), jnp.uint8)
    mesh = sharding.make_mesh()
    for num_exemplars in map(int, EXEMPLARS.value):
        means = jnp.asarray(rng.normal(size=(num_exemplars, 40)).astype(np.float32))
        for samples in map(int, SAMPLES.value):
            config = configs.get_config()
            config.eval.iwae_samples, config.model.architecture = samples, ARCHITECTURE.value
            model = models.build(config.model, (28, 28, 1))
            params = jax.jit(lambda c=config, m=model: state.init_params(c, m))()
            args = (params, exemplar.components(params["prior"], None, means), jax.random.key(0), image, jnp.arange(1))
            variants = {}
            for method, candidates in (("exact", num_exemplars), ("pruned", config.eval.candidates)):
                scorer = likelihood.make_scorer(config, model, mesh, candidates=candidates).lower(*args).compile()
                variants[method] = scorer, image_gflop(config, model, num_exemplars, candidates), []
                timed(lambda scorer=scorer, args=args: scorer(*args))
            rates, began = [], time.perf_counter()
            for repeat in range(REPEATS.value):
                if repeat >= 2 and time.perf_counter() - began > 30:
                    break
                for scorer, _, times in variants.values():
                    times.append(timed(lambda scorer=scorer, args=args: scorer(*args))[0])
                    rates.append(rate())
            for method, (scorer, gflop, times) in variants.items():
                memory = scorer.memory_analysis()
                seconds = statistics.median(times)
                rows.append(
                    {
                        "exemplars": num_exemplars,
                        "samples": samples,
                        "method": method,
                        "ms_per_image": round(1e3 * seconds, 1),
                        "gflop": round(gflop, 2),
                        "matmul_fraction": round(gflop / seconds / statistics.median(rates), 3),
                        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
                        "arguments_mib": round(memory.argument_size_in_bytes / 2**20, 1),
                    }
                )
                show(rows[-1], header=len(rows) == 1)
    print(f"matrix product {statistics.median(rates):.0f} GFLOP/s; peak of the whole process {peak_gib():.2f} GiB")
    return rows


def show(row: dict[str, Any], header: bool) -> None:
    """Print a row."""
    if header:
        print("        N      S  method   ms/image    GFLOP  of matmul rate  temporary MiB")
    print(
        f"{row['exemplars']:9d}{row['samples']:7d}  {row['method']:7}{row['ms_per_image']:10.1f}{row['gflop']:9.2f}"
        f"{100 * row['matmul_fraction']:15.0f}%{row['temporary_mib']:15.1f}",
        flush=True,
    )


def trained(workdir: Path) -> dict[str, Any]:
    """Compare exact with pruned on test images of a run."""
    here = run.load(workdir, data_dir=DATA_DIR.value)
    config, images = here.config, here.dataset.test.images
    components = exemplar.components(here.params["prior"], None, jnp.asarray(here.means))
    scorers = {
        method: likelihood.make_scorer(config, here.model, here.mesh, candidates=candidates)
        for method, candidates in (("exact", None), ("pruned", config.eval.candidates))
    }
    order = evaluate.subset(config.seed, len(images), IMAGES.value)
    key = keys.stream(here.key, keys.LIKELIHOOD)
    times, scores = {method: [] for method in scorers}, {method: [] for method in scorers}
    rate = product_rate()
    rates = []
    for number, image in enumerate([order[0], *order]):  # the first image twice, because its first call compiles
        for method, scorer in scorers.items():
            args = (here.params, components, key, images[image][None], np.array([image]))
            seconds, score = timed(lambda scorer=scorer, args=args: scorer(*args))
            if number:
                times[method].append(seconds)
                scores[method].append(jax.tree.map(lambda a: float(a[0]), score))
        rates.append(rate())
        if number % 50 == 0 and number:
            print(f"{number} / {len(order)} images", flush=True)
    value = {method: np.array([score.log_likelihood for score in found]) for method, found in scores.items()}
    lost = value["exact"] - value["pruned"]
    audit = np.array([score.loss for score in scores["pruned"]])
    seconds = {method: statistics.median(found) for method, found in times.items()}
    gflop = {"exact": len(here.exemplars), "pruned": config.eval.candidates}
    gflop = {method: image_gflop(config, here.model, len(here.exemplars), count) for method, count in gflop.items()}
    rate_now = statistics.median(rates)
    found = {
        "images": len(order),
        "samples": config.eval.iwae_samples,
        "exemplars": len(here.exemplars),
        "candidates": config.eval.candidates,
        **{f"log_likelihood_{method}": float(found.mean()) for method, found in value.items()},
        "difference_mean": float(lost.mean()),
        "difference_largest": float(lost.max()),
        "difference_smallest": float(lost.min()),
        "audit_mean": float(audit.mean()),
        "audit_largest": float(audit.max()),
        **{f"seconds_{method}": found for method, found in seconds.items()},
        "ratio": seconds["exact"] / seconds["pruned"],
        "matmul_gflop_per_second": rate_now,
        **{f"matmul_fraction_{method}": gflop[method] / seconds[method] / rate_now for method in seconds},
        "peak_gib": peak_gib(),
    }
    for name, figure in found.items():
        print(f"{name:28} {figure:.6g}")
    return found


def main(argv: list[str]) -> None:
    del argv
    found = trained(Path(WORKDIR.value)) if WORKDIR.value else synthetic()
    if OUT.value:
        Path(OUT.value).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    app.run(main)
