"""Files that are never seen half written."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from exvae.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a file that takes the place of `path` when the block ends: at any time `path` is the old or the new one.

    It is written beside `path` under a name of this process's own, since jobs on several nodes may write the same file.
    If the block fails, `path` stays as it was.
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
    with replacing(path) as file:
        file.write(text)


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")


def make_writable(folder: Path, option: str) -> None:
    """Make the folder of a command line option, or say in one line that it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{socket.gethostname()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"{option}={folder} cannot be written: {error.strerror}") from error
