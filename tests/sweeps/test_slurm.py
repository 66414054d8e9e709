"""Points of a sweep as Slurm jobs, with fakes of submitit and squeue."""

import itertools
import os
import pickle
import sys
import types
from pathlib import Path

import pytest

from exvae.errors import UserError
from tests.sweeps import test_sweep
from tests.sweeps.test_sweep import run, table

children = test_sweep.children  # a fixture


class FakeSlurm:
    """A fake submitit that stores the jobs, and a fake squeue that prints the ids given to `show`."""

    def __init__(self, folder: Path, monkeypatch):
        self.parameters, self.jobs, self._ids = {}, {}, itertools.count(7)
        self._squeue = folder / "squeue"
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        monkeypatch.setitem(sys.modules, "submitit", types.SimpleNamespace(AutoExecutor=self.executor))
        self.show()

    def show(self, *ids: str) -> None:
        self._squeue.write_text(f"#!/bin/sh\nprintf '%s\\n' {' '.join(ids)}\n")
        self._squeue.chmod(0o755)

    def executor(self, folder, cluster):
        assert cluster == "slurm"
        folder.mkdir(exist_ok=True)
        return self

    def update_parameters(self, **parameters):
        if "slurm_partitoin" in parameters:
            raise NameError("Unknown argument 'partitoin'\nKnown executors: slurm")
        self.parameters = parameters

    def map_array(self, function, *arguments):
        array = next(self._ids)
        calls = [pickle.dumps((function, call)) for call in zip(*arguments, strict=False)]
        self.jobs = {f"{array}_{n}": call for n, call in enumerate(calls)}
        return [types.SimpleNamespace(job_id=job) for job in self.jobs]

    def work(self, job: str) -> None:
        function, arguments = pickle.loads(self.jobs[job])
        function(*arguments)


@pytest.fixture
def slurm(tmp_path, monkeypatch, children):
    children({1: "fail"})
    (tmp_path / "bin").mkdir()
    return FakeSlurm(tmp_path / "bin", monkeypatch)


def test_jobs_run_the_points_and_update_the_table(tmp_path, slurm, capsys):
    folder = tmp_path / "sweep"

    def submit():
        run(folder, "seed=0,1,2", workers=3, executor="slurm", slurm="partition=gpu; timeout_min=600;slurm_mem=8GB")
        return capsys.readouterr().out

    out = submit()
    assert "job 7_2  seed=2" in out and f"cat {folder}/sweep.txt" in out
    chosen = {"partition": "gpu", "timeout_min": 600, "mem": "8GB", "array_parallelism": 3}
    assert chosen.items() <= {name.removeprefix("slurm_"): value for name, value in slurm.parameters.items()}.items()
    assert not (folder / "seed=0").exists()
    slurm.work("7_0")
    with pytest.raises(ChildProcessError, match="exit code 1: error: no luck"):
        slurm.work("7_1")
    assert [row["status"] for row in table(folder)] == ["done", "failed", "waiting"]
    slurm.show("7_2", "99")
    assert "job 8_0  seed=1" in submit()  # neither the finished point nor the queued one
    assert list(slurm.jobs) == ["8_0"]
    slurm.show("7_2", "8_0")
    assert "in the queue: 2, to submit now: 0" in submit()


def test_finished_sweep_submits_nothing(tmp_path, children, capsys, monkeypatch):
    children()
    run(tmp_path, "seed=0")
    monkeypatch.setitem(sys.modules, "submitit", None)
    run(tmp_path, "seed=0", executor="slurm")
    assert capsys.readouterr().out.endswith((tmp_path / "sweep.txt").read_text())


@pytest.mark.parametrize(
    ("options", "message"),
    [("partition=gpu", "needs timeout_min"), ("partitoin=gpu;time=1", "Unknown argument 'partitoin'$")],
)
def test_options_are_checked(tmp_path, slurm, options, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, "seed=0", executor="slurm", slurm=options)


def test_missing_submitit_names_what_to_install(tmp_path, slurm, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(UserError, match="pip install -r requirements-slurm.txt"):
        run(tmp_path, "seed=0", executor="slurm", slurm="timeout_min=5")
