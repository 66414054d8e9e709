"""The start of a run: the initial state."""

import jax
import numpy as np

from exvae import models
from exvae.state import init_state
from exvae.training import optim, setup


def test_initial_state_has_the_bits_of_the_fully_optimised_program(tiny_config):
    tiny_config.model.architecture = "hvae"
    model, optimizer = models.build(tiny_config.model, (28, 28, 1)), optim.optimizer(tiny_config, 10)
    program = jax.jit(lambda: init_state(tiny_config, model, optimizer)).lower()
    levels = {"xla_backend_optimization_level": 3}, setup.QUICKLY
    state, quick = (jax.device_get(program.compile(compiler_options=level)()) for level in levels)
    jax.tree.map(np.testing.assert_array_equal, state, quick)
