"""Omniglot, ConvHVAE.

python launch.py --config=experiments/omniglot_convhvae.py --workdir=runs/omniglot_convhvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -96.38, vamp -97.30, gaussian -98.12.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("omniglot", "convhvae", argument)
