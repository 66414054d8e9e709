"""Omniglot, PixelSNAIL HVAE.

python launch.py --config=experiments/omniglot_pixelsnail.py --workdir=runs/omniglot_pixelsnail
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)
  :runlocal                    smaller and shorter, for two CPU cores

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -89.28, vamp -89.50, gaussian -89.59.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.pixelsnail("omniglot", argument)
