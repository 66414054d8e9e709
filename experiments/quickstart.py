"""A few minutes on a laptop: 5,000 MNIST digits that come with an installed package, dense VAE, RAT.

python launch.py --config=experiments/quickstart.py --workdir=runs/quickstart
"""

from experiments import common
from exvae.errors import UserError


def get_config(argument: str = ""):
    if "recipe" in argument:
        raise UserError("--config=experiments/quickstart.py takes :prior= only, its recipe is its own")
    config = common.paper_config("mnist_5k", "vae", argument)
    config.retrieval.search = "exact"
    config.optim.schedule = "cosine"
    config.optim.learning_rate = 1e-3
    config.optim.rise_steps = 200
    config.optim.kl_warmup_epochs = 15
    config.train.epochs = 60
    return config
