"""ConvHVAE: an HVAE with gated convolutions (supplement, architecture c)."""

from __future__ import annotations

import math

import jax
from flax import linen as nn
from jaxtyping import Float

from exvae.arrays import Array
from exvae.models.conv import Conv, GatedConv, chain
from exvae.models.hvae import HVAE
from exvae.models.layers import GatedDense

# (features, kernel size, stride); 28x28 -> 28 -> 14 -> 14 -> 7 -> 7.
# Differs from the paper: it prints 28 -> 32 -> 12 -> 12 -> 7 -> 7. These are the sizes of the authors' code.
Z2_STACK = ((32, 7, 1), (32, 3, 2), (64, 5, 1), (64, 3, 2), (6, 3, 1))
Z1_STACK = ((32, 3, 1), (32, 3, 2), (64, 3, 1), (64, 3, 2), (6, 3, 1))
DECODER_LAYERS = 4


class Encoder(nn.Module):
    """Gated convolutions. The result of each image is flattened to one row."""

    stack: tuple[tuple[int, int, int], ...]  # (features, kernel size, stride)

    @nn.compact
    def __call__(self, x: Float[Array, "B H W C"]) -> Float[Array, "B hwF"]:
        h = chain([GatedConv(*layer, name=f"layers_{i}") for i, layer in enumerate(self.stack)], x)
        return h.reshape(len(h), -1)


class Decoder(nn.Module):
    """A dense layer, gated convolutions, and a 1x1 convolution to the logits of an image."""

    image_shape: tuple[int, int, int]
    channels: int

    @nn.compact
    def __call__(self, h: Float[Array, "B I"]) -> Float[Array, "B H W C"]:
        # The names are those of checkpoints. The reshape was once layer 1.
        x = GatedDense(math.prod(self.image_shape), name="layers_0")(h).reshape(-1, *self.image_shape)
        layers = [GatedConv(self.channels, 3, name=f"layers_{2 + i}") for i in range(DECODER_LAYERS)]
        return chain([*layers, Conv(self.image_shape[-1], name=f"layers_{2 + DECODER_LAYERS}")], x)


class ConvHVAE(HVAE):
    """An HVAE with convolutional networks. Latents and densities are the same."""

    @property
    def block_rows(self) -> int:
        """Fewer codes at a time than in a dense architecture, because feature maps are large."""
        return 20 if jax.default_backend() == "cpu" else 200

    def setup_encoder(self) -> None:
        """Create the networks that read the image, and the one that reads z2."""
        height, width, _ = self.image_shape
        self.z2_from_x = Encoder(Z2_STACK)
        self.z1_from_x = Encoder(Z1_STACK)
        # As wide as the flattened feature maps of `z1_from_x` (7 x 7 x 6 for 28 x 28 images).
        self.z1_from_z2 = GatedDense(math.ceil(height / 4) * math.ceil(width / 4) * Z1_STACK[-1][0])

    def setup_decoder(self) -> None:
        """Create the networks of p(x|z1,z2)."""
        self.p_x_z1 = GatedDense(self.hidden_dim)
        self.p_x_z2 = GatedDense(self.hidden_dim)
        self.p_x = Decoder(self.image_shape, self.channels)

    def read(self, x: Float[Array, "B H W C"]) -> Float[Array, "B H W C"]:
        """Return the images unchanged."""
        return x
