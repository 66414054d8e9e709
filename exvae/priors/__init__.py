"""Priors of the top latent. To add one, implement `prior.Prior` (a module or any object) and add it to `PRIORS`.

prior.py     the interface of a prior
exemplar.py  the exemplar prior; parzen.py has its density
vamp.py      the VampPrior
gaussian.py  the standard normal prior
"""

from exvae.priors import exemplar, gaussian, vamp
from exvae.priors.prior import Encoder, Exemplars, Prior

PRIORS: dict[str, Prior] = {"exemplar": exemplar, "gaussian": gaussian, "vamp": vamp}

__all__ = ["PRIORS", "Encoder", "Exemplars", "Prior"]
