"""The early stopping rule."""

import math

import numpy as np
import pytest

from exvae.state import EarlyStopping
from exvae.training import stopping


def test_patience_counts_epochs_between_validations():
    found, bad = EarlyStopping.start(), []
    for epoch, elbo in ((5, -3.0), (10, -4.0), (15, -3.0), (20, -2.0)):
        found = stopping.update(found, epoch, elbo, warmup_epochs=0, every=5)
        bad.append(int(found.bad_epochs))
    assert bad == [0, 5, 10, 0] and int(found.best_epoch) == 20


@pytest.mark.parametrize("warmup", [0, 1, 10])
def test_early_stopping_equals_a_hand_written_loop(warmup):
    rng = np.random.default_rng(warmup)
    elbos = [float(np.float32(e)) for e in rng.normal(-100, 1, 40)]
    found = EarlyStopping.start()
    best, best_epoch, bad = -math.inf, 0, 0
    longest = 0
    for epoch, elbo in enumerate(elbos, 1):
        found = stopping.update(found, epoch, elbo, warmup_epochs=warmup)
        if elbo > best:
            best, best_epoch, bad = elbo, epoch, 0
        else:
            bad += 1
        if epoch < warmup:
            bad = 0
        longest = max(longest, bad)
        assert (float(found.best_elbo), int(found.best_epoch), int(found.bad_epochs)) == (
            best,
            best_epoch,
            bad,
        )
    assert longest > 5


def test_early_stopping_counts_from_the_end_of_the_warmup():
    found = EarlyStopping.start()
    counts = []
    for epoch in range(1, 8):
        found = stopping.update(found, epoch, -float(epoch), warmup_epochs=5)  # worse every epoch
        counts.append(int(found.bad_epochs))
    assert counts == [0, 0, 0, 0, 1, 2, 3]
    assert int(found.best_epoch) == 1


@pytest.mark.parametrize("elbo", [-90.5, -90.1, -90.3])  # -90.3 rounds down in float32
def test_early_stopping_counts_a_plateau_as_bad(elbo):
    found = EarlyStopping.start()
    for epoch in range(1, 5):
        found = stopping.update(found, epoch, elbo, warmup_epochs=0)
    assert (int(found.best_epoch), int(found.bad_epochs)) == (1, 3)


def test_early_stopping_counts_nan_as_bad():
    found = stopping.update(EarlyStopping.start(), 1, -5.0, warmup_epochs=0)
    found = stopping.update(found, 2, math.nan, warmup_epochs=0)
    assert (float(found.best_elbo), int(found.bad_epochs)) == (-5.0, 1)


def test_training_ends_after_patience_bad_epochs():
    found = EarlyStopping.start()
    for epoch in range(1, 53):
        found = stopping.update(found, epoch, -float(epoch), warmup_epochs=0)
        assert stopping.is_over(found, 50) == (epoch >= 51)  # the first epoch is the best
