"""The files of --out: arrays in an npz file, or images as single PNGs in a folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from exvae import files
from exvae.errors import UserError
from exvae.runs import figures


def check(out: str, *, folder: bool = True) -> None:
    """Check, before any work, that --out can be written and does not mix with existing files. Nothing is created.

    Args:
      out: the value of --out; '': nothing to check.
      folder: whether a folder of PNGs is allowed too.

    Raises:
      UserError: it cannot be written.
    """
    if not out:
        return
    path = Path(out)
    if path.suffix != ".npz" and (path.suffix or not folder):
        raise UserError(f"--out={out} must be a .npz file{', or a folder for single PNGs' if folder else ''}")
    if path.suffix == ".npz" and path.is_dir():
        raise UserError(f"--out={out} is a folder")
    if path.suffix != ".npz" and path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--out={out} must be a folder that is new or empty")
    nearest = next(parent for parent in path.absolute().parents if parent.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise UserError(f"--out={out} cannot be written: {nearest} is not a writable folder")


def save(out: str, images: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """Write all arrays to a .npz file, or only the images to a folder of PNGs.

    Args:
      out: the value of --out; '': write nothing.
      images: arrays (..., H, W, C) with values in 0..1.
      others: arrays that only a .npz file can hold.
    """
    if not out:
        return
    path = Path(out)
    if path.suffix == ".npz":
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays: dict[str, Any] = {name: figures.to_bytes(values) for name, values in images.items()} | others
        with files.replacing(path, "wb") as file:
            np.savez_compressed(file, **arrays)
    else:
        for name, values in images.items():
            figures.save_images(path if len(images) == 1 else path / name, values.reshape(-1, *values.shape[-3:]))
    print(f"saved    {out}")
