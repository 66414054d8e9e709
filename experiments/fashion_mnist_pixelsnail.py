"""Fashion-MNIST, PixelSNAIL HVAE.

python launch.py --config=experiments/fashion_mnist_pixelsnail.py --workdir=runs/fashion_mnist_pixelsnail
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)
  :runlocal                    smaller and shorter, for two CPU cores

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -223.26, vamp -223.45, gaussian -223.68.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.pixelsnail("fashion_mnist", argument)
