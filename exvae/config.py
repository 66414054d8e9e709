"""The default config, and the rules for its values."""

from __future__ import annotations

import copy
import difflib
import fnmatch
import re
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from exvae import data as datasets
from exvae.errors import UserError

PARZEN = "parzen"  # the architecture name of the baseline in pixel space (`exvae/evaluation/pixels.py`)
TASK_GROUPS = ("eval", "generate", "represent", "augment")  # groups that only the tasks after training use
# Fields that may change when a run resumes, because they do not affect the steps already taken.
FREE_ON_RESUME = (
    "compile_cache_mib",
    "data.dir",
    "data.memory_mib",
    "data.device_mib",
    "retrieval.min_recall",
    "train.epochs",
    "train.patience",
    "train.checkpoint_minutes",
    *(f"{g}.*" for g in TASK_GROUPS),
)


def get_config() -> ConfigDict:
    """The paper's settings for MNIST and the dense VAE. Each file in `experiments/` changes a few fields.

    Special values follow one convention. 0 means "automatic" for a size that depends on the data or the machine, and
    "all", "never" or "off" for other fields. Where 0 already has a meaning, -1 means "any" or "none". An empty tuple or
    string means "not given".
    """
    config = ConfigDict()
    config.seed = 0  # seed of the initialisation, the shuffles and all other random numbers
    config.compile_cache_mib = 256  # space in the cache folder for compiled programs of earlier starts; 0: keep none

    config.data = data = ConfigDict()
    data.name = "mnist_5k"  # a named data set, npz:PATH or images:PATH
    data.dir = ""  # folder with the data files; '': EXVAE_DATA_DIR, then the places that docs/data.md lists
    data.split_seed = 0  # seed of the shuffle before the split; separate from `seed`, so all seeds use the same split
    data.image_size = 28  # images:PATH: height and width to resize to; 0: keep the size
    data.colour = False  # images:PATH: keep the colours (three channels)
    data.num_images = 10_000  # glyphs: number of images to draw
    data.device_mib = 0.0  # a training set larger than this stays on the host; 0: a quarter of a device's memory
    data.memory_mib = 1024  # decoded images (images:PATH, celeba) above this size are mapped from the cache folder

    config.model = model = ConfigDict()
    model.architecture = "vae"  # `parzen` is a Parzen window on pixels, without a network
    model.latent_dim = 40  # size of z (of z2 in the hierarchical architectures)
    model.lower_latent_dim = 0  # size of z1 in the hierarchical architectures; 0: the same as latent_dim
    model.hidden_dim = 300  # units of a dense hidden layer
    model.channels = 64  # channels of the decoder of convhvae and pixelsnail; celeba has 1, 2, 4 and 8 times as many
    model.likelihood = "bernoulli"  # p(x|z) of a pixel; for parzen the kernel: bernoulli or gaussian

    config.prior = prior = ConfigDict()
    prior.name = "exemplar"  # prior of the top latent
    prior.num_exemplars = 0  # M, the exemplars drawn for each step; 0: half of the training set
    prior.leave_one_out = True  # exclude an image from its own exemplars (O1)
    prior.num_pseudo_inputs = 500  # vamp: number of components
    prior.activation_mib = 1024  # memory for activations of exemplars in the backward pass; the rest is recomputed

    config.retrieval = retrieval = ConfigDict()
    retrieval.search = "none"  # none: use all M drawn exemplars; exact, scann: use only the nearest ones (RAT, O3)
    retrieval.num_neighbours = 10  # K, the neighbours of each image
    retrieval.scored = "union"  # score z against the neighbours of the whole batch (union) or its own K (own, Eq. 12)
    retrieval.refresh_epochs = 0  # epochs until the whole table of means is encoded again; 0: never (Alg. 1)
    retrieval.rebuild_steps = 0  # scann: steps between two builds of the index; 0: N / 400, at least 500
    retrieval.leaves = 0  # scann: leaves of the tree; 0: sqrt(N), and no tree below 10,000 exemplars
    retrieval.leaves_searched = 0  # scann: leaves that a query searches; 0: 25, or enough for the candidates
    retrieval.reorder = 0  # scann: rows rescored exactly after 4-bit codes; 0: use codes if N >= 500,000; -1: no codes
    retrieval.min_recall = 0.9  # scann: warn if the index finds a smaller fraction of the K nearest; 0: never

    config.objective = objective = ConfigDict()
    objective.samples = 1  # codes z drawn for each image of a batch; the training ELBO is their mean

    config.optim = optim = ConfigDict()
    optim.learning_rate = 5e-4  # the constant rate, or the peak of the cosine schedule
    optim.schedule = "constant"  # how the learning rate changes during training
    optim.rise_steps = 1000  # cosine: steps of the linear rise to the peak
    optim.floor = 0.02  # cosine: last rate as a fraction of the peak
    optim.normalise_gradients = True  # scale each tensor's gradient to unit norm before Adam
    optim.estimator = "plain"  # plain: full gradient (the paper); stl: no gradient through the parameters of log q(z|x)
    optim.ema = 0.0  # decay of an average of the parameters, used in validation and after training; 0: no average
    optim.weight_decay = 0.0  # each step shrinks the networks' matrices and kernels by learning rate x weight_decay
    optim.kl_warmup_epochs = 100  # epochs over which the weight of the KL rises linearly to 1

    config.train = train = ConfigDict()
    train.epochs = 2000  # largest number of epochs
    train.batch_size = 100  # B, the images of a step
    train.validate_epochs = 1  # epochs between two validations; the last epoch is always validated
    train.patience = 50  # stop after this many epochs without a better validation ELBO (never during the warm-up)
    train.checkpoint_minutes = 5.0  # longest time between two checkpoints; every epoch also ends with one

    config.eval = evaluation = ConfigDict()
    evaluation.method = "pruned"  # pruned: the nearest exemplars, and an audit of the error; exact: all exemplars
    evaluation.iwae_samples = 5000  # S, the importance samples for the log-likelihood of an image
    evaluation.num_images = 0  # number of test images for the log-likelihood, drawn at random; 0: all
    evaluation.candidates = 1000  # pruned: number of exemplars to use, the nearest to the posterior mean
    evaluation.audit = 16  # pruned: samples of an image that are scored against all exemplars
    evaluation.tolerance = 1e-3  # pruned: error in nats above which the candidates of an image are doubled
    evaluation.exemplars = "train"  # the exemplars of the prior, in every task

    config.generate = generate = ConfigDict()
    generate.seed = 0  # seed of all random numbers
    generate.num_images = 100  # number of random samples
    generate.num_sources = 9  # number of exemplars to sample around, of pairs to interpolate, or of chains
    generate.index = ()  # indices of the exemplars to start from; (): random ones
    generate.label = -1  # class of the exemplars to start from; -1: any class
    generate.temperature = 1.0  # factor on sigma
    generate.draw = False  # draw pixels from p(x|z) instead of showing its mean
    generate.steps = 10  # images in an interpolation, including both ends, or in a chain

    config.represent = represent = ConfigDict()
    represent.tsne_images = 10_000  # largest number of test images in the t-SNE plot; 0: no plot
    represent.explain = ()  # indices of the test images to explain by their exemplars; (): eight of them
    represent.memorisation_images = 1000  # samples, and held-out images, to compare with the training images

    config.augment = augment = ConfigDict()
    augment.lambdas = (1.0, 0.4)  # weights of real images in the loss, each with separate networks; 1: no augmentation
    augment.networks = 10  # networks trained for each lambda, with seeds 0, 1, ...
    augment.split = "test"  # test: train on train+valid, error on test; valid: train on train, error on valid
    augment.hidden_dim = 1024  # units of each of the two hidden layers
    augment.epochs = 100  # epochs over the real images
    augment.batch_size = 100  # real images in a step, and as many generated ones
    augment.learning_rate = 0.1  # rate of SGD with momentum 0.9; falls linearly to 1 %
    augment.label_smoothing = 0.1  # probability that is spread over all classes
    augment.compare = ""  # pattern for the folders of other runs to include in the plot over lambda; '': none
    return config


def nearest_name(word: str, allowed: list[str] | tuple[str, ...]) -> str:
    """'; did you mean ...?' for a misspelt name, or '' if no name is close."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def _one_of(field: str, value: str, allowed: list[str] | tuple[str, ...]) -> None:
    if value not in allowed:
        names = ", ".join(allowed)
        raise UserError(f"config.{field}={value!r} must be one of {names}{nearest_name(value, allowed)}")


def _at_least(field: str, value: float, low: float) -> None:
    if not value >= low:
        raise UserError(f"config.{field}={value} must be at least {low}")


def _numbers(field: str, values: tuple[Any, ...], kind: type, low: float, high: float = float("inf")) -> None:
    """Check a list such as --config.generate.index=3,5."""
    allowed = (int,) if kind is int else (int, float)
    if not all(isinstance(value, allowed) and low <= value <= high for value in values):
        text = ",".join(map(str, values))
        rule = f"at least {low}" if high == float("inf") else f"in {low}..{high}"
        what = "integers" if kind is int else "numbers"
        raise UserError(f"config.{field}={text} must be {what} {rule}, with commas between them")


def validate(config: ConfigDict) -> None:
    """Check everything that can be checked before the data is read.

    Raises:
      UserError: a value is not allowed.
    """
    from exvae.models import ARCHITECTURES, LIKELIHOODS  # here, so that an experiment file is imported without JAX
    from exvae.priors import PRIORS
    from exvae.retrieval.index import INDEXES

    datasets.check_name(config.data.name)
    _one_of("model.architecture", config.model.architecture, (*ARCHITECTURES, PARZEN))
    likelihoods = ("bernoulli", "gaussian") if config.model.architecture == PARZEN else tuple(LIKELIHOODS)
    _one_of("model.likelihood", config.model.likelihood, likelihoods)
    _one_of("prior.name", config.prior.name, tuple(PRIORS))
    _one_of("retrieval.search", config.retrieval.search, ("none", "exact", *INDEXES))
    _one_of("retrieval.scored", config.retrieval.scored, ("union", "own"))
    _one_of("optim.schedule", config.optim.schedule, ("constant", "cosine"))
    _one_of("optim.estimator", config.optim.estimator, ("plain", "stl"))
    if not 0 <= config.optim.ema < 1:
        raise UserError(f"config.optim.ema={config.optim.ema} must be at least 0 and less than 1")
    _one_of("eval.method", config.eval.method, ("pruned", "exact"))
    if not re.match("(npz|images):.", config.eval.exemplars):
        _one_of("eval.exemplars", config.eval.exemplars, ("train", "train+valid", "npz:PATH", "images:PATH"))
    _one_of("augment.split", config.augment.split, ("test", "valid"))
    _numbers("generate.index", config.generate.index, int, 0)
    _numbers("represent.explain", config.represent.explain, int, 0)
    _numbers("augment.lambdas", config.augment.lambdas, float, 0, 1)
    if not config.augment.lambdas:
        raise UserError("config.augment.lambdas=() must hold at least one number in 0..1")
    if not config.augment.label_smoothing < 1:
        raise UserError(f"config.augment.label_smoothing={config.augment.label_smoothing} must be less than 1")
    _at_least("seed", config.seed, 0)
    _at_least("compile_cache_mib", config.compile_cache_mib, 0)
    lowest = {
        "data.split_seed": 0, "data.image_size": 0, "data.num_images": 10, "data.device_mib": 0, "data.memory_mib": 0,
        "model.latent_dim": 1, "model.lower_latent_dim": 0, "model.hidden_dim": 1, "model.channels": 1,
        "prior.num_exemplars": 0, "prior.num_pseudo_inputs": 1, "prior.activation_mib": 0,
        "retrieval.num_neighbours": 1, "retrieval.refresh_epochs": 0, "retrieval.rebuild_steps": 0,
        "retrieval.leaves": 0, "retrieval.leaves_searched": 0, "retrieval.reorder": -1, "retrieval.min_recall": 0,
        "objective.samples": 1, "optim.learning_rate": 0, "optim.rise_steps": 0, "optim.floor": 0,
        "optim.weight_decay": 0, "optim.kl_warmup_epochs": 0,
        "train.epochs": 1, "train.batch_size": 1, "train.validate_epochs": 1, "train.patience": 1,
        "train.checkpoint_minutes": 0,
        "eval.iwae_samples": 1, "eval.num_images": 0, "eval.candidates": 1, "eval.audit": 1, "eval.tolerance": 0,
        "generate.seed": 0, "generate.num_images": 1, "generate.num_sources": 1, "generate.label": -1,
        "generate.temperature": 0, "generate.steps": 2, "represent.tsne_images": 0, "represent.memorisation_images": 1,
        "augment.networks": 1, "augment.hidden_dim": 1, "augment.epochs": 1, "augment.batch_size": 1,
        "augment.learning_rate": 0, "augment.label_smoothing": 0,
    }  # fmt: skip
    for field, low in lowest.items():
        group, name = field.split(".")
        _at_least(field, config[group][name], low)


def resolve(config: ConfigDict, num_train: int) -> ConfigDict:
    """Copy the config, and fill in and check the values that depend on the size of the training set."""
    from exvae.priors import PRIORS  # here, as in `validate`

    config = copy.deepcopy(config)
    if config.train.batch_size > num_train:
        raise UserError(f"config.train.batch_size={config.train.batch_size} exceeds the {num_train} training images")
    if PRIORS[config.prior.name].USES_EXEMPLARS:
        m = config.prior.num_exemplars = config.prior.num_exemplars or num_train // 2
        least = 2 if config.prior.leave_one_out else 1
        if not least <= m <= num_train:
            raise UserError(f"config.prior.num_exemplars={m} must lie in {least}..{num_train} (the training set)")
        k = config.retrieval.num_neighbours
        if config.retrieval.search != "none" and k > m:
            raise UserError(f"config.retrieval.num_neighbours={k} must lie in 1..{m} (config.prior.num_exemplars)")
    # An index must be built within this many steps. On two cores, a million rows take a few hundred steps.
    config.retrieval.rebuild_steps = config.retrieval.rebuild_steps or max(500, num_train // 400)
    return config


def differences(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """List the fields whose values make two runs different: 'train.batch_size: 100 here, 50 in the run'."""
    free = set(FREE_ON_RESUME)
    if new["optim"]["schedule"] == "cosine":
        free.remove("train.epochs")  # the learning rate of every step depends on it
    a, b = flat(new), {**flat(get_config()), **flat(old)}  # an old run lacks newer fields, which had their defaults
    fields = [f for f in sorted(a.keys() | b.keys()) if not any(fnmatch.fnmatch(f, pattern) for pattern in free)]
    return _differing(a, b, fields)


def _differing(new: dict[str, Any], old: dict[str, Any], fields: list[str]) -> list[str]:
    return [
        f"{field}: {new.get(field)!r} here, {old.get(field)!r} in the run"
        for field in fields
        if new.get(field) != old.get(field)
    ]


def stored(fields: dict[str, Any], workdir: Path) -> ConfigDict:
    """The config of a run from its config.json. The options of tasks keep their defaults."""
    config = get_config()
    known = [field for field in flat(config) if field.split(".")[0] not in TASK_GROUPS]
    found = flat(fields)
    if missing := {"data.name", "model.architecture", "prior.name"} - found.keys():
        raise UserError(f"{workdir}/config.json is not the config of a run (no {', '.join(sorted(missing))})")
    try:
        config.update_from_flattened_dict({field: found[field] for field in known if field in found})
    except (TypeError, ValueError) as error:
        raise UserError(f"{workdir}/config.json is not the config of a run ({error})") from error
    return config


def of_run(command: ConfigDict, fields: dict[str, Any], workdir: Path) -> ConfigDict:
    """The config of a trained run, with the options of tasks and the `data.dir` of the command line.

    The command line need not repeat the training options.

    Raises:
      UserError: the command line names a model or data set other than the run's.
    """
    named = [f"model.{name}" for name in command.model] + ["prior.name", "data.name"]
    config = stored(fields, workdir)
    if found := _differing(flat(command), flat(config), named):
        raise UserError(f"--workdir={workdir} holds a run with another config ({'; '.join(found)}): choose another")
    for group in TASK_GROUPS:
        config[group] = command[group]
    config.data.dir = command.data.dir or config.data.dir
    return config


def flat(config: ConfigDict | dict[str, Any]) -> dict[str, Any]:
    """Flatten {'train': {'epochs': 3}} to {'train.epochs': 3}."""
    found: dict[str, Any] = {}
    for name, value in (config.to_dict() if isinstance(config, ConfigDict) else config).items():
        if isinstance(value, dict):
            found |= {f"{name}.{rest}": leaf for rest, leaf in flat(value).items()}
        else:
            found[name] = value
    return found


def field_names() -> list[str]:
    """All fields, as typed on the command line: 'config.train.epochs'."""
    return [f"config.{field}" for field in flat(get_config())]


def check_fields(typed: list[str]) -> None:
    """Raise a UserError for a field that does not exist, and suggest the nearest one that does."""
    names = field_names()
    for field in typed:
        if field not in names:
            raise UserError(f"--{field} is not a config field{nearest_name(field, names)}")
