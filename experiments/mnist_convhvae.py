"""Dynamic MNIST, ConvHVAE.

python launch.py --config=experiments/mnist_convhvae.py --workdir=runs/mnist_convhvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -79.58, vamp -79.67, gaussian -80.52.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("mnist", "convhvae", argument)
