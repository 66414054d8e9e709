"""Figures of single images, kept as they come: a killed evaluation goes on where it was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from exvae.errors import UserError


def fingerprint(tree: Any) -> int:
    """A checksum of all arrays of a tree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.ascontiguousarray(leaf), total)
    return total


class Memory:
    """Records that are kept as long as the process. Of those with the same value of the field `key` the last counts."""

    def __init__(self, key: str = "image"):
        self._key = key
        self._records: dict[Any, dict] = {}

    def get(self, name: Any) -> dict | None:
        return self._records.get(name)

    def add(self, records: list[dict]) -> None:
        self._records |= {record[self._key]: record for record in records}

    def close(self) -> None:
        pass


class Records(Memory):
    """`<folder>/<checksum of settings>.jsonl` of a run: a line of settings, then a line per record.

    Lines are appended and never changed, by one process at a time. What a kill has left of a line is cut off when the
    file is opened again.
    """

    def __init__(self, workdir: Path, settings: dict, *, folder: str = "evaluations", key: str = "image"):
        super().__init__(key)
        (workdir / folder).mkdir(exist_ok=True)
        header = json.dumps(settings, sort_keys=True)
        self.path = workdir / folder / f"{zlib.crc32(header.encode()):08x}.jsonl"
        self._file = open(self.path, "a+", encoding="latin-1")  # noqa: SIM115  (closed by close; any byte is a letter)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UserError(f"{workdir}: the same is already going on in another process") from error
        self._file.seek(0)
        first, *lines = self._file.read().split("\n")[:-1] or [""]
        if first != header:
            lines = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not a record: it is done again
                super().add([json.loads(line)])
        self._file.truncate(sum(len(line) + 1 for line in [header, *lines]) if first == header else 0)
        if first != header:
            self._write(header)

    def _write(self, *lines: str) -> None:
        self._file.write("".join(line + "\n" for line in lines))
        self._file.flush()

    def add(self, records: list[dict]) -> None:
        """Handed to the system before anything else happens to them: a kill of the process does not lose them."""
        self._write(*map(json.dumps, records))
        super().add(records)

    def close(self) -> None:
        self._file.close()
