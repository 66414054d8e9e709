"""IDX files, plain or gzipped: the format of MNIST and Fashion-MNIST."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from exvae.data.types import NotHere, Split
from exvae.errors import UserError

FILES = {  # part -> images, labels
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
COUNTS = {"train": 60000, "test": 10000}
SIDE = 28
_FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fashion_mnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}


def read(folder: Path, name: str) -> dict[str, Split]:
    """Read the four standard files in `folder`.

    Raises:
      NotHere: the folder has none of them.
      UserError: some are missing or damaged, or belong to another data set than `name`.
    """
    stems = [stem for pair in FILES.values() for stem in pair]
    found = {stem: path for stem in stems if (path := _find(folder, stem)) is not None}
    if not found:
        raise NotHere(f"no {stems[0]}[.gz] in {folder}")
    missing = [stem for stem in stems if stem not in found]
    if missing:
        raise UserError(f"{folder} holds some of the four IDX files but not {', '.join(missing)} (plain or .gz)")
    parts = {}
    for part, (images, labels) in FILES.items():
        n = COUNTS[part]
        y = read_array(found[labels], (n,))
        _check_identity(part, y, found[labels], name)  # before reading the large file
        parts[part] = Split(read_array(found[images], (n, SIDE, SIDE))[..., None], y.astype(np.int32))
    return parts


def read_array(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """Read one IDX file of bytes, which must hold exactly an array of `shape`."""
    data = _read_bytes(path)
    header = 4 + 4 * len(shape)
    expected = header + math.prod(shape)
    if len(data) < header:
        raise UserError(f"{path}: truncated: expected {expected} bytes, found {len(data)}")
    if data[:4] != bytes([0, 0, 8, len(shape)]):
        raise UserError(f"{path}: not an IDX file of bytes in {len(shape)} dimensions (starts with {data[:4].hex()})")
    sizes = tuple(int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(len(shape)))
    if sizes != shape:
        raise UserError(f"{path}: wrong size: expected {_text(shape)}, found {_text(sizes)}")
    if len(data) != expected:
        what = "truncated" if len(data) < expected else "too long"
        raise UserError(f"{path}: {what}: expected {expected} bytes, found {len(data)}")
    return np.frombuffer(data, np.uint8, offset=header).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except EOFError:  # truncated: return what there is, and the caller compares the sizes
        return zlib.decompressobj(wbits=31).decompress(raw)
    except (OSError, zlib.error) as error:
        raise UserError(f"{path}: broken gzip file: {error}") from error


def _find(folder: Path, stem: str) -> Path | None:
    for path in (folder / stem, folder / f"{stem}.gz"):
        if path.is_file():
            return path
    return None


def _check_identity(part: str, labels: np.ndarray, path: Path, name: str) -> None:
    """Tell MNIST from Fashion-MNIST by the first labels: file names and sizes are the same."""
    start = labels[:10].tolist()
    for other, first in _FIRST_LABELS.items():
        if part == "train" and start == first and other != name:
            raise UserError(f"{path} belongs to {other}, not to {name}: put the files of each set into its own folder")


def _text(shape: tuple[int, ...]) -> str:
    return f"{shape[0]} items" + (f" of {'x'.join(map(str, shape[1:]))}" if shape[1:] else "")
