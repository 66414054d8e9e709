"""Priors of the top latent. Each is a module with the same seven names; a new one is a file and a line here.

USES_EXEMPLARS     whether log p(z) is over latent means of the training images
init               learned parameters, stored as params["prior"]
training_log_prob  log p(z) as the training objective has it, and the latent means it computed on the way
components         what log p(z) after training is made of; `means` are those of all exemplars, None without any
log_prob           log p(z) from those components
transition         q(z|x) -> the distribution of codes that start from x: r(z|x), or q(z|x) itself
sample             codes from p(z); None where each of them starts from an exemplar
"""

from exvae.priors import exemplar, gaussian, vamp

PRIORS = {"exemplar": exemplar, "gaussian": gaussian, "vamp": vamp}
