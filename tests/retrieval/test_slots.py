"""Candidates, slots and table updates, compared with Python lists and sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae.retrieval import NOBODY, slots
from exvae.retrieval import table as tables
from exvae.retrieval.draw import draw_exemplars
from exvae.scale import sharding

KEY = np.array([3, 8], np.uint32)


@pytest.mark.parametrize("k, leave_out", [(1, True), (4, True), (12, False)])
def test_cut_keeps_the_first_k_valid(k, leave_out):
    rng = np.random.default_rng(k)
    n = 30
    candidates = np.stack([rng.permutation(n)[:12] for _ in range(8)])
    candidates[:3, 7:] = NOBODY
    candidates[3] = NOBODY
    candidates[4:6, [0, 5]] = NOBODY  # empty candidates before valid ones must not take one of the k slots
    own = candidates[np.arange(8), rng.integers(1, 5, 8)]
    own[6] = 29 if 29 not in candidates[6] else own[6]
    for m in (30, 15, 1):
        draw = draw_exemplars(KEY, m, n, m)
        allowed = draw.contains(np.arange(n))
        got = slots.cut(candidates, k, draw=draw, leave_out=own if leave_out else None)
        for b in range(8):
            left = [c for c in candidates[b] if c != NOBODY and allowed[c] and not (leave_out and c == own[b])]
            want = (left + [NOBODY] * k)[:k]
            assert list(got[b]) == want


def test_each_once_keeps_one_slot_of_each_exemplar_in_place():
    rng = np.random.default_rng(0)
    run = jax.jit(slots.each_once)
    for high in (3, 20, 10_000):
        for empty in (0.0, 0.3, 1.0):
            held = np.where(rng.random(30) < empty, NOBODY, rng.integers(0, high, 30))
            got = np.asarray(run(held))
            assert sorted(got[got != NOBODY]) == sorted(set(held) - {NOBODY})
            assert np.all((got == held) | (got == NOBODY))


def test_each_once_keeps_exemplar_zero():
    assert sorted(np.asarray(slots.each_once(jnp.array([0, 0, 0, 0])))) == [NOBODY, NOBODY, NOBODY, 0]


@pytest.mark.parametrize("devices", [1, 4])
def test_update_writes_exactly_the_given_rows(several_devices, devices):
    rng = np.random.default_rng(1)
    table = rng.normal(size=(12, 3)).astype(np.float32)
    index = np.array([11, 0, NOBODY, 5, NOBODY, 6, 3])  # rows on four devices with three rows each
    means = rng.normal(size=(7, 3)).astype(np.float32)
    want = table.copy()
    for row, mean in zip(index, means, strict=True):
        if row != NOBODY:
            want[row] = mean
    mesh = sharding.make_mesh() if devices == 1 else several_devices(devices)
    got = jax.jit(lambda *args: tables.update(mesh, *args))(table, index, means)
    np.testing.assert_array_equal(got, want)
