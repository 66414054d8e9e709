"""Parzen windows on the pixels of MNIST, Eq. (2) of the paper.

python launch.py --config=experiments/mnist_parzen.py --workdir=runs/mnist_parzen
  :kernel=gaussian             N(x | x_n, sigma^2 I) on grey pixels: a density, not comparable with the others

The default kernel flips each pixel of a binarized exemplar with a probability chosen on validation data. Its nats
are comparable with those of the VAEs. The paper has no number for it.
"""

from ml_collections import ConfigDict

from experiments import common
from exvae import config as configs

ARGUMENTS = {"kernel": ("bernoulli", "gaussian")}


def get_config(argument: str = "") -> ConfigDict:
    config = configs.get_config()
    config.data.name = "mnist"
    config.model.architecture = "parzen"
    config.model.likelihood = common.parse(argument, ARGUMENTS)["kernel"]
    return config
