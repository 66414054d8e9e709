"""`chardata.mat`: Omniglot at 28x28, made by Burda et al. and used in the paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from exvae.data.sources import npz
from exvae.data.types import NotHere, Split
from exvae.errors import UserError

FILE = "chardata.mat"
_SIDE = 28


def read(folder: Path) -> dict[str, Split]:
    """Read `chardata.mat` in `folder`. Labels number the characters, with the same numbers in train and test."""
    path = folder / FILE
    if not path.is_file():
        raise NotHere(f"no {FILE} in {folder}")
    mat = _load(path)
    images = {"train": "data", "test": "testdata"}
    missing = [key for key in images.values() if key not in mat]
    if missing:
        raise UserError(f"{path}: has no {' and no '.join(missing)}")
    labels = _characters(mat)
    return {
        part: Split(upright(mat[key], f"{path}: {key}"), None if labels is None else labels[part])
        for part, key in images.items()
    }


def upright(columns: np.ndarray, where: str) -> np.ndarray:
    """Convert (784, n) floats, one image per column in MATLAB's order (columns first), to (n, 28, 28, 1) bytes."""
    if columns.ndim != 2 or columns.shape[0] != _SIDE * _SIDE:
        raise UserError(f"{where}: shape {columns.shape}; expected ({_SIDE * _SIDE}, n)")
    images = columns.reshape(_SIDE, _SIDE, -1, order="F")  # (row, column, n)
    return npz.to_uint8(np.ascontiguousarray(np.moveaxis(images, 2, 0)), where)


def _load(path: Path) -> dict[str, Any]:
    import scipy.io  # takes 0.2 s, so it is imported only here

    try:
        return scipy.io.loadmat(path)
    except Exception as error:  # scipy does not document what it raises for broken files
        raise UserError(f"{path}: truncated or not a MATLAB file: {str(error).splitlines()[0]}") from error


def _characters(mat: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """Number the pairs (alphabet, character of that alphabet); None if the file does not have them."""
    keys = ("target", "targetchar", "testtarget", "testtargetchar")
    if any(key not in mat for key in keys):
        return None
    pairs = [
        np.stack([mat[alphabet].argmax(axis=0), mat[character].ravel().astype(np.int64)], axis=1)
        for alphabet, character in (keys[:2], keys[2:])
    ]
    ids = np.unique(np.concatenate(pairs), axis=0, return_inverse=True)[1].ravel().astype(np.int32)
    return {"train": ids[: len(pairs[0])], "test": ids[len(pairs[0]) :]}
