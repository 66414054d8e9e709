"""What --out asks for: arrays in an npz file, or images as single PNGs in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from exvae.runs import figures
from exvae import files
from exvae.errors import UserError


def check(out: str, *, folder: bool = True) -> None:
    """Before any work, and creating nothing: refuse what cannot be written, or would mix with files that are there.

    Args:
      folder: whether a folder of PNGs is possible too.
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
        raise UserError(f"--out={out} cannot be written: {nearest} is not a folder that can be written to")


def save(out: str, images: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """All arrays to a .npz file, whole or not at all; or the images (..., H, W, C), in 0..1, to a folder."""
    if not out:
        return
    path = Path(out)
    if path.suffix == ".npz":
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.replacing(path, "wb") as file:
            np.savez_compressed(file, **{name: figures.to_bytes(values) for name, values in images.items()}, **others)
    else:
        for name, values in images.items():
            figures.save_images(path if len(images) == 1 else path / name, values.reshape(-1, *values.shape[-3:]))
    print(f"saved    {out}")
