"""Figures of single images, kept as they come: a killed evaluation goes on where it was."""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np


def fingerprint(tree: Any) -> int:
    """A checksum of all arrays of a tree."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        total = zlib.crc32(np.ascontiguousarray(leaf), total)
    return total


class Records:
    """`evaluations/<checksum of settings>.jsonl`: a line of settings, then a line per image; the last one counts.

    Lines are appended and never changed. One that a kill has cut short is dropped when the file is opened again.
    """

    def __init__(self, workdir: Path, settings: dict):
        folder = workdir / "evaluations"
        folder.mkdir(exist_ok=True)
        header = json.dumps(settings, sort_keys=True)
        self.path = folder / f"{zlib.crc32(header.encode()):08x}.jsonl"
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []  # what follows the last newline
        self._images: dict[int, dict] = {}
        for line in lines[1:] if lines[:1] == [header] else []:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # not a record: the image is done again
                record = json.loads(line)
                self._images[record["image"]] = record
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(line + "\n" for line in [header, *map(json.dumps, self._images.values())]))
        os.replace(temporary, self.path)
        self._file = open(self.path, "a")  # noqa: SIM115  (closed by close)

    def get(self, image: int) -> dict | None:
        return self._images.get(image)

    def add(self, records: list[dict]) -> None:
        """On the disk before anything else happens to them."""
        self._file.write("".join(json.dumps(record) + "\n" for record in records))
        self._file.flush()
        self._images |= {record["image"]: record for record in records}

    def close(self) -> None:
        self._file.close()
