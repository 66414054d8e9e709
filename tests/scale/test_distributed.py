"""Runs on several devices or processes equal a run on one, and if a process ends, the others end."""

import collections
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from exvae.errors import UserError
from exvae.scale import processes, sharding
from exvae.training import loop

ROOT = Path(__file__).parents[2]


def free_port() -> str:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return f"localhost:{sock.getsockname()[1]}"


def start(*command: str, devices: int) -> subprocess.Popen:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def outcome(process: subprocess.Popen, seconds: float = 300) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err


@pytest.mark.faults
def test_twenty_steps_are_the_same_on_any_number_of_devices_and_processes(tmp_path):
    """The loss and every tensor of parameters and average agree.

    The setting `none` is the exact prior, and `host` has its images on the host. convhvae has optim.estimator=stl and
    an average of its parameters.
    """
    script, coordinator = "tests/scale/steps_on_devices.py", free_port()
    alone, together = tmp_path / "alone.npz", tmp_path / "together.npz"
    started = [start(script, str(together), coordinator, number, devices=2) for number in "01"]
    started.append(start(script, str(alone), devices=4))
    for process in started:
        code, _, err = outcome(process)
        assert code == 0, err
    alone, together = dict(np.load(alone)), dict(np.load(together))
    found = {**alone, **{name.replace("4/", "2x2/"): value for name, value in together.items()}}
    settings = {tuple(name.split("/")[:3]) for name in found}
    assert collections.Counter(mesh for mesh, *_ in settings) == {"1": 6, "2": 1, "4": 5, "2x2": 4}
    averaged = {tuple(name.split("/")[:3]) for name in found if "['average']" in name}
    assert averaged == {setting for setting in settings if setting[1] == "convhvae"}
    for name, value in found.items():
        want = found[f"1/{name.partition('/')[2]}"]
        assert np.linalg.norm(value - want) <= 1e-5 * np.linalg.norm(want), name


def metric_lines(workdir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "images_per_second"} for line in lines]


@pytest.mark.faults
def test_killed_process_ends_the_other_and_the_run_resumes_on_other_devices(tiny_config, tiny_flags, tmp_path):
    """A run on one device, then on two processes until one is killed, then on one device equals a run on one device.

    Each process has two devices. 322 is no multiple of four, so the tables in the checkpoint are longer than on one
    device.
    """
    more = ["--config.data.num_images=402", "--config.retrieval.search=scann", "--config.optim.schedule=constant"]
    more += ["--config.optim.learning_rate=5e-4", "--config.optim.rise_steps=1000"]
    tiny_config.data.num_images, tiny_config.retrieval.search, tiny_config.train.epochs = 402, "scann", 1
    loop.train(tiny_config, tmp_path / "moved")
    coordinator = free_port()
    command = ["launch.py", "--config=experiments/quickstart.py", f"--workdir={tmp_path / 'moved'}", *tiny_flags, *more]
    command += ["--config.train.epochs=200", "--distributed", f"--coordinator={coordinator}", "--num_processes=2"]
    pair = [start(*command, f"--process_id={number}", devices=2) for number in range(2)]
    output = ""
    for line in pair[0].stdout:
        output += line
        if line.startswith("epoch 3 "):
            break
    assert "4 cpu devices of 2 processes" in output and "resuming from step 8 " in output, outcome(pair[0])
    assert "epoch 3 " in output, outcome(pair[0])
    pair[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    code, _, err = outcome(pair[0], seconds=60)
    assert code != 0, err  # usually JAX reports a missed heartbeat, but a checkpoint's barrier may fail first
    assert time.monotonic() - killed < 30  # 10 s on idle cores
    assert "epoch" not in outcome(pair[1])[1]  # only the first process prints
    saved = [
        int(path.name) for path in (tmp_path / "moved" / "checkpoints" / "latest").iterdir() if path.name.isdigit()
    ]
    assert max(saved) >= 16  # the checkpoint that was being written may be lost
    tiny_config.train.epochs = max(saved) // 8 + 1
    for workdir in (tmp_path / "moved", tmp_path / "straight"):
        loop.train(tiny_config, workdir)
    ours, want = (metric_lines(tmp_path / name) for name in ("moved", "straight"))
    assert [line["step"] for line in ours] == [line["step"] for line in want]
    for a, b in zip(ours, want, strict=True):
        assert a["elbo"] == pytest.approx(b["elbo"], rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("localhost:1", 2, -1), "must be given together"),
        (("", 2, 0), "must be given together"),
        (("localhost:1", 2, 2), "--process_id=2 must lie in 0..1"),
        (("localhost", 2, 1), "must be HOST:PORT"),
    ],
)
def test_bad_addresses_are_refused(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        processes.join(*arguments)


def test_batch_that_is_no_multiple_of_the_devices_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: 3 * [jax.local_devices()[0]])
    monkeypatch.setattr(jax, "local_device_count", lambda: 3)
    monkeypatch.setattr(sharding, "Mesh", lambda devices, *_, **__: type("Mesh", (), {"size": len(devices)}))
    with pytest.raises(UserError, match="config.train.batch_size=100 must be a multiple of the 3 devices"):
        sharding.make_mesh(100)


def test_unreachable_coordinator_is_a_one_line_error_within_a_time_limit(tmp_path):
    command = ["launch.py", "--config=experiments/quickstart.py", f"--workdir={tmp_path}/run", "--distributed"]
    command += [f"--coordinator={free_port()}", "--num_processes=2", "--process_id=1"]
    os.environ["EXVAE_CONNECT_SECONDS"] = "2"
    try:
        code, _, err = outcome(start(*command, devices=1), seconds=60)
    finally:
        del os.environ["EXVAE_CONNECT_SECONDS"]
    assert code == 2 and err.startswith("error: --distributed: not all processes") and "within 2 s" in err, err
    assert "Traceback" not in err and not (tmp_path / "run").exists()
