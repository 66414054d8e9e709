"""Early stopping: training ends after `train.patience` epochs without a better validation ELBO."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from exvae.state import EarlyStopping


def is_over(stopping: EarlyStopping, patience: int) -> bool:
    """Return whether training should end."""
    # Differs from the authors' code: training ends after `patience` bad epochs. The code allows one more.
    return int(stopping.bad_epochs) >= patience


def update(stopping: EarlyStopping, epoch: int, elbo: float, *, warmup_epochs: int, every: int = 1) -> EarlyStopping:
    """Return the record after the validation of an epoch.

    The number of bad epochs stays 0 until the KL warm-up ends, because the objective changes during the warm-up.

    Args:
      every: epochs between two validations.
    """
    if np.float32(elbo) > np.float32(stopping.best_elbo):  # in the precision of the record
        return EarlyStopping(jnp.float32(elbo), jnp.int32(epoch), jnp.int32(0))
    # Differs from the paper: epochs of the warm-up do not count as bad, as in the authors' code.
    bad = int(stopping.bad_epochs) + every if epoch >= warmup_epochs else 0
    return stopping._replace(bad_epochs=jnp.int32(bad))
