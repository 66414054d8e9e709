"""The command line: what is wrong is said in one line, exit code 2, and nothing is written over."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from absl import flags

import launch

ROOT = Path(__file__).parents[1]


def run(capsys, *arguments: str) -> tuple[int, str]:
    """Exit code and standard error of `python launch.py ...`, in this process."""
    argv = ["launch.py", "--config=experiments/quickstart.py", "--task=train", *arguments]
    with mock.patch.object(sys, "argv", argv):  # config_flags looks there for the fields that are set
        code = launch.main(argv)
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)  # made by config_flags for this command line
    return code, capsys.readouterr().err


def files(folder: Path) -> dict:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--config.data.name=mnits", "did you mean mnist"),
        ("--config.model.architecture=convhva", "did you mean 'convhvae'"),
        ("--config.prior.name=gausian", "did you mean 'gaussian'"),
        ("--config.retrieval.search=scan", "did you mean 'scann'"),
        ("--config.optim.schedule=cosin", "did you mean 'cosine'"),
        ("--config.train.epocs=3", "did you mean 'config.train.epochs'"),
        ("--config.trin.epochs=3", "did you mean 'config.train.epochs'"),
        ("--config.train.epochs=many", "invalid literal"),
        ("--confg=x", "Did you mean: config"),
        ("--task=trian", "should be one of"),
        ("--config=experiments/mnist_va.py", "no such file; did you mean 'experiments/mnist_vae.py'"),
        ("--config=experiments/quickstart.py:prior=vamb", "did you mean 'vamp'"),
        ("--config=experiments/quickstart.py:priors=vamp", "'priors' is not one of"),
        ("--config=experiments/mnist_parzen.py:kernel=gausian", "did you mean 'gaussian'"),
        ("--config.model.architecture=vae --config.model.likelihood=gaussian", "must be one of bernoulli"),
        ("--config.eval.method=prune", "did you mean 'pruned'"),
        ("--config.eval.exemplars=trian", "did you mean 'train'"),
        ("--config.eval.exemplars=npz:missing.npz", "missing.npz: no such file"),
        ("--config.eval.exemplars=npz:", "must be one of train, train+valid, npz:PATH"),
        ("--config.eval.iwae_samples=0", "at least 1"),
        ("--config.eval.candidates=0", "at least 1"),
        ("--config.eval.tolerance=-1", "at least 0"),
        ("--task=evaluate", "holds no run"),
        ("surprise", "surprise"),
        ("--config.prior.num_exemplars=4001", "must lie in 2..4000"),
        ("--config.prior.num_exemplars=1", "must lie in 2..4000"),
        ("--config.prior.num_exemplars=-1", "at least 0"),
        ("--config.retrieval.num_neighbours=0", "at least 1"),
        ("--config.retrieval.num_neighbours=2001", "must lie in 1..2000"),
        ("--config.train.batch_size=4001", "exceeds the 4000"),
        ("--config.optim.learning_rate=nan", "at least 0"),
        ("--config.data.name=npz:missing.npz", "missing.npz"),
        ("--config.data.name=images:missing", "missing"),
        ("--config.data.dir=missing_folder --config.data.name=mnist", "missing_folder"),
    ],
)
def test_bad_argument_is_one_line_and_exit_code_2(capsys, tmp_path, argument, said):
    code, err = run(capsys, f"--workdir={tmp_path}/run", *argument.split())
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not files(tmp_path)


def test_arguments_of_an_experiment_reach_its_config(capsys, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setitem(launch.TASKS, "train", lambda config, workdir: seen.append((config, str(workdir))))
    assert run(capsys, "--config=experiments/mnist_vae.py:prior=vamp,recipe=fast", "--workdir=")[0] == 0
    assert run(capsys, "--config=experiments/mnist_vae.py", "--workdir=")[0] == 0
    assert run(capsys, "--config=experiments/mnist_vae.py:prior=gaussian", f"--workdir={tmp_path}")[0] == 0
    assert [config.prior.name for config, _ in seen] == ["vamp", "exemplar", "gaussian"]
    assert [config.optim.schedule for config, _ in seen] == ["cosine", "constant", "constant"]
    assert [folder for _, folder in seen] == ["runs/mnist_vae-prior=vamp,recipe=fast", "runs/mnist_vae", str(tmp_path)]


def test_broken_data_files_are_named(capsys, tmp_path, rng):
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\3" + bytes(100))
    np.savez(tmp_path / "mixed.npz", images=np.array([np.zeros((3, 3)), np.zeros((4, 4))], dtype=object))
    np.savez(tmp_path / "nan.npz", images=np.full((20, 4, 4), np.nan))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "nan.npz").read_bytes()[:200])
    before = files(tmp_path)
    for arguments in (
        (f"--config.data.dir={tmp_path}", "--config.data.name=mnist"),
        (f"--config.data.name=npz:{tmp_path}/mixed.npz",),
        (f"--config.data.name=npz:{tmp_path}/nan.npz",),
        (f"--config.data.name=npz:{tmp_path}/cut.npz",),
    ):
        code, err = run(capsys, f"--workdir={tmp_path}/run", *arguments)
        assert (code, err.count("\n")) == (2, 1), err
        assert str(tmp_path) in err
    assert files(tmp_path) == before


def test_workdir_of_another_config_is_refused_and_untouched(capsys, tmp_path, tiny_flags):
    flags = [*tiny_flags, f"--workdir={tmp_path}", "--config.train.epochs=1"]
    assert run(capsys, *flags)[0] == 0
    before = files(tmp_path)
    code, err = run(capsys, *flags, "--config.train.batch_size=20")
    assert code == 2
    assert "train.batch_size: 20 here, 40 in the run" in err
    assert files(tmp_path) == before


def test_unwritable_workdir_is_refused(capsys, tmp_path, tiny_flags):
    (tmp_path / "file").write_text("in the way")
    code, err = run(capsys, *tiny_flags, f"--workdir={tmp_path}/file/run")
    assert code == 2
    assert "cannot be written" in err


def test_command_prints_a_user_error_without_a_traceback():
    command = [sys.executable, "launch.py", "--config=experiments/mnist_vae.py", "--config.data.name=mnits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
