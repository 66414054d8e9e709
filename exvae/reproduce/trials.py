"""The trials of the fast recipe in `results/trials/*.json`, and their tables in docs/recipe.md.

python -m exvae.trials                                   writes the tables again
python -m exvae.trials RUN_FOLDER... [--note=TEXT]       adds runs, finished or not
python -m exvae.trials RUN_FOLDER... --likelihood=1000   and computes the log-likelihood of 1000 validation images
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exvae import files, run
from exvae.errors import UserError
from exvae.evaluation import elbo
from exvae.reproduce.paper import NUM_TRAIN
from exvae.reproduce.results import RESULTS, ROOT, table
from exvae.runs import folder

TRIALS, PAGE = RESULTS / "trials", ROOT / "docs" / "recipe.md"
MARK = "<!-- Everything below is made by `python -m exvae.trials` from results/trials/. Do not edit. -->\n"
SIZES = {**NUM_TRAIN, "mnist_5k": 4000}
SAMPLES = 500  # importance samples for the log-likelihood of a trial
GROUPS = (
    "data",
    "model",
    "prior",
    "retrieval",
    "objective",
    "optim",
    "train",
)  # groups of the config that are saved with a trial
HEADER = ("rate", "gradient", "batch", "z", "K", "warm-up", "decay", "average", "note", "epoch 5", "epoch 10", "last",
          "training ELBO", "active units", "log p(x)", "seconds an epoch")  # fmt: skip


def collect(workdir: Path, note: str) -> dict[str, Any]:
    """Read the config and the curves of a run, finished or not."""
    config = folder.read_config(workdir)
    try:
        lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{workdir} has no metrics.jsonl to read ({error})") from error
    curves = {
        split: [(line["epoch"], round(line["elbo"], 3)) for line in lines if line["split"] == split]
        for split in ("train", "valid")
    }
    if not curves["valid"]:
        raise UserError(f"{workdir} was never validated")
    if config["data"]["name"] not in SIZES:
        raise UserError(f"{workdir} is a run on {config['data']['name']}, but the page covers only {', '.join(SIZES)}")
    speeds = sorted(line["images_per_second"] for line in lines if "images_per_second" in line)
    return {
        "note": note,
        "config": {name: config[name] for name in GROUPS if name in config},
        "images_per_second": round(speeds[len(speeds) // 2]),  # of the median epoch, without validation
        **curves,
    }


def score(workdir: Path, num_images: int) -> dict[str, Any]:
    """Compute the log-likelihood of the first validation images with a run's best parameters, and the active units."""
    best = run.load(workdir)
    images = best.dataset.valid.images
    values = best.log_likelihood(images[:num_images], SAMPLES)
    return {
        "log_likelihood": round(float(values.mean()), 3),
        "scored_images": len(values),
        "scored_samples": SAMPLES,
        "active_units": elbo.active_units(best.encode(images).mean),
    }


def keep(path: Path, trial: dict[str, Any]) -> None:
    """Copy the note and the scores of an earlier file of the same run into `trial`."""
    if not path.exists():
        return
    old = json.loads(path.read_text())
    if old["config"] != json.loads(json.dumps(trial["config"])):
        raise UserError(f"{path} belongs to another run: rename the run's folder")
    trial["note"] = trial["note"] or old["note"]
    if len(old["valid"]) == len(trial["valid"]):  # not trained further since then
        trial |= {name: value for name, value in old.items() if name not in trial}


def _at(curve: Sequence[Sequence[float]], epoch: int) -> str:
    return next((f"{value:.2f}" for number, value in curve if number == epoch), "")


def _row(trial: dict[str, Any], num_train: int) -> list[str]:
    config = trial["config"]
    optim, train, valid = config["optim"], config["train"], trial["valid"]
    is_rat = config["prior"]["name"] == "exemplar" and config["retrieval"]["search"] != "none"
    last, elbo = valid[-1]
    stopped = "" if last == train["epochs"] else f" (epoch {last})"
    return [
        f"{optim['learning_rate']:g}" + ("" if optim["schedule"] == "cosine" else ", constant"),
        optim.get("estimator", "plain") + ("" if optim["normalise_gradients"] else ", not normalised"),
        str(train["batch_size"]),
        str(config.get("objective", {}).get("samples", 1)),
        str(config["retrieval"]["num_neighbours"]) if is_rat else "",
        str(
            optim["kl_warmup_epochs"] if optim["kl_warmup_epochs"] > 1 else 0
        ),  # with 1, the first epoch already has the full weight
        f"{optim['weight_decay']:g}" if optim.get("weight_decay") else "",
        f"{optim['ema']:g}" if optim.get("ema") else "",
        trial["note"],
        _at(valid, 5),
        _at(valid, 10),
        f"{elbo:.2f}{stopped}",
        _at(trial["train"], last),
        str(trial.get("active_units", "")),
        f"{trial['log_likelihood']:.2f}" if "log_likelihood" in trial else "",
        f"{num_train / trial['images_per_second']:.1f}",
    ]


def tables(trials: Sequence[dict[str, Any]]) -> str:
    """A table for each data set, architecture, prior and number of epochs, with the best validation ELBO first."""

    def group(trial: dict[str, Any]) -> tuple[str, str, str, int]:
        config = trial["config"]
        names = config["data"]["name"], config["model"]["architecture"], config["prior"]["name"]
        return *names, config["train"]["epochs"]

    parts = []
    for key, found in itertools.groupby(sorted(trials, key=group), group):
        data, architecture, prior, epochs = key
        best_first = sorted(found, key=lambda trial: (trial["valid"][-1][0] != epochs, -trial["valid"][-1][1]))
        rows = [_row(trial, SIZES[data]) for trial in best_first]
        parts += [f"## {data}, `{architecture}`, {prior} prior, {epochs} epochs\n", table(HEADER, rows)]
    return "\n".join(parts)


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Read all trials of a folder."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m exvae.trials", description="The trials of the recipe.")
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER", help="folders of runs to add")
    parser.add_argument("--note", default="", help="a remark on what the config does not show")
    parser.add_argument("--likelihood", type=int, default=0, metavar="N", help="score the first N validation images")
    options = parser.parse_args(argv)
    try:
        if options.likelihood < 0:
            raise UserError(f"--likelihood={options.likelihood} must be at least 0")
        text, mark, _ = PAGE.read_text().partition(MARK)
        if not mark:
            raise UserError(f"{PAGE} has no line {MARK.strip()}")
        added = {TRIALS / f"{folder.absolute().name}.json": collect(folder, options.note) for folder in options.folders}
        if len(added) < len(options.folders):
            raise UserError("two of the folders have the same name, but a trial's file is named after its folder")
        for path, trial in added.items():
            keep(path, trial)
        for folder, trial in zip(options.folders, added.values(), strict=True) if options.likelihood else ():
            trial |= score(folder, options.likelihood)
        TRIALS.mkdir(parents=True, exist_ok=True)
        for path, trial in added.items():
            files.write_json(path, trial)
        trials = read_all(TRIALS)
        files.write_text(PAGE, text + MARK + "\n" + tables(trials))
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(trials)} trials -> {PAGE}")
    return 0
