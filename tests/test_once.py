"""Equal configs share one compiled function, and different configs never do."""

import copy

import pytest

from exvae import config as configs
from exvae import once


def test_configs_with_equal_fields_share_a_function():
    made = []

    @once.for_equal_configs("model", "optim.learning_rate", "optim.ema")
    def make(config, size):
        made.append((config.optim.learning_rate, size))
        return object()

    one = configs.get_config()
    same, other = copy.deepcopy(one), copy.deepcopy(one)
    same.train.epochs, same.data.name, same.optim.kl_warmup_epochs = 7, "glyphs", 5  # not among the named fields
    other.optim.learning_rate *= 2
    first = make(one, 3)
    assert make(same, 3) is first
    assert make(other, 3) is not first and make(one, 4) is not first
    assert len(made) == 3
    other.model.hidden_dim += 1
    assert make(other, 3) is not first and len(made) == 4
    other.model.hidden_dim -= 1
    one.optim.learning_rate *= 2  # the cache holds a copy, which does not change
    assert make(one, 3) is make(other, 3) and len(made) == 4

    @once.for_equal_configs("optim.ema")
    def careless(config):
        return config.optim.learning_rate

    with pytest.raises(AttributeError, match="learning_rate"):
        careless(one)
    once.forget()
    assert make(same, 3) is not first
