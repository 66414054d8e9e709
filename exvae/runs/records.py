"""Results of single images, saved one by one: a killed evaluation continues where it stopped."""

from __future__ import annotations

import contextlib
import fcntl
import json
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from exvae.errors import UserError

Record = dict[str, Any]  # one line of JSON


def fingerprint(tree: PyTree) -> int:
    """A checksum of all arrays in a tree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.ascontiguousarray(leaf).data, total)
    return total


class Memory:
    """Records in memory. A new record replaces an older one with the same value of the field `key`."""

    def __init__(self, key: str = "image"):
        self._key = key
        self._records: dict[int | str, Record] = {}

    def get(self, name: int | str) -> Record | None:
        """The record whose field `key` is `name`, if there is one."""
        return self._records.get(name)

    def add(self, records: list[Record]) -> None:
        """Keep these records."""
        self._records |= {record[self._key]: record for record in records}

    def close(self) -> None:
        """Do nothing: there is no file."""
        pass


class Records(Memory):
    """Records in the file `<folder>/<checksum of settings>.jsonl` of a run: a line of settings, then one per record.

    One process at a time appends lines and never changes them. If a kill left an incomplete line, it is removed when
    the file is opened again.
    """

    def __init__(self, workdir: Path, settings: dict[str, Any], *, folder: str = "evaluations", key: str = "image"):
        super().__init__(key)
        (workdir / folder).mkdir(exist_ok=True)
        header = json.dumps(settings, sort_keys=True)
        self.path = workdir / folder / f"{zlib.crc32(header.encode()):08x}.jsonl"
        self._file = open(self.path, "a+", encoding="latin-1")  # noqa: SIM115  (closed by close; latin-1 can read any byte)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise UserError(f"{workdir}: another process is already doing this task") from error
        self._file.seek(0)
        first, *lines = self._file.read().split("\n")[:-1] or [""]
        if first != header:
            lines = []
        for line in lines:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not a record: the image is evaluated again
                super().add([json.loads(line)])
        self._file.truncate(sum(len(line) + 1 for line in [header, *lines]) if first == header else 0)
        if first != header:
            self._write(header)

    def _write(self, *lines: str) -> None:
        self._file.write("".join(line + "\n" for line in lines))
        self._file.flush()

    def add(self, records: list[Record]) -> None:
        """Append these records and write them to the file at once, so they are not lost if the process is killed."""
        self._write(*map(json.dumps, records))
        super().add(records)

    def close(self) -> None:
        """Close the file and release its lock."""
        self._file.close()
