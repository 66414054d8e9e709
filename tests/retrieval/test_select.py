"""Candidates, unions and table updates against Python lists and sets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae.retrieval import NOBODY, select


@pytest.mark.parametrize("k, leave_out", [(1, True), (4, True), (12, False)])
def test_cut_keeps_the_first_k_valid(k, leave_out):
    rng = np.random.default_rng(k)
    n = 30
    candidates = np.stack([rng.permutation(n)[:12] for _ in range(8)])
    candidates[:3, 7:] = NOBODY
    candidates[3] = NOBODY
    candidates[4:6, [0, 5]] = NOBODY  # before valid ones: it must not take one of the k slots
    own = candidates[np.arange(8), rng.integers(1, 5, 8)]
    own[6] = 29 if 29 not in candidates[6] else own[6]
    run = jax.jit(lambda c, allowed: select.cut(c, k, allowed=allowed, leave_out=own if leave_out else None))
    for share in (1.0, 0.5, 0.0):
        allowed = rng.random(n) < share
        allowed[-1] = True  # where NOBODY, taken as an index, would point
        got = np.asarray(run(candidates, allowed))
        for b in range(8):
            left = [c for c in candidates[b] if c != NOBODY and allowed[c] and not (leave_out and c == own[b])]
            want = (left + [NOBODY] * k)[:k]
            assert list(got[b]) == want


def test_union_holds_each_neighbour_once():
    rng = np.random.default_rng(0)
    run = jax.jit(select.union)
    for high in (3, 20, 10_000):
        for empty in (0.0, 0.3, 1.0):
            neighbours = np.where(rng.random((6, 5)) < empty, NOBODY, rng.integers(0, high, (6, 5)))
            got = np.asarray(run(neighbours))
            assert got.shape == (30,)
            assert sorted(got[got != NOBODY]) == sorted(set(neighbours.ravel()) - {NOBODY})


def test_union_keeps_exemplar_zero():
    assert sorted(np.asarray(select.union(jnp.array([[0, 0], [0, 0]])))) == [NOBODY, NOBODY, NOBODY, 0]


def test_update_writes_exactly_the_named_rows():
    rng = np.random.default_rng(1)
    table = rng.normal(size=(12, 3)).astype(np.float32)
    index = np.array([11, 0, NOBODY, 5, NOBODY])
    means = rng.normal(size=(5, 3)).astype(np.float32)
    want = table.copy()
    for row, mean in zip(index, means, strict=True):
        if row != NOBODY:
            want[row] = mean
    np.testing.assert_array_equal(jax.jit(select.update)(table, index, means), want)


def test_cut_then_union_equals_sets():
    rng = np.random.default_rng(2)
    candidates = np.stack([rng.permutation(40)[:20] for _ in range(9)])
    allowed, own = rng.random(40) < 0.4, candidates[:, 0]
    run = jax.jit(lambda c, allowed: select.union(select.cut(c, 3, allowed=allowed, leave_out=own)))
    got = np.asarray(run(candidates, allowed))
    want = set()
    for row, self_ in zip(candidates, own, strict=True):
        want |= set([c for c in row if allowed[c] and c != self_][:3])
    assert set(got) - {NOBODY} == want
