"""A trained model, read back from its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import linen as nn
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from exvae import config as configs
from exvae import data, metrics, models, sharding, step
from exvae.checkpoint import Checkpoints
from exvae.errors import UserError
from exvae.records import fingerprint


class Run(NamedTuple):
    """The parameters with the best validation ELBO, and what they were trained on."""

    config: Any
    workdir: Path
    dataset: data.Dataset
    mesh: Mesh
    model: nn.Module
    params: dict
    step: int  # at which the parameters were the best

    @property
    def key(self) -> jax.Array:
        """Of everything that is drawn after initialisation."""
        return step.split_seed(self.config.seed)[2]


def open_run(command: Any, workdir: Path) -> Run:
    """The run in `workdir`, with `eval` and `data.dir` as the command line has them."""
    config = configs.of_run(command, metrics.read_config(workdir), workdir)
    configs.validate(config)
    if not (workdir / "checkpoints" / "best").is_dir():
        raise UserError(f"--workdir={workdir} holds no checkpoint: train for at least one epoch first")
    dataset = data.load(config.data, binarize=config.model.likelihood == "bernoulli")
    mesh = sharding.make_mesh()
    model = models.build(config.model, dataset.train.images.shape[1:])
    everywhere = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere),
        jax.eval_shape(lambda: step.init_params(config, model)),
    )
    checkpoints = Checkpoints(workdir)
    try:
        best = checkpoints.restore_best(like)
    finally:
        checkpoints.close()
    if best is None:
        raise UserError(f"--workdir={workdir} holds no checkpoint: train for at least one epoch first")
    best_step, params, meta = best
    checksum = fingerprint(dataset.train.images)
    if meta.get("images", checksum) != checksum:
        raise UserError(f"--workdir={workdir} holds a run on other training images than config.data.dir has")
    return Run(config, workdir, dataset, mesh, model, params, best_step)
