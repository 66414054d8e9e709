"""The files config.json and results.json."""

import json

import pytest

from exvae import config as configs
from exvae.errors import UserError
from exvae.runs import folder


def test_write_json_replaces_the_whole_file(tmp_path):
    path = tmp_path / "results.json"
    folder.write_json(path, {"a": 1})
    folder.write_json(path, {"a": [2]})
    assert json.loads(path.read_text()) == {"a": [2]}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_workdir_with_an_invalid_config_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for text in ("not json", "[1, 2]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="is not the config of a run"):
            folder.open_workdir(tmp_path, configs.get_config().to_dict())
        assert (tmp_path / "config.json").read_text() == text


def test_config_of_a_run_that_never_started_is_replaced(tmp_path):
    config = configs.get_config().to_dict()
    folder.open_workdir(tmp_path, {**config, "seed": 1})
    folder.open_workdir(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0
