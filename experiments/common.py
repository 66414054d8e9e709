"""Shared by all experiments: the paper's settings, and arguments in the form `file.py:key=value,key=value`."""

from __future__ import annotations

from collections.abc import Mapping

from ml_collections import ConfigDict

from exvae import config as configs
from exvae.errors import UserError

PRIORS = ("exemplar", "gaussian", "vamp")  # of the paper; --config.prior.name selects any other
RECIPES = ("paper", "fast")
RUNLOCAL = ("false", "true")
ARGUMENTS = {"prior": PRIORS, "recipe": RECIPES}


def parse(argument: str, allowed: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Parse 'prior=vamp,recipe=fast' to a dict with all keys of `allowed`. The first allowed value is the default."""
    values = {key: choices[0] for key, choices in allowed.items()}
    for item in filter(None, argument.split(",")):
        key, _, value = item.partition("=")
        value = value or "true"  # `runlocal` is short for `runlocal=true`
        if key not in allowed:
            near = configs.nearest_name(key, tuple(allowed))
            raise UserError(f"--config=...:{item}: {key!r} is not one of {', '.join(allowed)}{near}")
        if value not in allowed[key]:
            near = configs.nearest_name(value, allowed[key])
            raise UserError(f"--config=...:{item}: {key} must be one of {', '.join(allowed[key])}{near}")
        values[key] = value
    return values


def paper_config(data_name: str, architecture: str, argument: str) -> ConfigDict:
    """The paper's settings for one cell of its Table 3, with the arguments of the command line."""
    return build(data_name, architecture, **parse(argument, ARGUMENTS))


def build(data_name: str, architecture: str, *, prior: str, recipe: str) -> ConfigDict:
    """The paper's settings, for experiments that parse their own arguments."""
    config = configs.get_config()
    config.data.name = data_name
    config.model.architecture = architecture
    config.prior.name = prior
    config.prior.num_pseudo_inputs = 1000 if data_name == "omniglot" else 500
    # In the paper, dense architectures use all M exemplars, and only convolutional ones use RAT.
    config.retrieval.search = "none" if architecture in ("vae", "hvae") else "exact"
    config.augment.lambdas = (1.0, 0.8) if data_name == "fashion_mnist" else (1.0, 0.4)  # chosen on validation data
    if recipe == "fast":
        _fast(config)
    return config


def pixelsnail(data_name: str, argument: str) -> ConfigDict:
    """The paper's settings for PixelSNAIL. With `runlocal`, half the channels and two epochs."""
    values = parse(argument, {**ARGUMENTS, "runlocal": RUNLOCAL})
    config = build(data_name, "pixelsnail", prior=values["prior"], recipe=values["recipe"])
    if values["runlocal"] == "true":
        shrink(config, channels=32, epochs=2, kl_warmup_epochs=2, eval_images=100)
        config.retrieval.num_neighbours = 2
    return config


def shrink(config: ConfigDict, *, channels: int, epochs: int, kl_warmup_epochs: int, eval_images: int) -> None:
    """The changes of `runlocal`: make a large architecture small enough for two CPU cores."""
    config.model.channels = channels
    config.train.batch_size = 50
    config.train.epochs = epochs
    config.optim.schedule = "cosine"
    config.optim.learning_rate = 1e-3
    config.optim.rise_steps = 200
    config.optim.kl_warmup_epochs = kl_warmup_epochs
    config.eval.iwae_samples = 100
    config.eval.num_images = eval_images


def _fast(config: ConfigDict) -> None:
    """The changes of `recipe=fast`: far fewer steps, the same for all priors. docs/recipe.md has the search."""
    dense = config.model.architecture in ("vae", "hvae")
    config.retrieval.search = "exact"
    config.retrieval.num_neighbours = 1  # each image also uses the neighbours of the whole batch
    config.objective.samples = 2 if dense else 1
    config.optim.estimator = "stl"
    config.optim.ema = 0.999
    few = config.data.name == "omniglot"  # few training images, so few steps
    config.optim.weight_decay = (0.2 if few else 0.03) if dense else 0.0
    config.optim.schedule = "cosine"
    config.optim.learning_rate = 4e-3 if dense else 2e-3
    config.optim.rise_steps = 500
    config.optim.kl_warmup_epochs = 10 if few or not dense else 0
    config.train.batch_size = 200 if dense else 100
    config.train.epochs = 200
    config.train.validate_epochs = 5
