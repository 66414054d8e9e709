"""The git revision of the code of a run."""

from __future__ import annotations

import functools
import subprocess
from pathlib import Path

# Files that finished runs write. Changes in them are not changes of the code.
OUTPUTS = (
    ":(top,exclude)results",
    ":(top,exclude)docs",
    ":(top,exclude)README.md",
)


@functools.cache
def git_revision() -> str | None:
    """The commit at the first call, with '+' if the code has uncommitted changes; None outside a git checkout."""
    here = Path(__file__).parent

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changes = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *OUTPUTS)
        return git("rev-parse", "HEAD") + ("+" if changes else "")
    except (OSError, subprocess.CalledProcessError):
        return None
