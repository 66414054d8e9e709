"""The average of the parameters (optim.ema): its use, and runs that were saved before it existed."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import exvae
from exvae.evaluation.elbo import mean_elbo
from exvae.keys import VALID, stream
from exvae.runs.checkpoint import Checkpoints
from exvae.training import loop
from tests.training.test_loop import assert_same_run, metric_lines, restored


def to_float64(tree) -> dict[str, np.ndarray]:
    """A copy in float64, because the next step reuses the memory."""
    return {jax.tree_util.keystr(path): np.array(leaf, np.float64) for path, leaf in jax.tree.leaves_with_path(tree)}


def test_average_is_validated_saved_and_loaded_but_the_search_uses_the_parameters(recipe):
    config, folder, _ = recipe
    setup, state = restored(config, folder)
    valid = [line for line in metric_lines(folder) if line["split"] == "valid"][-1]
    assert valid["epoch"] == json.loads((folder / "results.json").read_text())["best_epoch"] == 3
    key = stream(jax.random.wrap_key_data(state.key), VALID, 3)
    elbos, means = {}, {}
    for name in ("average", "params"):
        params = getattr(state, name)
        means[name] = setup.evaluator.encode_all(params, setup.store)
        images, count = setup.dataset.valid.images, len(setup.store)
        elbos[name] = mean_elbo(
            key, setup.evaluator, params, images, setup.evaluator.components(params, means[name], count)
        )["elbo"]
    assert valid["elbo"] == pytest.approx(elbos["average"], rel=1e-6)
    assert abs(valid["elbo"] - elbos["params"]) > 0.1
    loaded, average, params = map(to_float64, (exvae.load(folder).params, state.average, state.params))
    assert loaded.keys() == average.keys()
    for name, value in loaded.items():
        np.testing.assert_array_equal(value, average[name], err_msg=name)
        assert np.any(value != params[name]), name
    np.testing.assert_allclose(state.table, means["params"], rtol=1e-6)
    assert np.abs(state.table - means["average"]).max() > 1e-3


@pytest.mark.usefixtures("unevaluated")
def test_run_saved_before_the_average_existed_resumes(copied, tmp_path):
    """Its state has no field `average`, and its config.json has no `optim.ema` and no other newer field."""
    config, old = copied
    shutil.copytree(old, tmp_path / "new")
    _, state = restored(config, old)
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state) if field.name != "average"}
    checkpoints = Checkpoints(old)
    _, meta = checkpoints.restore_latest(lambda meta: state)
    checkpoints.close()
    shutil.rmtree(old / "checkpoints" / "latest")
    checkpoints = Checkpoints(old)
    del meta["cpu_seconds"]
    checkpoints.save_latest(int(state.step), fields, meta)
    checkpoints.wait()
    checkpoints.close()
    stored = json.loads((old / "config.json").read_text())
    del stored["optim"]["estimator"], stored["optim"]["ema"], stored["objective"], stored["train"]["validate_epochs"]
    (old / "config.json").write_text(json.dumps(stored))
    config.train.epochs = 3
    for folder in (old, tmp_path / "new"):
        loop.train(config, folder)
    assert_same_run(config, old, tmp_path / "new")
