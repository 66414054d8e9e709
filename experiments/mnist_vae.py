"""Dynamic MNIST, VAE.

python launch.py --config=experiments/mnist_vae.py --workdir=runs/mnist_vae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -82.09, vamp -82.43, gaussian -84.45.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("mnist", "vae", argument)
