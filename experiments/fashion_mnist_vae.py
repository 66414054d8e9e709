"""Fashion-MNIST, VAE.

python launch.py --config=experiments/fashion_mnist_vae.py --workdir=runs/fashion_mnist_vae
  :prior=gaussian | vamp       the baselines
  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

Test log-likelihood in the paper (IWAE, 5000 samples): exemplar -226.75, vamp -227.35, gaussian -228.70.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    return common.paper_config("fashion_mnist", "vae", argument)
