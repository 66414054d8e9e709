"""Compiled programs on disk: a second start compiles nothing, and nothing that happens to the folder stops a run."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from exvae.runs import compiled

ROOT = Path(__file__).parents[2]
# Runs launch.py, and prints the number of programs that were compiled and of those that came from the folder.
PROGRAM = """
import collections, runpy, sys, jax
counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event.rpartition("/")[2]]))
try:
    runpy.run_path("launch.py", run_name="__main__")
except SystemExit as end:
    print(end.code, counts["compile_requests_use_cache"] - counts["cache_hits"], counts["cache_hits"])
"""


def start(cache: Path, workdir: Path, *flags: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-c", PROGRAM, "--config=experiments/quickstart.py", f"--workdir={workdir}", *flags]
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment = {**inherited, "EXVAE_CACHE_DIR": str(cache), **variables}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **options)


def end(process: subprocess.Popen) -> tuple[int, int]:
    """The number of programs that a successful process compiled, and of those that it loaded."""
    out, err = process.communicate()
    code, *counts = map(int, out.splitlines()[-1].split())
    assert code == 0 and err == "", err
    return tuple(counts)


def metrics(workdir: Path) -> list[dict]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "images_per_second"} for line in lines]


def test_second_start_compiles_nothing_and_gives_the_same_bits(tiny_flags, tmp_path):
    flags = [*tiny_flags, "--config.train.epochs=1"]
    new, loaded = end(start(tmp_path / "cache", tmp_path / "a", *flags))
    assert new > 10 and loaded == 0
    assert end(start(tmp_path / "cache", tmp_path / "b", *flags)) == (0, new)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


@pytest.mark.faults
@pytest.mark.parametrize("devices", [1, 4])
def test_two_starts_at_once_share_the_folder(tiny_flags, tmp_path, devices):
    """Later runs load donated and sharded programs from the folder: a resumed run still equals a straight one."""
    flags = [*tiny_flags, "--config.train.epochs=2", "--config.optim.schedule=constant"]
    xla = {"XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"}
    both = [start(tmp_path / "cache", tmp_path / name, *flags, **xla) for name in ("a", "b")]
    assert all(sum(end(process)) > 10 for process in both)
    assert end(start(tmp_path / "cache", tmp_path / "c", *flags, "--config.train.epochs=1", **xla))[0] == 0
    end(start(tmp_path / "cache", tmp_path / "c", *flags, **xla))
    straight = metrics(tmp_path / "a")
    assert straight == metrics(tmp_path / "b")
    assert straight == [line for line in metrics(tmp_path / "c") if line["split"] != "test" or line["epoch"] == 2]


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    """The settings of a user who has set nothing, with an empty cache folder."""
    names = [name for name in jax.config.values if "compilation_cache" in name or "persistent_cache" in name]
    before = {name: jax.config.values[name] for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setenv("EXVAE_CACHE_DIR", str(tmp_path / "cache"))
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as in a user's process, warnings are no errors
        yield tmp_path / "cache"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def keep(mib: float) -> None:
    compiled.keep(ConfigDict({"compile_cache_mib": mib}))


def compile_again() -> None:
    jax.clear_caches()
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1)(jnp.zeros(3)), np.ones(3))


def entries(cache: Path) -> list[Path]:
    return sorted(cache.glob("compiled/*/*-cache"))


@pytest.mark.parametrize("mib", [0, -1])  # `validate` refuses the second, but later
def test_zero_keeps_nothing(no_cache, mib):
    keep(mib)
    assert jax.config.jax_compilation_cache_dir is None and not no_cache.exists()


def test_folder_and_switch_of_jax_win(no_cache):
    jax.config.update("jax_compilation_cache_dir", "/elsewhere")
    keep(1.0)
    assert jax.config.jax_compilation_cache_dir == "/elsewhere"
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_enable_compilation_cache", False)
    keep(1.0)
    assert jax.config.jax_compilation_cache_dir is None and not no_cache.exists()


def test_folder_stays_below_its_size(no_cache):
    keep(0.02)
    for number in range(8):
        jax.jit(lambda x, number=number: jnp.sin(x) + number)(jnp.zeros(3)).block_until_ready()
    sizes = [path.stat().st_size for path in entries(no_cache)]
    assert 0 < sum(sizes) <= 0.02 * 2**20 < 8 * max(sizes)


def test_folder_that_cannot_be_written_is_one_warning(no_cache, capsys):
    no_cache.write_text("a file in the way")
    keep(1.0)
    assert jax.config.jax_compilation_cache_dir is None
    err = capsys.readouterr().err
    assert err.startswith("warning: compiled programs cannot be kept") and err.count("\n") == 1


def test_broken_program_is_one_warning_and_is_replaced(no_cache, capsys):
    keep(1.0)
    compile_again()
    whole = {path: path.read_bytes() for path in entries(no_cache)}
    assert len(whole) > 1
    for path, contents in whole.items():
        path.write_bytes(contents[: len(contents) // 2])
    compilation_cache.reset_cache()
    compile_again()
    err = capsys.readouterr().err
    assert err.startswith(f"warning: {no_cache}") and err.count("\n") == 1 and "Error reading" in err
    assert {path: len(path.read_bytes()) for path in entries(no_cache)}.keys() == whole.keys()
    compile_again()
    assert capsys.readouterr().err == ""


def test_folder_that_becomes_unusable_is_one_warning(no_cache, capsys, monkeypatch):
    """As on a full disk."""
    others = []
    monkeypatch.setattr(warnings, "showwarning", lambda message, *_, **__: others.append(str(message)))
    keep(1.0)
    compile_again()
    [folder] = no_cache.glob("compiled/*")
    folder.rename(no_cache / "moved")
    folder.write_text("a file in the way")
    compile_again()
    err = capsys.readouterr().err
    assert err.startswith("warning: ") and err.count("\n") == 1
    warnings.warn("another warning", stacklevel=1)
    assert others == ["another warning"] and capsys.readouterr().err == ""


def test_half_of_a_program_is_removed_at_the_next_start(no_cache):
    keep(1.0)
    compile_again()
    first, *others = entries(no_cache)
    first.with_name(first.name.replace("-cache", "-atime")).unlink()  # killed between the two files
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    keep(1.0)
    assert entries(no_cache) == others
    compile_again()
    assert entries(no_cache) == [first, *others]


def test_programs_of_different_machines_are_apart(monkeypatch):
    here = compiled.machine()
    assert here == compiled.machine()
    monkeypatch.setattr(Path, "read_text", lambda _: "flags : sse2\n")
    assert compiled.machine() != here
