"""Exemplar VAEs in JAX: `exvae.load("runs/x")` returns a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exvae.run import Run


def load(workdir: str | Path, *, data_dir: str = "") -> Run:
    """Load the trained model of a run.

    Args:
      workdir: the folder of the run.
      data_dir: the folder of its data files, if they have moved since training.
    """
    from exvae import run  # imported here, so that `import exvae` is fast

    return run.load(workdir, data_dir=data_dir)
