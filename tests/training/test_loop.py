"""The training loop: runs learn, resume bit for bit, survive kills and stop on NaN."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from exvae import data
from exvae.data.batches import epoch_order
from exvae.retrieval import NOBODY
from exvae.retrieval.draw import draw_exemplars
from exvae.runs import progress
from exvae.runs.checkpoint import Checkpoints
from exvae.scale import sharding
from exvae.training import loop, setup
from tests.conftest import compilations

ROOT = Path(__file__).parents[2]


def restored(config, workdir: Path):
    """Everything that is constant during the run in `workdir`, and its last state, or the initial one."""
    setup = loop.prepare(config, workdir)
    checkpoints = Checkpoints(workdir)
    state, _ = loop.start(setup, checkpoints)
    checkpoints.close()
    return setup, state


def final_state(config, workdir: Path) -> dict:
    """Every array of the last checkpoint, by its path."""
    _, state = restored(config, workdir)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def metric_lines(workdir: Path) -> list[dict]:
    """The lines of metrics.jsonl without `images_per_second`, which depends on the clock."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line.pop("images_per_second", None)
    return lines


def assert_same_run(config, one: Path, other: Path, *, evaluated: bool = True) -> None:
    a, b = final_state(config, one), final_state(config, other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    lines, others = ([line for line in metric_lines(folder) if line["split"] != "test"] for folder in (one, other))
    assert lines == others
    if not evaluated:
        return
    assert metric_lines(one) == metric_lines(other)
    results = [json.loads((folder / "results.json").read_text())["test"] for folder in (one, other)]
    assert results[0] == results[1]


def check_folder(workdir: Path, results: dict) -> None:
    lines = metric_lines(workdir)
    for line in lines:
        assert line["elbo"] == pytest.approx(line["reconstruction"] - line["kl"], abs=1e-3)
    valid = [line["elbo"] for line in lines if line["split"] == "valid"]
    assert valid[-1] > valid[0] + 5
    assert results == json.loads((workdir / "results.json").read_text())
    assert results["config"] == json.loads((workdir / "config.json").read_text())
    assert list(workdir.glob("events.out.tfevents.*"))


@pytest.mark.usefixtures("quick_start", "unevaluated")
@pytest.mark.parametrize(
    ("architecture", "prior", "search"),
    [("hvae", "exemplar", "none"), ("vae", "exemplar", "exact")],
)
def test_run_learns_and_writes_its_folder(tiny_config, tmp_path, architecture, prior, search):
    """`recipe` is a run with search=scann, and tests/test_every_architecture.py trains the other priors."""
    tiny_config.model.architecture, tiny_config.prior.name = architecture, prior
    tiny_config.retrieval.search = search
    results = loop.train(tiny_config, tmp_path)
    check_folder(tmp_path, results)
    assert [line["split"] for line in metric_lines(tmp_path)] == ["train", "valid"] * 3 + ["test"]


def test_every_function_of_a_run_is_compiled_once(recipe):
    """Further steps, epochs, validations, builds of the index and checkpoints compile nothing."""
    compiled = recipe[2]
    for name in ("train_step", "encode_whole", "elbo_batch", "score"):
        assert compiled[name] == 1, name


def start(flags: list[str], workdir: Path) -> subprocess.Popen:
    command = [sys.executable, "launch.py", "--config=experiments/quickstart.py", f"--workdir={workdir}", *flags]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.faults
def test_killed_run_resumes_bit_for_bit(tiny_config, tiny_flags, tmp_path):
    """SIGKILL comes some milliseconds after the first epoch, perhaps while a checkpoint is being written."""
    flags = [*tiny_flags, "--config.optim.schedule=constant"]
    flags += ["--config.train.checkpoint_minutes=0.0001"]
    killed, straight = tmp_path / "killed", tmp_path / "straight"
    process = start(flags, killed)
    for line in process.stdout:
        if line.startswith("epoch 1 "):
            break
    time.sleep(np.random.default_rng(1).uniform(0, 0.15))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not (killed / "results.json").exists()
    process = start(flags, killed)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "resuming from step" in out
    tiny_config.optim.rise_steps, tiny_config.optim.learning_rate = 200, 4e-3
    loop.train(tiny_config, straight)
    assert_same_run(tiny_config, killed, straight)


@pytest.mark.usefixtures("quick_start", "unevaluated")
def test_estimates_of_the_time_left_do_not_include_compilation(tiny_config, tmp_path, monkeypatch, capsys):
    """The first step takes 1000 s of a fake clock, each other step 70 s. Epochs have 8 steps of 40 images."""
    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock.now))

    def prepare(config, workdir):
        made = setup.prepare(config, workdir)

        def train_step(state, batch):
            clock.now += 1000.0 if int(state.step) == 0 else 70.0
            return state.replace(step=state.step + 1), jnp.float32(-1.0)

        return made._replace(train_step=train_step)

    monkeypatch.setattr(loop, "prepare", prepare)
    tiny_config.prior.name, tiny_config.train.epochs = "gaussian", 2
    loop.train(tiny_config, tmp_path)
    left = re.findall(r"step (\d+) .* (\w+) left", capsys.readouterr().out)
    assert left[0] == ("3", "15m10s") and left[5] == ("8", "9m20s")  # 13 and 8 steps of 70 s
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    rates = [line["images_per_second"] for line in lines if line["split"] == "train"]
    assert rates == pytest.approx([40 / 70, 40 / 70])


@pytest.mark.usefixtures("unevaluated")
def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(copied, monkeypatch):
    """The weights become NaN after the first epoch. The error names step 9, and the checkpoint of step 8 is kept."""
    config, workdir = copied
    good = final_state(config, workdir)
    config.train.epochs = 3
    start = loop.start

    def poisoned(setup, checkpoints):
        state, seconds = start(setup, checkpoints)
        return state.replace(params=jax.tree.map(lambda p: p * jnp.nan, state.params)), seconds

    with monkeypatch.context() as patch, pytest.raises(loop.Diverged, match="step 9"):
        patch.setattr(loop, "start", poisoned)
        loop.train(config, workdir)
    after = final_state(config, workdir)
    assert after[".step"] == 8
    for name in good:
        np.testing.assert_array_equal(good[name], after[name])


@pytest.mark.usefixtures("quick_start")
def test_early_stopping_ends_the_run_after_the_warm_up(tiny_config, tmp_path, monkeypatch):
    """The ELBO does not improve after epoch 3, but patience 2 counts from the end of the warm-up (epoch 6)."""
    tiny_config.prior.name, tiny_config.optim.kl_warmup_epochs = "gaussian", 6
    tiny_config.train.epochs, tiny_config.train.patience = 50, 2
    elbos = {1: -9.0, 2: -8.0, 3: -7.0, 4: -7.5, 5: -7.5, 6: -7.5, 7: -7.0}
    ended = []

    def validate(_, state, epoch):
        ended.append(epoch)
        return {"elbo": elbos[epoch], "reconstruction": 0.0, "kl": 0.0}

    monkeypatch.setattr(
        setup, "make_train_step", lambda *_, **__: lambda state, batch: (state.replace(step=state.step + 1), -1.0)
    )
    monkeypatch.setattr(loop, "_validate", validate)
    monkeypatch.setattr(loop, "_finish", lambda *_: {})
    loop.train(tiny_config, tmp_path)
    assert ended == [1, 2, 3, 4, 5, 6, 7]
    best = [path.name for path in (tmp_path / "checkpoints" / "best").iterdir()]
    assert sorted(best) == ["16", "24"]  # of epoch 3 and of epoch 2
    loop.train(tiny_config, tmp_path)
    assert len(ended) == 7  # a stopped run does not continue


def test_epoch_order_visits_every_image_once_and_depends_on_seed_and_epoch():
    order = epoch_order(seed=3, epoch=5, num_train=103, batch_size=10)
    assert order.shape == (10, 10)
    assert len(set(order.ravel())) == 100
    assert set(order.ravel()) <= set(range(103))
    np.testing.assert_array_equal(order, epoch_order(3, 5, 103, 10))
    assert (order != epoch_order(3, 6, 103, 10)).any()
    assert (order != epoch_order(4, 5, 103, 10)).any()


@pytest.mark.usefixtures("quick_start")
def test_table_rows_change_only_where_images_were_encoded(tiny_config, tmp_path):
    """Algorithm 1: one step writes the means of the batch and of its neighbours, and no other row."""
    setup, state = restored(tiny_config, tmp_path)
    means = np.asarray(setup.evaluator.encode_all(state.params, setup.store))
    np.testing.assert_array_equal(state.table, means)  # filled before the first step
    before = means + 1.0
    state = state.replace(table=sharding.split(setup.mesh, before))
    index = np.arange(40, dtype=np.int32)
    feeder = loop.Feeder(setup.config, setup.model, setup.mesh, setup.store, state)
    state, _ = setup.train_step(state, feeder(state, 0, index))
    after = np.asarray(state.table)
    changed = np.flatnonzero((after != before).any(-1))
    assert set(index) <= set(changed)
    assert 40 < len(changed) <= 40 + 40 * 3
    neighbours = [row for row in changed if row not in index]
    np.testing.assert_allclose(after[neighbours], means[neighbours], rtol=1e-4, atol=1e-5)  # of the grey images


@pytest.mark.skipif(os.environ.get("EXVAE_DATA_DIR", "") == "", reason="EXVAE_DATA_DIR is not set")
def test_mnist_reaches_a_sane_elbo_in_one_epoch(tmp_path):
    """On real MNIST. In the authors' log, the negative ELBO is 187.45 after epoch 1 of the paper's schedule."""
    from exvae import config as configs

    config = configs.get_config()
    config.data.name, config.retrieval.search, config.train.epochs = "mnist", "exact", 1
    config.eval.num_images = 10
    results = loop.train(config, tmp_path)
    assert -200 < results["test"]["elbo"] < -150


def test_resumed_run_equals_straight_run(recipe, tmp_path, monkeypatch):
    """The run stops inside an epoch, one step after a checkpoint and between two builds of the ScaNN index."""
    config, straight, _ = recipe
    reached, real = 0, loop.check_finite

    def interrupt(at, elbo):
        nonlocal reached
        reached = at
        if at == 13:
            raise KeyboardInterrupt
        return real(at, elbo)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "check_finite", interrupt)
        patch.setattr(loop, "_is_due", lambda step, due: step in (11, 12))
        loop.train(config, tmp_path)
    assert reached == 13
    loop.prepare(config, tmp_path).train_step.clear_cache()  # as in a new process
    with compilations() as compiled:
        loop.train(config, tmp_path)
    assert compiled["train_step"] == 1  # a restored state has the same types as the result of a step
    assert compiled["encode_whole"] + compiled["elbo_batch"] == 0  # these are still compiled
    assert_same_run(config, straight, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    check_folder(tmp_path, results)
    assert results["test"]["exemplars"] == 320
    lines = metric_lines(straight)
    assert [line["epoch"] for line in lines if line["split"] == "valid"] == [2, 3]  # every second and the last epoch


@pytest.mark.usefixtures("quick_start")
@pytest.mark.parametrize("search", ["none", "scann"])
def test_host_chooses_from_the_draw_of_the_step(tiny_config, tmp_path, search):
    """The compiled step divides by the size of its own draw, so the host must choose from the same draw."""
    tiny_config.retrieval.search = search
    setup, state = restored(tiny_config, tmp_path)
    feeder = loop.Feeder(setup.config, setup.model, setup.mesh, setup.store, state)
    for number in (0, 3):
        batch = feeder(state, number, np.arange(40, dtype=np.int32))
        drawn = draw_exemplars(state.key, jnp.int32(number), 320, 100).contains(np.arange(320))
        chosen = set(np.asarray(batch.chosen).tolist()) - {NOBODY}
        assert chosen <= set(np.flatnonzero(drawn))
        assert len(chosen) == 100 or search == "scann"
    swapped = []
    for number in range(17 if search == "scann" else 0):  # the index is swapped before every fifth step
        new = feeder.swap_index(state, number)
        if new is not state:
            swapped.append(number)
            np.testing.assert_array_equal(new.indexed[0], state.indexed[1])
            np.testing.assert_array_equal(new.indexed[1], state.table)
        state = new.replace(table=state.table + 1)
    assert swapped == ([5, 10, 15] if search == "scann" else [])


def test_exemplars_of_the_final_evaluation_are_grey(tiny_config, tmp_path):
    tiny_config.eval.exemplars = "train+valid"
    setup = loop.prepare(tiny_config, tmp_path)
    parts = data.load(tiny_config.data, binarize=False)
    assert len(np.unique(parts.valid.images)) > 2
    np.testing.assert_array_equal(setup.exemplars.images, np.concatenate([parts.train.images, parts.valid.images]))


def test_logged_sigma_is_a_standard_deviation(recipe):
    config, folder, _ = recipe
    log_var = float(final_state(config, folder)[".params['prior']['log_var']"])
    last = [line for line in metric_lines(folder) if line["split"] == "train"][-1]
    assert abs(log_var) > 0.1
    assert last["sigma"] == pytest.approx(np.exp(0.5 * log_var), rel=1e-6)
