"""Priors of the top latent. Each is a module with the same six names; a new one is a file and a line here.

USES_EXEMPLARS     whether log p(z) is over latent means of the training images
init               learned parameters, stored as params["prior"]
training_log_prob  log p(z) as the training objective has it, and the latent means it computed on the way
components         what log p(z) after training is made of; `means` are those of all exemplars, None without any
log_prob           log p(z) from those components
sample             codes in rows, and the image behind each row where there is one
"""

from exvae.priors import exemplar, gaussian, vamp

PRIORS = {"exemplar": exemplar, "gaussian": gaussian, "vamp": vamp}
