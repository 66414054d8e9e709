"""Pictures. The only module that knows matplotlib."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Float


def tile(images: Float[np.ndarray, "R C h w c"], border: int = 1) -> Float[np.ndarray, "H W c"]:
    """Images in rows and columns with thin borders."""
    padded = np.pad(images, ((0, 0), (0, 0), (0, border), (0, border), (0, 0)), constant_values=0.5)
    rows, columns, height, width, channels = padded.shape
    whole = padded.transpose(0, 2, 1, 3, 4).reshape(rows * height, columns * width, channels)
    return np.pad(whole, ((border, 0), (border, 0), (0, 0)), constant_values=0.5)


def save_grid(path: Path, images: Float[np.ndarray, "R C h w c"], scale: int = 2) -> None:
    """Write images in 0..1 as one PNG, each pixel `scale` pixels wide."""
    from matplotlib import image

    path.parent.mkdir(parents=True, exist_ok=True)
    picture = np.clip(tile(images), 0.0, 1.0).repeat(scale, 0).repeat(scale, 1)
    if picture.shape[-1] == 1:
        picture = picture.repeat(3, -1)
    image.imsave(path, picture)
