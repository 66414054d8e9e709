"""Checkpoints are restored bit for bit. If the newest one is damaged, the one before it is restored."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

from exvae.errors import UserError
from exvae.runs import checkpoint
from exvae.runs.checkpoint import Checkpoints


def tree(value: float) -> dict:
    return {"a": jnp.full((3, 4), value), "step": jnp.int32(value), "none": None}


def damage(folder) -> None:
    """Cuts the end off every file of a checkpoint."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:-7])


def save(workdir, *steps: int) -> None:
    checkpoints = Checkpoints(workdir)
    for step in steps:
        checkpoints.save_latest(step, tree(step), {"seconds": step / 2})
    checkpoints.wait()
    checkpoints.close()


def test_latest_is_restored_with_its_meta_and_two_are_kept(tmp_path):
    save(tmp_path, 1, 2, 3)
    checkpoints = Checkpoints(tmp_path)
    state, meta = checkpoints.restore_latest(lambda meta: tree(0))
    np.testing.assert_array_equal(state["a"], np.full((3, 4), 3.0))
    assert (int(state["step"]), state["none"], meta) == (3, None, {"seconds": 1.5})
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "latest").iterdir()) == ["2", "3"]
    checkpoints.close()


def test_best_is_the_last_one_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_best({"a": jnp.zeros(2)}) is None
    for step in (4, 9):
        checkpoints.save_best(step, {"a": jnp.full(2, step)}, {"images": step})
    # A second save of the same step, as by a resumed run, changes nothing.
    checkpoints.save_best(9, {"a": jnp.full(2, 9)}, {"images": 9})
    checkpoints.wait()
    step, params, meta = checkpoints.restore_best({"a": jnp.zeros(2, jnp.int32)})
    assert (step, meta) == (9, {"images": 9})
    np.testing.assert_array_equal(params["a"], [9, 9])
    checkpoints.close()


def test_fresh_folder_has_nothing_to_restore(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.restore_latest(lambda meta: tree(0)) is None
    checkpoints.close()


def test_damaged_checkpoint_is_set_aside_and_the_one_before_restored(tmp_path, capsys):
    save(tmp_path, 1, 2)
    damage(tmp_path / "checkpoints" / "latest" / "2")
    checkpoints = Checkpoints(tmp_path)
    state, _ = checkpoints.restore_latest(lambda meta: tree(0))
    assert int(state["step"]) == 1
    assert "step 2 is damaged" in capsys.readouterr().out
    assert list((tmp_path / "checkpoints").glob("damaged-latest-2-*"))
    checkpoints.save_latest(2, tree(2), {})  # the step can be saved again
    checkpoints.wait()
    assert int(checkpoints.restore_latest(lambda meta: tree(0))[0]["step"]) == 2
    checkpoints.close()


def test_folder_without_a_readable_checkpoint_is_a_user_error(tmp_path):
    save(tmp_path, 1)
    damage(tmp_path / "checkpoints" / "latest" / "1")
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UserError, match="no readable checkpoint"):
        checkpoints.restore_latest(lambda meta: tree(0))
    assert (tmp_path / "checkpoints" / "latest" / "1").exists()  # the fault may be in the code, so nothing is moved
    checkpoints.close()


def test_saved_state_is_a_copy(tmp_path):
    """The next step reuses the buffers of a state that is still being written."""
    checkpoints = Checkpoints(tmp_path)
    state = {"a": jnp.arange(1_000_000.0)}
    checkpoints.save_latest(1, state, {})
    state["a"].delete()
    checkpoints.wait()
    restored, _ = checkpoints.restore_latest(lambda meta: {"a": jnp.zeros(1_000_000)})
    np.testing.assert_array_equal(restored["a"], np.arange(1_000_000.0))
    checkpoints.close()


def test_full_disk_is_detected_before_anything_is_written(tmp_path, monkeypatch):
    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: mock.Mock(free=2**20))
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(OSError, match=r"disk full: 1.0 MiB left"):
        checkpoints.save_latest(2, tree(2), {})
    assert int(checkpoints.restore_latest(lambda meta: tree(0))[0]["step"]) == 1
    checkpoints.close()
