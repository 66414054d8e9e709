"""Two-stage top-k and nearest neighbours equal a sort in float64."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from exvae.retrieval import NOBODY, exact
from exvae.retrieval.draw import draw_exemplars
from exvae.scale import sharding

KEY = np.array([3, 8], np.uint32)

QUICKLY = {"xla_backend_optimization_level": 0}  # compiles faster, runs slower


@pytest.mark.parametrize("columns, k", [(1, 10), (2, 64), (9, 1), (40, 10)])
def test_smallest_k_equals_a_sort(columns, k):
    n = columns * exact.SEGMENT
    rng = np.random.default_rng(columns)
    smooth = rng.normal(size=(6, n))
    ties = rng.integers(0, 4, (6, n))  # far more than k values are equal
    gaps = np.where(rng.random((6, n)) < 0.9, np.inf, smooth)  # often fewer than k are finite
    run = jax.jit(functools.partial(exact.smallest_k, k=k))
    for values in (smooth, ties, gaps):
        values = values.astype(np.float32)
        got, position = (np.asarray(a) for a in run(values))
        np.testing.assert_array_equal(got, np.sort(values, axis=1)[:, :k])
        np.testing.assert_array_equal(np.take_along_axis(values, position, axis=1), got)
        assert all(len(set(row)) == k for row in position)


def test_smallest_k_finds_values_that_share_a_segment():
    # All k smallest values are in one segment, whichever way the segments are cut.
    run = jax.jit(functools.partial(exact.smallest_k, k=5))
    for stride in (1, 10):
        values = np.full((1, 10 * exact.SEGMENT), 100.0, np.float32)
        wanted = np.arange(5) * stride + 7
        values[0, wanted] = np.arange(5)
        _, position = run(values)
        np.testing.assert_array_equal(position[0], wanted)


def brute(queries, table, k, allowed, leave_out):
    out = np.full((len(queries), k), NOBODY)
    for b, query in enumerate(queries.astype(np.float64)):
        rows = [j for j in range(len(table)) if allowed[j] and (leave_out is None or j != leave_out[b])]
        rows.sort(key=lambda j: np.sum((query - table[j]) ** 2))
        out[b, : len(rows)] = rows[:k]
    return out


def search(queries, table, k, m, own, step=0):
    """The results of `nearest` and of a sort, among m drawn rows."""
    draw = draw_exemplars(KEY, step, len(table), m)
    mesh = sharding.make_mesh()
    run = jax.jit(lambda *args: exact.nearest(mesh, *args, k, draw=draw, leave_out=own), compiler_options=QUICKLY)
    allowed = draw.contains(np.arange(len(table)))
    return np.asarray(run(queries, table)), brute(queries, table, k, allowed, own)


@pytest.mark.parametrize(
    "block, rows, m, leave_out",
    [(64, 200, 200, True), (64, 200, 70, False), (32, 150, 3, True), (16384, 200, 100, True), (16384, 7, 7, True)],
)
def test_nearest_equals_a_sort(monkeypatch, block, rows, m, leave_out):
    monkeypatch.setattr(exact, "BLOCK", block)
    rng = np.random.default_rng(rows)
    table = rng.normal(size=(rows, 5)).astype(np.float32)
    own = rng.permutation(rows)[:6]
    # The own row is nearest, unless it is left out.
    queries = table[own] + rng.normal(scale=0.05, size=(6, 5)).astype(np.float32)
    np.testing.assert_array_equal(*search(queries, table, 6, m, own if leave_out else None))


def test_nearest_on_several_devices_equals_a_sort(several_devices, rng):
    """203 rows and one row of padding are on four devices."""
    table = rng.normal(size=(204, 5)).astype(np.float32)
    own, draw, mesh = rng.permutation(203)[:6], draw_exemplars(KEY, 0, 203, 90), several_devices(4)
    queries = table[own] + rng.normal(scale=0.05, size=(6, 5)).astype(np.float32)
    run = jax.jit(lambda *args: exact.nearest(mesh, *args, 6, draw=draw, leave_out=own), compiler_options=QUICKLY)
    want = brute(queries, table[:203], 6, draw.contains(np.arange(203)), own)
    np.testing.assert_array_equal(run(queries, table), want)


def test_nearest_leaves_out_the_row_in_every_block(monkeypatch):
    monkeypatch.setattr(exact, "BLOCK", 32)
    table = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    np.testing.assert_array_equal(*search(table, table, 1, 100, np.arange(100)))
    without, _ = search(table, table, 1, 100, None)
    np.testing.assert_array_equal(without[:, 0], np.arange(100))


def test_nearest_of_equal_rows_returns_each_once():
    table = np.zeros((50, 2), np.float32)
    drawn = set(draw_exemplars(KEY, 0, 50, 20).members().tolist())
    inside, outside = min(drawn), min(set(range(50)) - drawn)
    got, _ = search(table[:2], table, 25, 20, np.array([inside, outside]))
    assert set(got[0]) == drawn - {inside} | {NOBODY} and list(got[0]).count(NOBODY) == 6
    assert set(got[1]) == drawn | {NOBODY} and list(got[1]).count(NOBODY) == 5
    assert np.all(got[:, -5:] == NOBODY)


def test_nearest_equals_a_sort_at_the_size_of_a_training_step():
    rng = np.random.default_rng(3)
    rows, batch, k = 3 * exact.BLOCK + 5, 16, 10
    table = rng.normal(size=(rows, 40)).astype(np.float32)
    own = rng.permutation(rows)[:batch]
    own[0] = rows - 1
    queries = table[own] + np.float32(0.1)
    draw, mesh = draw_exemplars(KEY, 0, rows, rows // 2), sharding.make_mesh()
    run = jax.jit(lambda *args: exact.nearest(mesh, *args, k, draw=draw, leave_out=own), compiler_options=QUICKLY)
    got = np.asarray(run(queries, table))
    exact_squares = (table.astype(np.float64) ** 2).sum(-1) - 2 * queries.astype(np.float64) @ table.T.astype(
        np.float64
    )
    exact_squares[:, ~draw.contains(np.arange(rows))] = np.inf
    exact_squares[np.arange(batch), own] = np.inf
    want = np.sort(np.partition(exact_squares, k, axis=1)[:, :k], axis=1)
    # Compare distances, because neighbours whose distances are equal in float32 may change places.
    np.testing.assert_allclose(np.take_along_axis(exact_squares, got, axis=1), want, atol=1e-4)
    assert all(len(set(row)) == k for row in got)


def test_nearest_does_not_look_up_padding_in_the_draw():
    """In this step, the permutation maps the padding row 4999 to itself, so a test of this row would not end."""
    draw = draw_exemplars(np.array([0, 42], np.uint32), 365, 4999, 100)
    assert draw._forward(np.array([4999], np.uint32)) == 4999
    table = np.random.default_rng(0).normal(size=(5000, 3)).astype(np.float32)  # padded as on two or four devices
    mesh = sharding.make_mesh()
    run = jax.jit(lambda *args: exact.nearest(mesh, *args, 4, draw=draw, leave_out=None), compiler_options=QUICKLY)
    want = brute(table[:6], table[:4999], 4, draw.contains(np.arange(4999)), None)
    np.testing.assert_array_equal(run(table[:6], table), want)


@pytest.mark.parametrize("n, m, devices", [(50_000, 25_000, 8), (1000, 100, 64), (1003, 1003, 4), (10, 3, 2)])
def test_device_has_room_for_all_its_drawn_rows(n, m, devices):
    per_device = -(-n // devices)
    bound = exact._most_drawn(draw_exemplars(KEY, 0, n, m), per_device)
    assert stats.hypergeom(n, m, min(per_device, n)).sf(bound) < 1e-14
    assert exact._most_drawn(draw_exemplars(KEY, 0, n, m), n) == m  # a single device has room for all
