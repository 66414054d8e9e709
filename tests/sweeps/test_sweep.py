"""Sweeps: the grid, the points to run, failures, and the table. Most points here are a few lines of Python."""

import contextlib
import csv
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from absl import flags

import launch
from exvae import config as configs
from exvae.errors import UserError
from exvae.sweeps import sweep

ROOT = Path(__file__).parents[2]
# Replaces launch.py: writes the files of a run. The last argument chooses how it ends.
CHILD = """
import json, os, sys, time
folder, config, elbo, how = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
print("devices", os.environ.get("CUDA_VISIBLE_DEVICES"))
if how == "fail":
    sys.exit("error: no luck")
with open(folder + "/metrics.jsonl", "a") as file:
    for epoch, value in enumerate((elbo - 5, elbo, elbo - 1), start=1):
        print(json.dumps({"step": epoch, "epoch": epoch, "split": "valid", "elbo": value}), file=file)
        print(json.dumps({"step": epoch, "epoch": epoch, "split": "train", "elbo": 0.0}), file=file, flush=True)
if how == "hang":
    time.sleep(60)
if how == "die":
    os.kill(os.getpid(), 9)
config["prior"]["num_exemplars"] = config["prior"]["num_exemplars"] or 2000
config["retrieval"]["rebuild_steps"] = config["retrieval"]["rebuild_steps"] or 500
test = {"elbo": elbo - 2, "log_likelihood": elbo + 1}
with open(folder + "/results.json", "w") as file:
    json.dump({"test": test, "best_epoch": 2, "config": config, "seconds": 7.25}, file)
"""
ELBOS = {0: -110.125, 1: -100.0, 2: -120.0, 3: -90.0}  # by seed


def fake_children(how: dict[int, str] | None = None):
    """A replacement of `sweep.child_command`. `how` maps seeds to "fail", "die" or "hang"."""

    def command(words, point):
        seed = point.config.seed
        config = json.dumps(point.config.to_dict())
        behaviour = (how or {}).get(seed, "finish")
        return [sys.executable, "-c", CHILD, str(point.folder), config, str(ELBOS[seed]), behaviour]

    return command


@pytest.fixture
def children(monkeypatch):
    monkeypatch.setattr(sweep, "POLL_SECONDS", 0.01)
    return lambda how=None: monkeypatch.setattr(sweep, "child_command", fake_children(how))


def run(folder: Path, text: str, *, workers: int = 2, executor: str = "local", slurm: str = "", **fields) -> None:
    config = configs.get_config()
    config.update_from_flattened_dict(fields)
    sweep.main(config, folder, ["launch.py"], text, workers=workers, executor=executor, slurm=slurm)


def starts(folder: Path) -> int:
    """How many times a point was started."""
    return (folder / "log.txt").read_text().count("$ ")


def table(folder: Path) -> list[dict]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def run_launch(capsys, *arguments: str, config: str = "experiments/quickstart.py") -> tuple[int, str, str]:
    """Exit code and output of `python launch.py ...`, in this process."""
    argv = ["launch.py", f"--config={config}", "--task=train", "--out=", *arguments]
    with mock.patch.object(sys, "argv", argv):  # config_flags reads the fields that are set from it
        code = launch.main(argv)
    for name in [name for name in flags.FLAGS if name.startswith("config.")]:
        delattr(flags.FLAGS, name)
    for name in ("distributed", *sweep.OWN_FLAGS):  # so that later tests in this process run no sweep
        flags.FLAGS[name].unparse()
    return code, *capsys.readouterr()


def test_grid_is_the_product_in_order_and_typed(tmp_path):
    grid = sweep.parse(" seed = 0, 1 ;config.optim.learning_rate=1e-3,5e-4;prior.leave_one_out=False; ")
    assert grid == {"seed": ["0", "1"], "optim.learning_rate": ["1e-3", "5e-4"], "prior.leave_one_out": ["False"]}
    config = configs.get_config()
    points = sweep.make_points(config, grid, tmp_path)
    assert [(p.config.seed, p.config.optim.learning_rate) for p in points] == [
        (0, 1e-3),
        (0, 5e-4),
        (1, 1e-3),
        (1, 5e-4),
    ]
    assert all(p.config.prior.leave_one_out is False for p in points)
    assert config == configs.get_config()
    assert points[0].folder == tmp_path / "seed=0,optim.learning_rate=1e-3,prior.leave_one_out=False"


def test_values_with_commas_are_in_parentheses(tmp_path):
    grid = sweep.parse("augment.lambdas=(1,0.4),(1, 0.8),0.5;generate.index=(),(3,5)")
    points = sweep.make_points(configs.get_config(), grid, tmp_path)
    assert [p.config.augment.lambdas for p in points[::2]] == [(1, 0.4), (1, 0.8), (0.5,)]
    assert [p.config.generate.index for p in points[:2]] == [(), (3, 5)]
    assert points[0].folder.name == "augment.lambdas=(1,0.4),generate.index=()"


def test_folder_names_are_safe_and_distinct(tmp_path):
    values = ["npz:a/b", "npz:a_b", "npz:a b", "npz:ä_b", "npz:" + 300 * "x", "npz:" + 301 * "x", "npz:../../up"]
    points = sweep.make_points(configs.get_config(), {"eval.exemplars": values}, tmp_path)
    names = [point.folder.name for point in points]
    assert len(set(names)) == len(values)
    for point in points:
        point.folder.mkdir()
        assert point.folder.parent == tmp_path and not set("/: ä") & set(point.folder.name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep=;"], "must be FIELD=VALUE"),
        (["--sweep=seed"], "must be FIELD=VALUE"),
        (["--sweep=seed="], "no value empty"),
        (["--sweep=seed=1,,2"], "no value empty"),
        (["--sweep=sede=1"], "'sede' is not a config field; did you mean 'seed'?"),
        (["--sweep=optim.learning_rat=1"], "did you mean 'optim.learning_rate'?"),
        (["--sweep=optim=1"], "'optim' is not a config field"),
        (["--sweep=seed=1;config.seed=2"], "seed occurs twice"),
        (["--sweep=seed=1,2,1"], "seed=1 and seed=1 are the same"),
        (["--sweep=optim.learning_rate=1e-3,5e-4,0.001"], "are the same: give each value once"),
        (["--sweep=seed=0,x"], "--config.seed=x: invalid literal"),
        (["--sweep=seed=1.5"], "--config.seed=1.5: invalid literal"),
        (["--sweep=prior.leave_one_out=maybe"], "--config.prior.leave_one_out=maybe"),
        (["--sweep=augment.lambdas=(1,2)"], "must be numbers in 0..1"),
        (["--sweep=augment.lambdas=(1,0.4"], "must be numbers in 0..1"),
        (["--sweep=seed=0;prior.name=vamp,vamb"], "seed=0,prior.name=vamb: config.prior.name='vamb' must be one of"),
        (["--sweep=seed=0,-1"], "config.seed=-1 must be at least 0"),
        (["--sweep=seed=0", "--sweep_workers=0"], "--sweep_workers=0"),
        (["--sweep=seed=0", "--sweep_executor=slrm"], "should be one of"),
        (["--sweep=seed=0", "--sweep_slurm=partition=gpu"], "needs --sweep_executor=slurm, not local"),
        (["--sweep=seed=0", "--sweep_executor=slurm", "--sweep_slurm=gpu"], "must be NAME=VALUE"),
        (["--sweep=seed=0", "--task=evaluate"], "--sweep goes with --task=train, not with evaluate"),
        (["--sweep=seed=0", "--distributed"], "cannot be combined with --distributed or --out"),
        (["--sweep=seed=0", "--out=x.npz"], "cannot be combined with --distributed or --out"),
    ],
)
def test_bad_sweep_is_a_one_line_error_and_nothing_runs(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(sweep, "start", lambda *_, **__: pytest.fail("a point was run"))
    code, _, err = run_launch(capsys, f"--workdir={tmp_path}/sweep", *arguments)
    assert code == 2 and err.count("\n") == 1 and message in err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] in ([], [".sweep.lock"])


def test_command_of_a_point_is_that_of_the_sweep_without_its_flags(tmp_path):
    (tmp_path / "flags").write_text("--sweep_workers=3\n--config.train.epochs=5\n")
    argv = "launch.py --config=x.py:prior=vamp --sweep seed=0,1 --workdir w --config.augment.lambdas (1,0.5)"
    argv += " --config.generate.label -1 -sweep_executor=local --config.prior.leave_one_out --config.train.batch_size=7"
    words = sweep.common_words(
        [*argv.split(), f"--flagfile={tmp_path}/flags"], ["augment.lambdas", "generate.label", "prior.leave_one_out"]
    )
    assert words == ["--config=x.py:prior=vamp", "--config.train.batch_size=7", "--config.train.epochs=5"]
    point = sweep.Point({"seed": "0", "augment.lambdas": "(1, 0.4)"}, configs.get_config(), Path("w/p"))
    assert sweep.child_command(words, point) == [
        sys.executable, str(ROOT / "launch.py"), *words, "--config.seed=0", "--config.augment.lambdas=(1, 0.4)",
        "--workdir=w/p",
    ]  # fmt: skip


def test_default_folder_is_named_after_the_experiment(capsys, monkeypatch):
    seen = []
    monkeypatch.setattr(sweep, "main", lambda config, workdir, *_, **__: seen.append(str(workdir)))
    assert run_launch(capsys, "--workdir=", "--sweep=seed=0")[0] == 0
    assert run_launch(capsys, "--config=experiments/mnist_vae.py:prior=vamp", "--sweep=seed=0")[0] == 0
    assert seen == ["runs/quickstart-sweep", "runs/mnist_vae-prior=vamp-sweep"]


def test_finished_points_are_skipped(tmp_path, children, capsys):
    children()
    run(tmp_path, "seed=0,1")
    run(tmp_path, "seed=1,2")  # a grid may grow and shrink
    assert [starts(tmp_path / f"seed={seed}") for seed in range(3)] == [1, 1, 1]
    assert "points: 2, finished before: 1" in capsys.readouterr().out
    assert {row["seed"] for row in table(tmp_path)} == {"1", "2"}


@pytest.mark.parametrize(
    ("fields", "skipped"),
    [
        ({}, True),
        ({"data.dir": "elsewhere", "train.checkpoint_minutes": 1.0, "generate.seed": 3}, True),
        ({"prior.num_exemplars": 2000}, True),  # the value that 0 stands for
        ({"prior.num_exemplars": 1000}, False),
        ({"train.epochs": 3000}, False),
        ({"train.patience": 60}, False),
        ({"eval.num_images": 10}, False),
        ({"model.hidden_dim": 20}, False),
    ],
)
def test_point_is_finished_if_nothing_that_matters_has_changed(tmp_path, children, fields, skipped):
    children()
    run(tmp_path, "seed=0")
    run(tmp_path, "seed=0", **fields)
    assert starts(tmp_path / "seed=0") == (1 if skipped else 2)


@pytest.mark.parametrize("broken", ["", "{", "[]", '{"test": {"elbo": -1.0}, "config": {}}', '{"test": null}'])
def test_point_with_broken_or_partial_results_runs_again(tmp_path, children, broken):
    children()
    run(tmp_path, "seed=0")
    results = tmp_path / "seed=0" / "results.json"
    whole = json.loads(results.read_text())
    results.write_text(broken)
    run(tmp_path, "seed=0")
    assert starts(tmp_path / "seed=0") == 2 and json.loads(results.read_text()) == whole


def test_failed_points_are_reported_and_the_others_run(tmp_path, children, capsys):
    children({1: "fail", 3: "die"})
    with pytest.raises(OSError, match="2 of 4 points failed"):
        run(tmp_path, "seed=1,0,3,2")
    out = capsys.readouterr().out
    log = tmp_path / "seed=1" / "log.txt"
    assert f"failed   seed=1  exit code 1: error: no luck  ({log}); " in out
    assert "failed   seed=3  killed by SIGKILL" in out
    assert "done     seed=2  valid elbo -120.00" in out
    rows = table(tmp_path)
    assert [(row["seed"], row["status"]) for row in rows] == [
        ("0", "done"), ("2", "done"), ("3", "failed"), ("1", "failed"),
    ]  # fmt: skip
    assert rows[2]["valid_elbo"] == "-90.0" and rows[2]["test_elbo"] == ""  # the result before it failed
    children()
    run(tmp_path, "seed=1,0,3,2")
    assert [row["status"] for row in table(tmp_path)] == 4 * ["done"]
    assert [starts(tmp_path / f"seed={seed}") for seed in range(4)] == [1, 2, 1, 2]
    assert "exit code" not in (tmp_path / "sweep.txt").read_text()


def test_launch_exits_with_1_if_a_point_failed(capsys, tmp_path, children):
    children({1: "fail"})
    code, out, err = run_launch(capsys, f"--workdir={tmp_path}", "--sweep=seed=0,1")
    assert code == 1 and err == "error: 1 of 2 points failed; run the same command again to retry them\n"
    assert out.endswith((tmp_path / "sweep.txt").read_text())


def test_table_has_the_best_validation_elbo_first(tmp_path, children, capsys):
    children()
    run(tmp_path, "seed=0,1,2;model.hidden_dim=20")
    lines = (tmp_path / "sweep.txt").read_text().splitlines()
    assert capsys.readouterr().out.endswith("\n".join(lines) + "\n")
    header = "seed model.hidden_dim status best epoch valid elbo test elbo test log likelihood seconds folder"
    assert lines[0].split() == header.split()
    assert lines[2].split()[:-1] == ["0", "20", "done", "2", "-110.12", "-112.12", "-109.12", "7"]
    assert [row["seed"] for row in table(tmp_path)] == ["1", "0", "2"]
    assert table(tmp_path)[1] == {
        "seed": "0",
        "model.hidden_dim": "20",
        "status": "done",
        "best_epoch": "2",
        "valid_elbo": "-110.125",
        "test_elbo": "-112.125",
        "test_log_likelihood": "-109.125",
        "seconds": "7.25",
        "folder": str(tmp_path / "seed=0,model.hidden_dim=20"),
    }


def test_point_without_validation_has_a_row(tmp_path):
    """A Parzen window has no epochs and no ELBO."""
    point = sweep.make_points(configs.get_config(), {"seed": ["0"]}, tmp_path)[0]
    point.folder.mkdir()
    results = {"test": {"log_likelihood": -1.5}, "config": point.config.to_dict(), "seconds": None}
    (point.folder / "results.json").write_text(json.dumps(results))
    assert sweep.as_text(sweep.summary([point])).splitlines()[1].split()[:7] == [
        "0",
        "done",
        "-",
        "-",
        "-",
        "-1.50",
        "-",
    ]


@pytest.mark.parametrize(
    ("visible", "workers", "shares"),
    [
        ("0,1,2,3", 2, ["0,1", "2,3"]),
        ("4,5,6", 2, ["4", "5,6"]),
        ("0,1", 2, ["0", "1"]),
        ("0,1", 5, ["0", "1", "0", "1", "0"]),
        ("GPU-a", 2, ["GPU-a", "GPU-a"]),
        ("0,1", 1, ["0,1"]),
    ],
)
def test_workers_share_the_visible_devices(visible, workers, shares):
    assert [sweep.devices(visible, worker, workers) for worker in range(workers)] == shares


def test_points_see_the_devices_of_their_worker(tmp_path, children, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    children()
    run(tmp_path, "seed=0,1,2,3", workers=2)
    lines = [(tmp_path / f"seed={seed}" / "log.txt").read_text().splitlines()[-1] for seed in range(4)]
    assert lines[:2] == ["devices 5", "devices 6"] and set(lines) == {"devices 5", "devices 6"}


def test_second_sweep_in_a_folder_is_refused(tmp_path, children):
    children()
    with sweep.lock(tmp_path, "--workdir", "sweep"), pytest.raises(UserError, match="another sweep is running"):
        run(tmp_path, "seed=0")
    run(tmp_path, "seed=0")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written"):
        run(tmp_path / "file" / "sweep", "seed=0")


PARENT = """
import signal, sys
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell and their children ignore it
sys.path[:0] = [{root!r}, {tests!r}]
import test_sweep
test_sweep.sweep.child_command = test_sweep.fake_children({{1: "hang"}})
test_sweep.run(Path({folder!r}), "seed=0,1,2", workers=1)
"""


def is_alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not count, because here nothing may collect an orphan."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_sweep_ends_its_points_and_can_be_resumed(tmp_path, children, how):
    script = PARENT.format(root=str(ROOT), tests=str(ROOT / "tests" / "sweeps"), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL) as parent:
        wait_for(lambda: (tmp_path / "seed=1" / "metrics.jsonl").exists())
        (child,) = children_of(parent.pid)
        parent.send_signal(how)
    wait_for(lambda: not is_alive(child))
    # The table was last written after seed=0.
    assert [row["status"] for row in table(tmp_path)] == ["done", "waiting", "waiting"]
    children()
    run(tmp_path, "seed=0,1,2")
    assert [starts(tmp_path / f"seed={seed}") for seed in range(3)] == [1, 2, 1]
    assert [row["status"] for row in table(tmp_path)] == 3 * ["done"]


def test_ctrl_c_ends_launch_with_130(capsys, tmp_path, children, monkeypatch):
    children({0: "hang"})

    def sleep(_, nap=time.sleep):
        while not (tmp_path / "seed=0" / "metrics.jsonl").exists():
            nap(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep.time, "sleep", sleep)
    code, _, err = run_launch(capsys, f"--workdir={tmp_path}", "--sweep=seed=0,1")
    assert code == 130 and "run the same command again to continue" in err
    assert not list(tmp_path.glob("seed=1/*"))


def test_summary_reads_the_files_of_a_real_run(trained):
    config, folder = trained
    point = sweep.Point({"seed": "0"}, config, folder)
    results = json.loads((folder / "results.json").read_text())
    (row,) = sweep.summary([point])
    assert (row["status"], row["best_epoch"], row["seconds"]) == ("done", 1, results["seconds"])
    assert (row["test_elbo"], row["test_log_likelihood"]) == tuple(
        results["test"][name] for name in ("elbo", "log_likelihood")
    )
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["valid_elbo"]] == [line["elbo"] for line in lines if line["split"] == "valid"]


def test_same_config_accepts_fields_that_a_run_fills_in():
    command = configs.get_config()
    filled = configs.resolve(command, 320)
    assert filled.prior.num_exemplars == 160 and filled.to_dict() != command.to_dict()
    assert sweep.same_config(command.to_dict(), filled.to_dict())


def test_real_point_runs_once(capsys, tmp_path):
    """The smallest run of launch.py in its own process: a Parzen window."""
    arguments = ["--config.data.name=glyphs", "--config.data.num_images=100", "--config.eval.num_images=3"]
    arguments += [f"--workdir={tmp_path}", "--sweep=model.likelihood=gaussian"]
    code, out, err = run_launch(capsys, *arguments, config="experiments/mnist_parzen.py")
    assert code == 0, out + err
    (row,) = table(tmp_path)
    assert (row["status"], row["folder"]) == ("done", f"{tmp_path}/model.likelihood=gaussian")
    results = json.loads((Path(row["folder"]) / "results.json").read_text())
    assert results["config"]["model"]["likelihood"] == "gaussian" and results["config"]["data"]["num_images"] == 100
    assert float(row["test_log_likelihood"]) == results["test"]["log_likelihood"]
    code, out, _ = run_launch(capsys, *arguments, config="experiments/mnist_parzen.py")
    assert code == 0 and "points: 1, finished before: 1" in out
