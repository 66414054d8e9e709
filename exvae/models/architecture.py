"""The interface of an architecture, and the base class of the architectures in this package."""

from __future__ import annotations

from typing import Protocol

import jax
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.distributions import Normal
from exvae.models.likelihoods import LIKELIHOODS
from exvae.models.terms import Observed, Terms

Images = Float[Array, "B H W C"]
Latents = tuple[Float[Array, "B _"], ...]  # the top latent is the first


class Architecture(Protocol):
    """A Flax module with these methods. Call them through `exvae.models.apply`, which binds the parameters.

    The top latent z has the prior of `config.prior`. There may be other latents below z.
    """

    image_shape: tuple[int, int, int]
    latent_dim: int  # of the top latent

    @property
    def block_rows(self) -> int:
        """Number of codes that evaluation scores at a time."""
        ...

    def encode(self, x: Images) -> Normal:
        """Return q(z|x), the posterior of the top latent. Its mean is mu(x) of the exemplar prior, Eq. (7)."""
        ...

    def observe(self, x: Images) -> Observed:
        """Run the encoders on a batch. Latents can then be drawn from the result any number of times."""
        ...

    def draw(self, key: Array, seen: Observed, *, stl: bool = False, paired: bool = False) -> Terms:
        """Draw one sample of each latent for each row, and compute the terms of the ELBO at these samples.

        Args:
          stl: no gradient through the parameters of q in log q (optim.estimator = stl).
          paired: rows 2i and 2i + 1 get opposite noise.
        """
        ...

    def terms(self, key: Array, x: Images, *, stl: bool = False, samples: int = 1) -> Terms:
        """Call `observe`, then `draw` with `samples` rows for each image. The rows of an image are adjacent."""
        ...

    def complete(self, key: Array, z: Float[Array, "B D"]) -> Latents:
        """Return all latents, given the top one. Those below it are drawn from their priors."""
        ...

    def latents(self, x: Images) -> Latents:
        """Return the posterior means of all latents."""
        ...

    def render(self, latents: Latents, u: Float[Array, "#B #H #W #C"], draw: bool = False) -> Images:
        """Return images from all latents: means of p(x|z), or draws from it with the uniform random numbers u."""
        ...

    def decode(self, key: Array, z: Float[Array, "B D"], draw: bool = False) -> Images:
        """Call `complete`, then `render`."""
        ...


class BaseArchitecture(nn.Module):
    """The fields of all architectures, and the methods that call others.

    A subclass adds `setup_networks`, `encode`, `observe`, `draw`, `complete`, `latents` and `logits`. The likelihood
    turns logits into p(x | all latents). An autoregressive architecture replaces `log_px` and `render`.
    """

    image_shape: tuple[int, int, int]
    latent_dim: int  # of the top latent
    lower_latent_dim: int  # of the latent below it
    hidden_dim: int  # of dense layers
    channels: int  # of convolutions
    likelihood: str

    @property
    def block_rows(self) -> int:
        """Number of codes that evaluation scores at a time: their activations stay in the cache of a CPU core."""
        return 500

    def setup(self):
        """Create the likelihood and the networks."""
        self.family = LIKELIHOODS[self.likelihood](self.image_shape[-1])
        self.setup_networks()

    def log_px(self, x: Images, *latents: Float[Array, "B _"]) -> Float[Array, " B"]:
        """log p(x | all latents)."""
        return self.family.log_prob(x, self.logits(*latents))

    def terms(self, key: Array, x: Images, *, stl: bool = False, samples: int = 1) -> Terms:
        """Compute the terms of the ELBO for several samples of each image. An even number is drawn in pairs."""
        return self.draw(key, self.observe(x).repeat(samples), stl=stl, paired=samples % 2 == 0)

    def decode(self, key: Array, z: Float[Array, "B D"], draw: bool = False) -> Images:
        """Complete the latents and render images from them."""
        key_latents, key_pixels = jax.random.split(key)
        u = jax.random.uniform(key_pixels, (len(z), *self.image_shape))
        return self.render(self.complete(key_latents, z), u, draw)

    def render(self, latents: Latents, u: Float[Array, "#B #H #W #C"], draw: bool = False) -> Images:
        """Return means of p(x|z), or draws from it with the uniform random numbers u."""
        logits = self.logits(*latents)
        return self.family.quantile(u, logits) if draw else self.family.mean(logits)
