"""CelebA, 64x64 in colour: convolutional VAE with a discretized logistic likelihood.

python launch.py --config=experiments/celeba.py --workdir=runs/celeba
  :prior=gaussian | vamp       the baselines
  :runlocal                    a quarter of the channels and 8 epochs, for two CPU cores and 10,000 images

Bits per dimension in the paper: exemplar 5.780, gaussian 5.825.
"""

from ml_collections import ConfigDict

from experiments import common


def get_config(argument: str = "") -> ConfigDict:
    values = common.parse(argument, {"prior": common.PRIORS, "runlocal": common.RUNLOCAL})
    config = common.build("celeba", "celeba", prior=values["prior"], recipe="paper")
    config.data.image_size, config.data.colour = 64, True  # for the user's own images:PATH
    config.model.likelihood = "discretized_logistic"
    config.model.latent_dim = 128
    config.retrieval.num_neighbours = 5
    # Differs from the paper: the whole table is encoded every epoch, as in the authors' code, because batch norm
    # changes all means.
    config.retrieval.refresh_epochs = 1
    # Differs from the paper: the log-likelihood is of 1000 random test images, not of all 19,962.
    config.eval.num_images = 1000
    if values["runlocal"] == "true":
        common.shrink(config, channels=16, epochs=8, kl_warmup_epochs=3, eval_images=200)
    return config
