"""Compiled programs on disk, so that a second start compiles nothing.

JAX keeps the programs (its persistent compilation cache) and finds them by their code, the compiler's options and its
version. It removes the least recently used ones when the folder is full, and a lock keeps several processes apart.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
from jax import config as jax_config
from ml_collections import ConfigDict

from exvae.data.decoding import cache_dir

LOCK = ".lockfile"  # the name that JAX uses
LOCK_SECONDS = 10.0
ENDS = ("-cache", "-atime")  # of the two files of a program: the program itself, and when it was last used
BROKEN = re.compile(r"persistent compilation cache entry for '(?P<name>[\w.]+)")


def keep(config: ConfigDict) -> None:
    """Keep all programs that this process compiles in the cache folder, for later starts.

    JAX's own variables win: JAX_COMPILATION_CACHE_DIR chooses another folder with JAX's own rules, and
    JAX_ENABLE_COMPILATION_CACHE=false turns all caching off. This changes JAX's settings for the whole process, so only
    the command line calls it, and `exvae.load` does not.
    """
    mib, settings = config.compile_cache_mib, jax_config.values
    if mib <= 0 or settings["jax_compilation_cache_dir"] or not settings["jax_enable_compilation_cache"]:
        return
    try:
        folder = cache_dir() / "compiled" / machine()
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / LOCK, timeout=LOCK_SECONDS):
            remove_unfinished(folder)
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder, or no locks
        print(f"warning: compiled programs cannot be kept for later starts: {error}", file=sys.stderr)
        return
    jax_config.update("jax_compilation_cache_dir", str(folder))
    jax_config.update("jax_compilation_cache_max_size", int(mib * 2**20))
    jax_config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # by default only slow ones are kept
    jax_config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.showwarning = _one_line(folder, warnings.showwarning)


def machine() -> str:
    """A name for this kind of CPU. A program may contain instructions that another CPU does not have."""
    flags = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:8]}"


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process or a full disk left: JAX 0.10 would then refuse to write any other program.

    Of the two files of a program, the time of its last use is written last.
    """
    programs, uses = ({path.name.removesuffix(end) for path in folder.glob(f"*{end}")} for end in ENDS)
    for name in programs ^ uses:
        _remove(folder, name)


def _remove(folder: Path, name: str) -> None:
    for end in ENDS:
        for path in folder.glob(f"{name}{end}"):
            path.unlink(missing_ok=True)


def _one_line(folder: Path, show: Callable[..., None]) -> Callable[..., None]:
    """Make a function that shows warnings. It prints the first failure of the cache in one line and hides the others.

    It also removes programs that cannot be read, so that they are compiled and written again.
    """
    said = False

    def showwarning(message: Warning | str, *args: Any, **options: Any) -> None:
        nonlocal said
        found = BROKEN.search(str(message))
        if found is None:
            show(message, *args, **options)
            return
        if not said:
            print(f"warning: {folder}: {' '.join(str(message).split())}", file=sys.stderr)
        said = True
        if "reading" in str(message):
            _remove(folder, f"{found['name']}-*")

    return showwarning
