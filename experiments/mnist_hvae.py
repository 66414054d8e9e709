"""Dynamic MNIST, HVAE.

python launch.py --config=experiments/mnist_hvae.py --workdir=runs/mnist_hvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -81.22, vamp -81.56, gaussian -82.39.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("mnist", "hvae", argument)
