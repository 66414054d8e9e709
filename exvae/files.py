"""Writing files so that a reader never sees a half-written one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from exvae.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary file that replaces `path` when the block ends.

    Readers see either the old or the new file. If the block raises, `path` is unchanged. The temporary file is in the
    same folder; its name contains the host and the process, because jobs on several nodes may write the same file.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as file:
        file.write(text)


def write_json(path: Path, value: object) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def make_writable(folder: Path, option: str) -> None:
    """Create the folder of a command line option. Raise a UserError if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option}={folder} cannot be written: {error.strerror}") from error
