"""Priors of the top latent (`prior.Prior`). A new one is a file, or any object with these methods, and a line here."""

from exvae.priors import exemplar, gaussian, vamp
from exvae.priors.prior import Encoder, Exemplars, Prior

PRIORS: dict[str, Prior] = {"exemplar": exemplar, "gaussian": gaussian, "vamp": vamp}

__all__ = ["PRIORS", "Encoder", "Exemplars", "Prior"]
