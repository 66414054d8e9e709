"""Large pages of memory for large arrays. The large arrays of a step are new in each step, and so are their pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE, VALUE = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"  # malloc asks the kernel for huge pages (glibc 2.35)
KERNEL = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use() -> None:
    """Start this process again with huge pages, if Linux has them for those who ask. Call it before other imports.

    The C library reads the variable when a process starts. A value that the user has set is kept, also an empty one.
    """
    if VARIABLE in os.environ or not sys.orig_argv:
        return
    try:
        offered = "[madvise]" in KERNEL.read_text()
    except OSError:  # not Linux
        return
    if offered:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: VALUE})
