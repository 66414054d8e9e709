"""A million procedural glyphs, VAE, retrieval augmented training with ScaNN: very many exemplars on one machine.

python launch.py --config=experiments/glyphs_million.py --workdir=runs/glyphs_million
  :prior=gaussian | vamp       the baselines

Not in the paper. Two epochs of 8,000 steps, 800,000 exemplars.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    values = common.parse(argument, {"prior": common.ARGUMENTS["prior"]})
    config = common.build("glyphs", "vae", recipe="paper", **values)
    config.data.num_images = 1_000_000
    config.retrieval.search = "scann"
    config.optim.kl_warmup_epochs = 1
    config.train.epochs = 2
    config.eval.num_images = 100
    return config
