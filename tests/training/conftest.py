"""A run with all options of the fast recipe, which several tests share."""

import pytest

from exvae import config as configs
from exvae import once
from exvae.training import loop
from tests.conftest import TINY_FIELDS, compilations

RECIPE_FIELDS = {
    "retrieval.search": "scann",
    "retrieval.refresh_epochs": 1,
    "optim.estimator": "stl",
    "optim.ema": 0.9,
    "objective.samples": 2,
    "optim.weight_decay": 0.1,
    "train.validate_epochs": 2,
}


@pytest.fixture(scope="session")
def recipe(tmp_path_factory):
    """Config, folder and compilation counts of a run of three epochs, with a checkpoint inside the second epoch."""
    config = configs.get_config()
    config.update_from_flattened_dict({**TINY_FIELDS, **RECIPE_FIELDS})
    folder = tmp_path_factory.mktemp("recipe")
    once.forget()  # other tests may have compiled a part of it
    with compilations() as compiled, pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_is_due", lambda step, due: step == 12)
        loop.train(config, folder)
    return config, folder, compiled
