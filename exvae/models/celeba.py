"""The architecture for CelebA: a VAE with 5x5 convolutions (supplement, architecture e)."""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.models.conv import Conv
from exvae.models.layers import Dense, NormalHead
from exvae.models.vae import VAE

WIDTHS = (1, 2, 4, 8)  # features of the layers in units of `channels`, from the largest images to the smallest
KERNEL = 5


class NormedConv(nn.Module):
    """Convolution, batch norm, ELU. Batch norm uses the batch's statistics if `batch_stats` is mutable (training)."""

    features: int
    stride: int = 1
    double: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        # No bias: batch norm subtracts it. Its gradient would be noise, which the optimizer would scale to norm one.
        y = Conv(self.features, KERNEL, self.stride, self.double, use_bias=False)(x)
        training = self.is_mutable_collection("batch_stats")
        return nn.elu(nn.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=1e-5)(y))


class CelebA(VAE):
    """A VAE with convolutional networks: four layers that halve the image (64x64 to 4x4), four that double it."""

    @property
    def block_rows(self) -> int:
        """Fewer codes at a time than in a dense architecture, because feature maps are large."""
        return 20 if jax.default_backend() == "cpu" else 200

    def setup_networks(self) -> None:
        """Create the encoder and the decoder."""
        widths = [self.channels * width for width in WIDTHS]
        rows, columns = (math.ceil(size / 2 ** len(WIDTHS)) for size in self.image_shape[:2])
        self.encoder = nn.Sequential(
            [*(NormedConv(width, stride=2) for width in widths), lambda h: h.reshape(h.shape[0], -1)]
        )
        self.q_z = NormalHead(self.latent_dim)
        self.decoder = nn.Sequential(
            [
                Dense(rows * columns * widths[-1]),
                lambda h: h.reshape(-1, rows, columns, widths[-1]),
                *(NormedConv(width, double=True) for width in reversed(widths)),
                Conv(self.image_shape[-1], KERNEL),
            ]
        )

    def read(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Return the images unchanged."""
        return x

    def logits(self, z: Float[Array, "B D"]) -> Float[Array, "B H W C"]:
        """Return the logits of p(x|z)."""
        height, width, _ = self.image_shape
        return self.decoder(z)[:, :height, :width]  # the output is larger if 16 does not divide the size
