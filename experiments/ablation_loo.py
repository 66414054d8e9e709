"""The leave-one-out ablation: VAE, exemplar prior over the whole training set (M = N), with and without leave-one-out.

for data in mnist omniglot; do for loo in true false; do
  python launch.py --config=experiments/ablation_loo.py:data=$data,leave_one_out=$loo \
    --workdir=runs/ablation_loo_${data}_$loo
done; done
python -m exvae.tables runs/ablation_loo_*

  :recipe=fast                 RAT, and far fewer steps (docs/recipe.md); the paper's ablation does not use RAT

Test log-likelihood in the paper (IWAE, 5000 samples):
             with LOO   without
  mnist        -82.35   -101.33
  omniglot    -105.80   -139.12
"""

from ml_collections import ConfigDict

from experiments import common
from exvae.reproduce.paper import NUM_TRAIN

ARGUMENTS = {"data": ("mnist", "omniglot"), "leave_one_out": ("true", "false"), "recipe": common.RECIPES}


def get_config(argument: str = "") -> ConfigDict:
    values = common.parse(argument, ARGUMENTS)
    config = common.build(values["data"], "vae", prior="exemplar", recipe=values["recipe"])
    config.prior.num_exemplars = NUM_TRAIN[values["data"]]
    config.prior.leave_one_out = values["leave_one_out"] == "true"
    return config
