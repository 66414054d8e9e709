"""IDX files for the tests of several sources."""

import gzip
import struct

import numpy as np
import pytest

from exvae.data.sources import idx


def _encode(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def _write_set(folder, rng, *, suffix="", first_labels=()) -> dict[str, np.ndarray]:
    """Writes the four files, with the numbers of images in `idx.COUNTS`, and returns the arrays that they contain."""
    arrays = {}
    folder.mkdir(parents=True, exist_ok=True)
    for part, (images, labels) in idx.FILES.items():
        n = idx.COUNTS[part]
        arrays[part] = rng.integers(0, 256, (n, 28, 28), dtype=np.uint8)
        arrays[f"{part}_labels"] = rng.integers(0, 10, n, dtype=np.uint8)
        if part == "train":
            arrays["train_labels"][: len(first_labels)] = first_labels
        for stem, array in ((images, arrays[part]), (labels, arrays[f"{part}_labels"])):
            data = _encode(array)
            (folder / (stem + suffix)).write_bytes(gzip.compress(data, 1) if suffix else data)
    return arrays


@pytest.fixture
def encode():
    """`encode(array)` returns the contents of an IDX file that holds this array of bytes."""
    return _encode


@pytest.fixture
def write_set():
    """`write_set(folder, rng)` writes the four files of a data set."""
    return _write_set
