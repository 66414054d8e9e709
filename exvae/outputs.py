"""What --out asks for: arrays in an npz file, or images as single PNGs in a folder."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from exvae import figures
from exvae.errors import UserError


def check(out: str, *, folder: bool = True) -> None:
    """Before any work: refuse what cannot be written, or what would mix with files that are there."""
    path = Path(out)
    if not out:
        return
    if not folder and path.suffix != ".npz":
        raise UserError(f"--out={out} must be a .npz file: the arrays are no images")
    if path.suffix == ".npz":
        if path.is_dir():
            raise UserError(f"--out={out} is a folder")
        path.parent.mkdir(parents=True, exist_ok=True)
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"--out={out} must be a .npz file, or a folder that is new or empty")


def save(out: str, images: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> None:
    """All arrays to a .npz file, whole or not at all; or the images (..., H, W, C), in 0..1, to a folder."""
    path = Path(out)
    if not out:
        return
    if path.suffix == ".npz":
        temporary = path.with_suffix(".npz.tmp")
        with open(temporary, "wb") as file:
            np.savez_compressed(file, **{name: figures.to_bytes(values) for name, values in images.items()}, **others)
        os.replace(temporary, path)
    else:
        for name, values in images.items():
            folder = path if len(images) == 1 else path / name
            figures.save_images(folder, values.reshape(-1, *values.shape[-3:]))
    print(f"saved    {out}")
