"""CelebA, 64x64 in colour: convolutional VAE with a discretized logistic likelihood.

python launch.py --config=experiments/celeba.py --workdir=runs/celeba
  :prior=gaussian | vamp       the baselines
  :runlocal                    a quarter of the channels and a few epochs, for two CPU cores and 10,000 images

Bits per dimension in the paper: exemplar 5.780, gaussian 5.825.
"""

from experiments import common
from exvae.priors import PRIORS


def get_config(argument: str = ""):
    values = common.parse(argument, {"prior": tuple(PRIORS), "runlocal": common.RUNLOCAL})
    config = common.build("celeba", "celeba", prior=values["prior"], recipe="paper")
    config.model.likelihood = "discretized_logistic"
    config.model.latent_dim = 128
    config.retrieval.num_neighbours = 5
    config.retrieval.refresh_epochs = 1  # batch norm's statistics move all means at once, also of images not in a batch
    if values["runlocal"] == "true":
        common.shrink(config, channels=16, epochs=8, kl_warmup_epochs=3, eval_images=200)
    return config
