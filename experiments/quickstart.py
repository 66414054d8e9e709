"""A few minutes on a laptop: 5,000 MNIST digits that come with an installed package, dense VAE, RAT.

python launch.py --config=experiments/quickstart.py --workdir=runs/quickstart
"""

from experiments import common
from exvae.errors import UserError


def get_config(argument: str = ""):
    if "recipe" in argument:
        raise UserError("--config=experiments/quickstart.py takes :prior= only, its recipe is its own")
    values = common.parse(argument, {"prior": common.ARGUMENTS["prior"]})
    config = common.build("mnist_5k", "vae", recipe="fast", **values)
    # 40 steps an epoch: a shorter memory, and more decay a step.
    config.optim.ema = 0.99
    config.optim.weight_decay = 0.3
    config.optim.rise_steps = 200
    config.optim.kl_warmup_epochs = 5
    config.train.batch_size = 100
    config.train.epochs = 40
    config.train.validate_epochs = 1
    return config
