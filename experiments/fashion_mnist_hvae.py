"""Fashion-MNIST, HVAE.

python launch.py --config=experiments/fashion_mnist_hvae.py --workdir=runs/fashion_mnist_hvae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -226.53, vamp -226.72, gaussian -227.37.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("fashion_mnist", "hvae", argument)
