"""Exemplar VAEs in JAX: `exvae.load("runs/x")` gives a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exvae.run import Run


def load(workdir: str | Path, *, data_dir: str = "") -> Run:
    """The trained model in a run's folder; `data_dir` where its data have moved since."""
    from exvae import run  # here, so that `import exvae` costs nothing

    return run.load(workdir, data_dir=data_dir)
