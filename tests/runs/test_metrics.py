"""Files of a run's folder."""

import json

import pytest

from exvae import config as configs
from exvae.errors import UserError
from exvae.runs import folder, progress, writer


def test_writer_takes_back_lines_after_the_step_and_a_line_cut_short(tmp_path):
    writer = writer.MetricsWriter(tmp_path, 0)
    for step in (10, 20, 30):
        writer.write(step, step // 10, "valid", {"elbo": -float(step)})
    writer.write(10, 1, "test", {"elbo": -9.0})  # of the best epoch: written again when the run ends again
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 40, "epo')
    writer = writer.MetricsWriter(tmp_path, 20)
    writer.write(30, 3, "valid", {"elbo": -31.0})
    writer.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["elbo"]) for line in lines] == [(10, -10.0), (20, -20.0), (30, -31.0)]
    assert lines[0] == {"step": 10, "epoch": 1, "split": "valid", "elbo": -10.0}


def test_write_json_replaces_the_file_whole(tmp_path):
    path = tmp_path / "results.json"
    folder.write_json(path, {"a": 1})
    folder.write_json(path, {"a": [2]})
    assert json.loads(path.read_text()) == {"a": [2]}
    assert [p.name for p in tmp_path.iterdir()] == ["results.json"]


def test_workdir_that_is_no_runs_folder_is_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    for text in ("not json", "[1, 2]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="is not the config of a run"):
            folder.open_workdir(tmp_path, configs.get_config().to_dict())
        assert (tmp_path / "config.json").read_text() == text


def test_config_of_a_run_that_never_began_is_replaced(tmp_path):
    config = configs.get_config().to_dict()
    folder.open_workdir(tmp_path, {**config, "seed": 1})
    folder.open_workdir(tmp_path, config)
    assert json.loads((tmp_path / "config.json").read_text())["seed"] == 0


def test_progress_in_a_log_file_is_a_line_an_epoch_and_one_a_minute(capsys, monkeypatch):
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    progress = progress.Progress(total_steps=1000, batch_size=10)
    progress.begin(0)
    for step in range(1, 91):
        now += 1.0
        progress.show(step, 1, -100.0)
    progress.epoch("epoch 1 done")
    out = capsys.readouterr().out
    assert out == "epoch 1  step 60  train elbo -100.00  10 images/s  15m40s left\nepoch 1 done\n"


@pytest.mark.parametrize(("seconds", "text"), [(5, "0m05s"), (65.9, "1m05s"), (3725, "1h02m")])
def test_clock_is_short(seconds, text):
    assert progress.clock(seconds) == text
