"""The command that reproduces the paper's tables: which commands it runs, and how it handles kills and failures."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exvae.reproduce import cells, paper, results
from exvae.reproduce.cells import Plan
from exvae.runs import revision
from exvae.sweeps import child
from tests.reproduce.test_results import make_cell

ROOT = Path(__file__).parents[2]


def write_experiment(path: Path, tiny_config, **fields) -> str:
    """Writes an experiment file and returns its path relative to `experiments/`."""
    tiny_config.update_from_flattened_dict(fields)
    lines = ["import json, ml_collections", "def get_config(argument=''):"]
    lines += [f"    return ml_collections.ConfigDict(json.loads({tiny_config.to_json()!r}))", ""]
    path.write_text("\n".join(lines))
    return os.path.relpath(path, ROOT / "experiments")


def set_revision(monkeypatch, found: str) -> None:
    monkeypatch.setattr(revision, "git_revision", functools.cache(lambda: found))


def test_cells_of_the_papers_tables_occur_once():
    every = list(cells.plans())
    names = [plan.name for plan in every]
    assert len(set(names)) == len(names)
    assert names[:3] == [f"mnist_vae_exemplar_seed{seed}" for seed in range(3)]
    for plan in every:
        config = cells.config_of(plan)
        assert paper.cell(config) is not None
        if not plan.name.startswith("ablation"):  # the same recipe for the three priors
            for prior in results.PRIORS:
                other = dataclasses.replace(plan, experiment=plan.experiment.replace(config["prior"]["name"], prior))
                assert config == cells.config_of(other) | {"prior": config["prior"]}
    assert len(list(cells.plans([4, 5]))) == 2 * len({name.rpartition("_seed")[0] for name in names})


def test_dry_run_prints_the_commands_and_what_is_finished(tmp_path, capsys):
    for plan in cells.choose("mnist_vae_[vg]*", None):
        config = cells.config_of(plan)
        config["optim"]["learning_rate"] *= 1 if "vamp" in plan.name else 2  # as in an earlier recipe
        results.write(tmp_path, make_cell(plan.name, config=config))
    assert cells.main(["--dry_run", "--cells=mnist_vae_[vg]*", f"--results={tmp_path}"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "finished  python launch.py --config=experiments/mnist_vae.py:prior=vamp,recipe=fast --config.seed=0 "
        "--workdir=runs/reproduce/mnist_vae_vamp_seed0",
        "to do     python launch.py --config=experiments/mnist_vae.py:prior=gaussian,recipe=fast --config.seed=0 "
        "--workdir=runs/reproduce/mnist_vae_gaussian_seed0",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cells=mnist_vae*,nist*"], "--cells=nist* matches none of the 28 cells; --dry_run lists them"),
        (["--seeds=1,x"], "--seeds=1,x must be whole numbers"),
        (["--jobs=0"], "--jobs=0 must be at least 1"),
        ([], "has uncommitted changes"),
    ],
)
def test_bad_requests_are_refused_in_one_line(words, message, capsys, monkeypatch):
    set_revision(monkeypatch, "0123+")
    assert cells.main(words) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


@pytest.mark.parametrize("option", ["--runs", "--results"])
def test_folder_that_cannot_be_written_is_refused_before_anything_runs(option, tmp_path, capsys, monkeypatch):
    set_revision(monkeypatch, "0123")
    (tmp_path / "file").touch()
    folders = {"--runs": tmp_path / "runs", "--results": tmp_path / "results"} | {option: tmp_path / "file"}
    assert cells.main([f"{name}={folder}" for name, folder in folders.items()]) == 2
    assert capsys.readouterr().err == f"error: {option}={tmp_path / 'file'} cannot be written: File exists\n"


def test_jobs_share_the_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7, 8}, raising=False)
    assert [cells.cores_of(job, 2) for job in range(2)] == [[3, 5], [7, 8]]
    assert cells.cores_of(0, 1) == [3, 5, 7, 8]
    assert [cells.cores_of(job, 8) for job in (0, 4)] == [[3], [3]]


def test_cell_has_its_cores_and_a_low_priority_in_its_own_session():
    core = min(os.sched_getaffinity(0))
    report = "import os; f = '/proc/self/autogroup'; "
    report += "print(os.nice(0), os.sched_getaffinity(0), os.path.exists(f) and open(f).read())"
    program = child.command([sys.executable, "-c", report], cells.NICE, [core])
    done = subprocess.run(program, capture_output=True, text=True, check=True, start_new_session=True)
    nice, cores, group = done.stdout.strip().split(" ", 2)
    assert int(nice) == min(19, os.nice(0) + cells.NICE) and cores == f"{{{core}}}"
    assert group == "False" or group.endswith(f"nice {cells.NICE}")


@pytest.mark.faults
def test_killed_reproduction_resumes_and_a_failed_cell_does_not_stop_the_others(
    tmp_path, tiny_config, capsys, monkeypatch
):
    quick = "print(123.0)"  # instead of timing a matrix product
    monkeypatch.setattr(cells, "MATMUL", quick)
    monkeypatch.setattr(cells, "POLL_SECONDS", 0.1)
    monkeypatch.setattr(cells, "NICE", 0)  # other tests run at the same time
    bad = write_experiment(tmp_path / "bad.py", tiny_config, **{"train.batch_size": 100_000})
    good = write_experiment(tmp_path / "good.py", tiny_config, **{"train.batch_size": 40, "train.epochs": 10})
    plans = [Plan("bad_seed0", bad, 0), Plan("good_seed1", good, 1)]
    runs, folder = tmp_path / "runs", tmp_path / "results"
    program = (
        "from pathlib import Path; from exvae.reproduce import cells; from exvae.reproduce.cells import Plan; "
        f"cells.MATMUL = {quick!r}; cells.NICE = 0; cells.check_tree = lambda: 'before'; "
        f"cells.run({plans!r}, Path({str(runs)!r}), Path({str(folder)!r}), 1)"
    )
    killed = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    metrics_file = runs / "good_seed1" / "metrics.jsonl"
    until = time.monotonic() + 300
    while not (metrics_file.exists() and metrics_file.read_text().count('"valid"') >= 4):
        assert killed.poll() is None and time.monotonic() < until, killed.communicate()
        time.sleep(0.05)
    os.kill(killed.pid, signal.SIGKILL)
    out, _ = killed.communicate()
    assert "failed   bad_seed0  exit code 2: error: config.train.batch_size=100000 exceeds" in out
    assert not folder.exists()
    done = metrics_file.read_text().count('"valid"')
    assert done < 10

    capsys.readouterr()
    set_revision(monkeypatch, "after")
    assert cells.run(plans[1:], runs, folder, 1) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("done     good_seed1  log-likelihood -")
    assert "resuming from step" in (runs / "good_seed1" / "log.txt").read_text()
    cell = results.read(folder / "good_seed1.json")
    found = json.loads((runs / "good_seed1" / "results.json").read_text())
    assert cell.git == "before after"  # the revision changed between the two commands
    assert cell.test == found["test"] and cell.config["seed"] == 1 and cell.config["data"]["dir"] == ""
    assert [epoch for epoch, _ in cell.valid] == list(range(1, 11))
    assert cell.evaluation_seconds > 0 and cell.matmul_gflops == 123.0 and cell.train_cpu_seconds > 0
    assert cells.run(plans[1:], runs, folder, 1) == 0
    assert capsys.readouterr().out == "cells: 1, finished before: 1, at a time: 1\n"
