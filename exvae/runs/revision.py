"""The revision of the code that a run is made with."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

OUTPUTS = (
    ":(top,exclude)results",
    ":(top,exclude)docs",
    ":(top,exclude)README.md",
)  # what finished runs write is no change of the code


@functools.cache
def git_revision() -> str | None:
    """The commit of the code when it was first asked for, '+' if code was changed since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *OUTPUTS)
        return git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None
