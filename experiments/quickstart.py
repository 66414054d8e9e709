"""A few minutes on a laptop: 5,000 MNIST digits from an installed package, dense VAE, RAT.

python launch.py --config=experiments/quickstart.py --workdir=runs/quickstart
"""

from ml_collections import ConfigDict

from experiments import common
from exvae.errors import UserError


def get_config(argument: str = "") -> ConfigDict:
    if "recipe" in argument:
        raise UserError("--config=experiments/quickstart.py takes only :prior=; it has its own recipe")
    values = common.parse(argument, {"prior": common.ARGUMENTS["prior"]})
    config = common.build("mnist_5k", "vae", recipe="fast", **values)
    # An epoch has only 40 steps: average over fewer steps, and use more weight decay.
    config.optim.ema = 0.99
    config.optim.weight_decay = 0.3
    config.optim.rise_steps = 200
    config.optim.kl_warmup_epochs = 5
    config.train.batch_size = 100
    config.train.epochs = 40
    config.train.validate_epochs = 1
    return config
