"""Compiled functions are made once for equal configs, and never shared by different ones."""

import copy

from exvae import config as configs
from exvae import once


def test_the_same_parts_of_a_config_share_and_others_do_not():
    made = []

    @once.for_equal_configs
    def make(config, size):
        made.append((config.optim.learning_rate, size))
        return object()

    one = configs.get_config()
    same, other = copy.deepcopy(one), copy.deepcopy(one)
    same.train.epochs, same.data.name, same.seed = 7, "glyphs", 5  # no part of what is compiled
    other.optim.learning_rate *= 2
    first = make(one, 3)
    assert make(same, 3) is first
    assert make(other, 3) is not first and make(one, 4) is not first
    assert len(made) == 3
    one.optim.learning_rate *= 2  # what was made has a copy that does not change
    assert make(one, 3) is make(other, 3) and len(made) == 3
    once.forget()
    assert make(same, 3) is not first
