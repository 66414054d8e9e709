"""Omniglot, VAE.

python launch.py --config=experiments/omniglot_vae.py --workdir=runs/omniglot_vae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -105.22, vamp -106.78, gaussian -108.34.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("omniglot", "vae", argument)
