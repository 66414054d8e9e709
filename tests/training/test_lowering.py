"""The whole training step can be lowered for accelerators, and keeps the plain convolution there."""

import jax
import numpy as np
import pytest

from exvae.runs.checkpoint import Checkpoints
from exvae.training import loop
from exvae.training.feed import Feeder
from exvae.training.setup import start


@pytest.mark.parametrize("architecture", ["convhvae", "pixelsnail"])
def test_step_of_convolutions_is_lowered_for_accelerators(architecture, tiny_config, tmp_path, monkeypatch):
    tiny_config.model.architecture, tiny_config.model.channels = architecture, 4
    tiny_config.retrieval.search = "exact"
    setup = loop.prepare(tiny_config, tmp_path)
    state, _ = start(setup, Checkpoints(tmp_path))
    feeder = Feeder(setup.config, setup.model, setup.mesh, setup.store, state)
    batch = feeder(state, 0, np.arange(tiny_config.train.batch_size, dtype=np.int32))
    assert "stablehlo.convolution" not in setup.train_step.lower(state, batch).as_text()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    step = loop.prepare(tiny_config, tmp_path / "other").train_step
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (state, batch))
    traced = step.trace(*shapes)
    for platform in ("cuda", "tpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "stablehlo.convolution" in text
