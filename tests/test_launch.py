"""The command line: a mistake is one line and exit code 2, and no file is overwritten."""

import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import numpy as np
import pytest
from absl import flags

import launch
from exvae.training import loop

ROOT = Path(__file__).parents[1]


def run(capsys, *arguments: str, config: str = "experiments/quickstart.py") -> tuple[int, str]:
    """Exit code and standard error of `python launch.py ...`, in this process."""
    argv = ["launch.py", f"--config={config}", "--task=train", "--out=", *arguments]
    with mock.patch.object(sys, "argv", argv):  # config_flags reads the fields that are set from it
        code = launch.main(argv)
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)  # made by config_flags for this command line
    return code, capsys.readouterr().err


def test_out_of_memory_is_a_one_line_error_that_names_options(capsys, monkeypatch):
    def perform(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes.\nlong table")

    monkeypatch.setattr(launch, "perform", perform)
    code, err = run(capsys)
    assert code == 1 and err.count("\n") == 1
    assert "train.batch_size" in err and "allocating 1 bytes" in err and "long table" not in err


def test_missing_scann_is_a_one_line_error_with_a_solution(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "scann", None)  # as if it were not installed
    code, err = run(capsys, f"--workdir={tmp_path}/run", "--config.retrieval.search=scann")
    assert code == 2 and err.count("\n") == 1
    assert "pip install -r requirements.txt" in err and "--config.retrieval.search=exact" in err
    assert not (tmp_path / "run").exists()


def files(folder: Path) -> dict:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("argument", "message"),
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
        ("--config.eval.exemplars=npz:", "must be one of train, train+valid, npz:PATH, images:PATH"),
        ("--config.eval.iwae_samples=0", "at least 1"),
        ("--config.eval.candidates=0", "at least 1"),
        ("--config.eval.tolerance=-1", "at least 0"),
        ("--task=evaluate", "holds no run"),
        ("--task=sample", "holds no run"),
        ("--config.generate.index=3,x", "must be integers at least 0"),
        ("--config.generate.index=1.5", "must be integers at least 0"),
        ("--config.generate.temperature=-1", "at least 0"),
        ("--config.augment.lambdas=0.5,1.5", "must be numbers in 0..1"),
        ("--config.augment.lambdas=()", "at least one number"),
        ("--config.augment.split=tset", "did you mean 'test'"),
        ("--config.augment.label_smoothing=1", "less than 1"),
        ("--out=x.npz", "--out goes with --task=sample, interpolate, iterate, represent, not with train"),
        ("--task=represent --out=folder", "must be a .npz file"),
        ("--config=experiments/mnist_parzen.py --task=sample", "can only be evaluated"),
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
def test_bad_argument_is_a_one_line_error_with_exit_code_2(capsys, tmp_path, argument, message):
    code, err = run(capsys, f"--workdir={tmp_path}/run", *argument.split())
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert not files(tmp_path)


def test_arguments_of_an_experiment_reach_its_config(capsys, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(loop, "main", lambda config, workdir: seen.append((config, str(workdir))))
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


def test_workdir_of_another_config_is_refused_and_untouched(capsys, copied, tmp_path, tiny_flags):
    (tmp_path / "plain.py").write_text("from exvae.config import get_config\n")
    flags, config = [*tiny_flags, f"--workdir={copied[1]}", "--config.train.epochs=1"], str(tmp_path / "plain.py")
    code, err = run(capsys, *flags, config=config)
    assert code == 0, err  # the config of the run in this folder, which is finished
    before = files(copied[1])
    code, err = run(capsys, *flags, "--config.train.batch_size=20", config=config)
    assert code == 2
    assert err.count("here,") == 1 and "train.batch_size: 20 here, 40 in the run" in err
    assert files(copied[1]) == before


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--task=sample --config.generate.index=320", "there is no exemplar 320: they are numbered 0..319"),
        ("--task=interpolate --config.generate.index=0,999", "there is no exemplar 999"),
        ("--task=iterate --config.generate.label=5000", "there is no exemplar with label 5000: labels are"),
        ("--task=sample --config.eval.exemplars=npz:{tmp}/small.npz", "images of 9x9x1, but the model is for 28x28x1"),
        ("--task=sample --config.generate.label=0 --config.eval.exemplars=npz:{tmp}/bare.npz", "have no labels"),
        ("--task=represent --config.represent.explain=40", "there is no test image 40, only 0..39"),
        ("--task=augment --config.augment.batch_size=361", "must be at most 360 (the training images)"),
        ("--task=sample --out={tmp}/bare.npz/x.npz", "cannot be written"),
    ],
)
def test_tasks_refuse_what_does_not_exist_and_write_nothing(capsys, copied, tmp_path, tiny_flags, argument, message):
    np.savez(tmp_path / "small.npz", images=np.zeros((5, 9, 9), np.uint8))
    np.savez(tmp_path / "bare.npz", images=np.zeros((5, 28, 28), np.uint8))
    before = files(tmp_path)
    code, err = run(capsys, *tiny_flags, f"--workdir={copied[1]}", *argument.format(tmp=tmp_path).split())
    assert code == 2 and message in err and err.count("\n") == 1
    assert files(tmp_path) == before


def test_unwritable_workdir_is_refused(capsys, tmp_path, tiny_flags):
    (tmp_path / "file").write_text("in the way")
    code, err = run(capsys, *tiny_flags, f"--workdir={tmp_path}/file/run")
    assert code == 2
    assert "cannot be written" in err


PROGRAM = """
import runpy, sys
try:
    runpy.run_path("launch.py", run_name="__main__")
except SystemExit as end:
    print(end.code, sorted({"jax", "flax", "optax", "orbax", "tensorboardX", "matplotlib"} & set(sys.modules)))
"""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--config=experiments/celeba.py:runlocal", "--hlep"], 2),
        (["--config=experiments/mnist_vae.py:prior=vamb"], 2),
        (["--config=experiments/quickstart.py", "--config.train.epocs=3"], 2),
        (["--config=experiments/quickstart.py", "--sweep=sed=0,1"], 2),
    ],
)
def test_help_and_mistakes_do_not_import_jax(arguments, code):
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == f"{code} []", done.stderr
    assert ("--sweep" in done.stdout) == (code == 0)
    assert done.stderr.count("\n") == (code == 2), done.stderr


def test_command_prints_a_user_error_without_a_traceback():
    command = [sys.executable, "launch.py", "--config=experiments/mnist_vae.py", "--config.data.name=mnits"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""
