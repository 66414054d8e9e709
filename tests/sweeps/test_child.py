"""Child processes end when their parent ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from exvae.sweeps import child

ROOT = Path(__file__).parents[2]
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a child with its parent")


def test_command_runs_unchanged_from_any_folder(tmp_path):
    program = "import signal, sys; print(sys.argv[1:], signal.getsignal(signal.SIGUSR2) == signal.SIG_IGN)"
    words = ["--config.a=b c", "", "--", "-I"]
    program = child.command([sys.executable, "-c", program, *words])
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"{words} True\n" and done.stderr == ""


@needs_linux
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_child_is_killed_with_its_parent(tmp_path, how):
    sleeper = "import time; print('up', flush=True); time.sleep(600)"
    parent = (
        f"import subprocess, sys; sys.path.insert(0, {str(ROOT)!r}); from exvae.sweeps import child; "
        f"subprocess.run(child.command([sys.executable, '-c', {sleeper!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    os.kill(process.pid, how)
    process.communicate(timeout=30)  # reads to the end of the pipe, which a running child would keep open
    assert process.returncode == -how


@needs_linux
def test_child_does_not_start_after_its_parent_has_ended():
    program = child.command([sys.executable, "-c", "print('began')"])
    program[program.index(str(os.getpid()))] = "1"  # not the parent of the child
    done = subprocess.run(program, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and "has ended" in done.stderr
