"""A trained model, read from the folder of a run. Evaluation and all other tasks start from it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from flax import linen as nn
from jax.sharding import Mesh
from jaxtyping import Array, Float
from ml_collections import ConfigDict

from exvae import config as configs
from exvae import data, keys, models
from exvae.data import splits
from exvae.encoding import encode
from exvae.errors import UserError
from exvae.priors import PRIORS, Prior
from exvae.runs import folder
from exvae.runs.checkpoint import Checkpoints
from exvae.runs.records import fingerprint
from exvae.scale import sharding
from exvae.state import init_params


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The parameters with the best validation ELBO, the data they were trained on, and the exemplars of the prior."""

    config: ConfigDict
    workdir: Path
    grey: data.Dataset  # not binarized
    mesh: Mesh
    model: nn.Module
    params: dict
    step: int  # the training step of the parameters
    exemplars: data.Split  # the exemplars of the prior, from which generation starts

    @property
    def prior(self) -> Prior:
        """The prior that the config names."""
        return PRIORS[self.config.prior.name]

    @property
    def key(self) -> Array:
        """The key of all random numbers after initialisation."""
        return keys.split_seed(self.config.seed)[2]

    @functools.cached_property
    def means(self) -> Float[np.ndarray, "N D"]:
        """The latent means mu(x_n) of the exemplars."""
        return np.asarray(encode(self.mesh, self.model, self.params, self.exemplars.images).mean)

    @functools.cached_property
    def dataset(self) -> data.Dataset:
        """The data for training and evaluation: valid and test are binarized if the likelihood is Bernoulli."""
        return splits.as_modelled(self.grey, self.config.model.likelihood)


Trained = TypeVar("Trained", bound=TrainedModel)


def open_trained(kind: type[Trained], config: ConfigDict, workdir: Path) -> Trained:
    """Read the best parameters of the run in `workdir`, and the data set of `config`.

    Args:
      kind: the class of the result, `TrainedModel` or a subclass.

    Raises:
      UserError: there is no checkpoint, or the data set has changed since training.
    """
    configs.validate(config)
    if not (workdir / "checkpoints" / "best").is_dir():
        raise UserError(f"--workdir={workdir} holds no checkpoint: train for at least one epoch first")
    grey = data.load(config.data, binarize=False)
    mesh = sharding.make_mesh()
    model = models.build(config.model, grey.train.images.shape[1:])
    like = sharding.shapes(mesh, jax.eval_shape(lambda: init_params(config, model)))
    checkpoints = Checkpoints(workdir)
    try:
        best = checkpoints.restore_best(like)
    finally:
        checkpoints.close()
    if best is None:
        raise UserError(f"--workdir={workdir} holds no checkpoint: train for at least one epoch first")
    best_step, params, meta = best
    checksum = fingerprint(grey.train.images)
    if meta.get("images", checksum) != checksum:
        raise UserError(f"--workdir={workdir} holds a run on other training images than those in config.data.dir")
    exemplars = data.load_exemplars(config.eval.exemplars, grey, memory_mib=config.data.memory_mib)
    return kind(config, workdir, grey, mesh, model, params, best_step, exemplars)


def open_run(command: ConfigDict, workdir: Path) -> TrainedModel:
    """Read the trained model in `workdir`. The options of tasks and `data.dir` come from the command line."""
    config = configs.of_run(command, folder.read_config(workdir), workdir)
    return open_trained(TrainedModel, config, workdir)
