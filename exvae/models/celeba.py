"""The architecture for CelebA: VAE that reads and draws images with 5x5 convolutions (supplement, architecture e)."""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jaxtyping import Array, Float

from exvae.models.conv import Conv
from exvae.models.layers import Dense, NormalHead
from exvae.models.vae import VAE

WIDTHS = (1, 2, 4, 8)  # features of the layers in units of `channels`, the largest images first
KERNEL = 5


class NormedConv(nn.Module):
    """Convolution, batch norm, ELU. In training the statistics are the batch's, where they can be updated."""

    features: int
    stride: int = 1
    double: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B h w F"]:
        # No bias: batch norm subtracts it, and the optimizer would blow its gradient, which is noise, up to length one.
        y = Conv(self.features, KERNEL, self.stride, self.double, use_bias=False)(x)
        training = self.is_mutable_collection("batch_stats")
        return nn.elu(nn.BatchNorm(use_running_average=not training, momentum=0.9, epsilon=1e-5)(y))


class CelebA(VAE):
    """Same latent and densities as VAE. Images are halved four times and doubled four times: 64x64 to 4x4 and back."""

    @property
    def block_rows(self) -> int:
        """Feature maps are large: fewer codes at a time than in a dense architecture."""
        return 20 if jax.default_backend() == "cpu" else 200

    def setup_networks(self):
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
        return x

    def logits(self, z: Float[Array, "B D"]) -> Float[Array, "B H W C"]:
        height, width, _ = self.image_shape
        return self.decoder(z)[:, :height, :width]  # larger where 16 does not divide the size
