"""Priors of the top latent. To add one, implement `prior.Prior` (a module or any object) and add it to `PRIORS`."""

from exvae.priors import exemplar, gaussian, vamp
from exvae.priors.prior import Encoder, Exemplars, Prior

PRIORS: dict[str, Prior] = {"exemplar": exemplar, "gaussian": gaussian, "vamp": vamp}

__all__ = ["PRIORS", "Encoder", "Exemplars", "Prior"]
