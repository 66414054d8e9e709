"""What all architectures share."""

from __future__ import annotations

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from exvae.models.likelihoods import LIKELIHOODS
from exvae.models.terms import Terms

Latents = tuple[Float[Array, "B D"], ...]  # the top one first


class Architecture(nn.Module):
    """Every architecture is built with the same fields, whether it uses them or not.

    It adds `setup_networks`, `encode`, `observe`, `draw`, `complete`, `latents`, and `logits`: what the likelihood's
    family makes p(x | all latents) of. An autoregressive one has `log_px` and `render` of its own.
    """

    block_rows = 500  # codes that evaluation scores at a time: their activations stay in a CPU core's cache

    image_shape: tuple[int, int, int]
    latent_dim: int  # of the top latent
    lower_latent_dim: int  # of the one below it
    hidden_dim: int  # of dense layers
    channels: int  # of convolutions
    likelihood: str

    def setup(self):
        self.family = LIKELIHOODS[self.likelihood](self.image_shape[-1])
        self.setup_networks()

    def log_px(self, x: Float[Array, "B H W C"], *latents: Float[Array, "B D"]) -> Float[Array, " B"]:
        """log p(x | all latents)."""
        return self.family.log_prob(x, self.logits(*latents))

    def terms(self, key: Array, x: Float[Array, "B H W C"], *, stl: bool = False, samples: int = 1) -> Terms:
        """Terms of so many samples of every latent for each image, one after another; an even number in pairs."""
        return self.draw(key, self.observe(x).repeat(samples), stl=stl, paired=samples % 2 == 0)

    def decode(self, key: Array, z: Float[Array, "B D"], draw: bool = False) -> Float[Array, "B H W C"]:
        key_latents, key_pixels = jax.random.split(key)
        u = jax.random.uniform(key_pixels, (len(z), *self.image_shape))
        return self.render(self.complete(key_latents, z), u, draw)

    def render(self, latents: Latents, u: Float[Array, "#B H W C"], draw: bool = False) -> Float[Array, "B H W C"]:
        """Means, or images drawn with the uniform random numbers u."""
        logits = self.logits(*latents)
        return self.family.quantile(u, logits) if draw else self.family.mean(logits)
