"""Fashion-MNIST, ConvHVAE.

python launch.py --config=experiments/fashion_mnist_convhvae.py --workdir=runs/fashion_mnist_convhvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -224.63, vamp -224.67, gaussian -225.38.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("fashion_mnist", "convhvae", argument)
