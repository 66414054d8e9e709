"""Dynamic MNIST, PixelSNAIL HVAE.

python launch.py --config=experiments/mnist_pixelsnail.py --workdir=runs/mnist_pixelsnail
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)
  :runlocal                    smaller and shorter, for two CPU cores

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -77.95, vamp -77.90, gaussian -78.20.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.pixelsnail("mnist", argument)
