"""Omniglot, HVAE.

python launch.py --config=experiments/omniglot_hvae.py --workdir=runs/omniglot_hvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -102.25, vamp -103.30, gaussian -104.92.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("omniglot", "hvae", argument)
