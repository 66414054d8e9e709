"""The experiment of each architecture, and a minimal training loop for benchmarks."""

from __future__ import annotations

import jax
import numpy as np
from ml_collections import ConfigDict

from experiments import celeba, mnist_convhvae, mnist_hvae, mnist_pixelsnail, mnist_vae
from exvae import models
from exvae.algorithm import Batch
from exvae.data.store import Store
from exvae.scale import sharding
from exvae.state import init_state
from exvae.training import feed, optim, step

EXPERIMENTS = {
    "vae": mnist_vae,
    "hvae": mnist_hvae,
    "convhvae": mnist_convhvae,
    "pixelsnail": mnist_pixelsnail,
    "celeba": celeba,
}
TRAINING_SETS = {"mnist": (50_000, 28, 28, 1), "celeba": (162_770, 64, 64, 3)}


class Loop:
    """A training state, the compiled step, and the work of the host between steps."""

    def __init__(self, config: ConfigDict, store: Store, table: np.ndarray | None, params: dict | None = None):
        """
        Args:
          table: the latent means; None if the config needs no table.
          params: the parameters; None: initialise them.
        """
        mesh = sharding.make_mesh()
        model = models.build(config.model, store.image_shape)
        optimizer = optim.optimizer(config, 1000)
        self._rng, self._number, self._choose = np.random.default_rng(0), 0, (len(store), config.train.batch_size)
        state = jax.jit(lambda: init_state(config, model, optimizer))()
        state = state.replace(params=params or state.params)
        if table is not None:
            indexed = (np.array(table), np.array(table)) if feed.uses_index(config) else None
            state = state.replace(table=np.array(table), indexed=indexed)
        self.state = sharding.replicate(mesh, state)
        self._feeder = feed.Feeder(config, model, mesh, store, self.state)
        train_step = step.make_train_step(config, model, mesh, optimizer, num_train=len(store), steps_per_epoch=500)
        self._step = train_step.lower(self.state, self._batch()).compile()
        self.memory, self.program = self._step.memory_analysis(), self._step.as_text()
        self.run()

    def _batch(self) -> Batch:
        index = self._rng.choice(*self._choose, replace=False, shuffle=False).astype(np.int32)
        return self._feeder(self.state, self._number, index)

    def run(self, steps: int = 1) -> None:
        """Run this many steps and wait for the last. As in training, the host works ahead of the devices."""
        for _ in range(steps):
            self.state, self.elbo = self._step(self.state, self._batch())
            self._number += 1
        jax.block_until_ready((self.state, self.elbo))
