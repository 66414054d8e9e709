"""ConvHVAE: an HVAE with gated convolutions (supplement, architecture c)."""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.models.conv import Conv, GatedConv
from exvae.models.hvae import HVAE
from exvae.models.layers import GatedDense

# (features, kernel size, stride); 28x28 -> 28 -> 14 -> 14 -> 7 -> 7.
# Differs from the paper: it prints 28 -> 32 -> 12 -> 12 -> 7 -> 7. These are the sizes of the authors' code.
Z2_STACK = ((32, 7, 1), (32, 3, 2), (64, 5, 1), (64, 3, 2), (6, 3, 1))
Z1_STACK = ((32, 3, 1), (32, 3, 2), (64, 3, 1), (64, 3, 2), (6, 3, 1))
DECODER_LAYERS = 4


def flatten(h: Float[Array, "B H W C"]) -> Float[Array, "B H*W*C"]:
    """Flatten each image to one row."""
    return h.reshape(h.shape[0], -1)


def encoder(stack: tuple[tuple[int, int, int], ...]) -> nn.Sequential:
    """Build gated convolutions from (features, kernel size, stride), followed by `flatten`."""
    return nn.Sequential([*(GatedConv(features, size, stride) for features, size, stride in stack), flatten])


class ConvHVAE(HVAE):
    """An HVAE with convolutional networks. Latents and densities are the same."""

    @property
    def block_rows(self) -> int:
        """Fewer codes at a time than in a dense architecture, because feature maps are large."""
        return 20 if jax.default_backend() == "cpu" else 200

    def setup_encoder(self) -> None:
        """Create the networks that read the image, and the one that reads z2."""
        height, width, _ = self.image_shape
        self.z2_from_x = encoder(Z2_STACK)
        self.z1_from_x = encoder(Z1_STACK)
        # As wide as the flattened feature maps of `z1_from_x` (7 x 7 x 6 for 28 x 28 images).
        self.z1_from_z2 = GatedDense(math.ceil(height / 4) * math.ceil(width / 4) * Z1_STACK[-1][0])

    def setup_decoder(self) -> None:
        """Create the networks of p(x|z1,z2)."""
        self.p_x_z1 = GatedDense(self.hidden_dim)
        self.p_x_z2 = GatedDense(self.hidden_dim)
        self.p_x = nn.Sequential(
            [
                GatedDense(math.prod(self.image_shape)),
                lambda h: h.reshape(-1, *self.image_shape),
                *(GatedConv(self.channels, 3, 1) for _ in range(DECODER_LAYERS)),
                Conv(self.image_shape[-1], 1),
            ]
        )

    def read(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Return the images unchanged."""
        return x
