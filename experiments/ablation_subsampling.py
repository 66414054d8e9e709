"""The exemplar subsampling ablation: VAE, exemplar prior, leave-one-out, M = fraction * N exemplars a step.

for data in mnist omniglot; do for fraction in 1 0.5 0.2 0.1; do
  python launch.py --config=experiments/ablation_subsampling.py:data=$data,fraction=$fraction \
    --workdir=runs/ablation_subsampling_${data}_$fraction
done; done
python -m exvae.tables runs/ablation_subsampling_*

  :recipe=fast                 RAT, and a schedule of far fewer steps (docs/recipe.md)

M/N = 1 means M = N - 1 in the paper. Here it is M = N with leave-one-out, which is the same.

Test log-likelihood in the paper (IWAE, 5000 samples):
  M/N               1       0.5       0.2       0.1
  mnist        -82.35    -82.09    -82.12    -82.20
  omniglot    -105.80   -105.22   -104.95   -105.42
"""

from ml_collections import ConfigDict

from experiments import common
from exvae.reproduce.paper import NUM_TRAIN

ARGUMENTS = {"data": ("mnist", "omniglot"), "fraction": ("0.5", "1", "0.2", "0.1"), "recipe": common.RECIPES}


def get_config(argument: str = "") -> ConfigDict:
    values = common.parse(argument, ARGUMENTS)
    config = common.build(values["data"], "vae", prior="exemplar", recipe=values["recipe"])
    config.prior.num_exemplars = round(float(values["fraction"]) * NUM_TRAIN[values["data"]])
    return config
