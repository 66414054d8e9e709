"""A program starts again with huge pages, once, and only where that helps."""

import os
import subprocess
import sys

import pytest

from exvae import huge_pages

PROGRAM = """
import os, sys
from pathlib import Path
from exvae import huge_pages
huge_pages.KERNEL = Path(sys.argv[1])
huge_pages.use()
print(os.getpid(), os.environ.get(huge_pages.VARIABLE), sys.argv[1:])
"""


def run(tmp_path, offered, **variables):
    kernel, program = tmp_path / "enabled", tmp_path / "program.py"
    kernel.write_text(offered)
    program.write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if name != huge_pages.VARIABLE}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), **variables}
    command = [sys.executable, "-W", "error", program, kernel, "a b"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        out, _ = process.communicate()
    assert process.returncode == 0 and out.endswith(f"{[str(kernel), 'a b']}\n")
    pid, variable, *_ = out.split()
    assert int(pid) == process.pid  # signals still reach it
    return variable


def test_program_starts_again_with_huge_pages_if_they_are_offered(tmp_path):
    assert run(tmp_path, "always [madvise] never\n") == huge_pages.VALUE


@pytest.mark.parametrize("offered", ["[always] madvise never\n", "always madvise [never]\n"])
def test_program_does_not_start_again_if_all_or_no_memory_has_huge_pages(tmp_path, offered):
    assert run(tmp_path, offered) == "None"


def test_the_users_value_is_kept(tmp_path):
    assert run(tmp_path, "always [madvise] never\n", GLIBC_TUNABLES="glibc.malloc.check=0") == "glibc.malloc.check=0"


def test_other_systems_do_nothing(monkeypatch, tmp_path):
    monkeypatch.delenv(huge_pages.VARIABLE, raising=False)
    monkeypatch.setattr(huge_pages, "KERNEL", tmp_path / "missing")
    huge_pages.use()
