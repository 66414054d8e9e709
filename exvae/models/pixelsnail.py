"""PixelSNAIL HVAE: the encoders of ConvHVAE and an autoregressive decoder (supplement, architecture d).

Differs from the authors' code: keys, queries and the output of the attention are 1x1 convolutions. The code uses gated
residual blocks. This model has 1,436,382 parameters, the authors' model has 1,638,509.
Differs from the paper: Section 5 shares a PixelSNAIL between encoder and decoder. The supplement does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jaxtyping import Float, Int

from exvae.arrays import Array
from exvae.models import causal
from exvae.models.architecture import Latents
from exvae.models.causal import GatedResidual, Maps, Pixel, WeightNormConv, Windows, all_windows
from exvae.models.conv import Conv
from exvae.models.convhvae import ConvHVAE
from exvae.models.layers import GatedDense

BLOCKS, DROPOUT = 4, 0.1
HEADS, HEAD_DIM = 8, 4


class Context(NamedTuple):
    """The inputs of a pixel besides the pixels before it."""

    start: Float[Array, "B H W F"]  # added to the first layer, a function of z
    side: Float[Array, "B H W 4"]  # the two maps of z, and the coordinates of the pixel


class Drawn(NamedTuple):
    """The pixels drawn so far and their activations. Images and maps have a border (`all_windows`)."""

    image: Float[Array, "B h w C"]
    mean: Float[Array, "B h w C"]  # mean of p(x_j | x_1 ... x_{j-1}, z)
    maps: list[Float[Array, "B h w F"]]  # inputs of the masked convolutions
    key: Float[Array, "B h d L"]
    value: Float[Array, "B h d L"]


class Decoder(nn.Module):
    """Logits of p(x_j | x_1 ... x_{j-1}, z): masked convolutions, attention, ELUs and 1x1 convolutions."""

    channels: int
    image_shape: tuple[int, int, int]

    def setup(self) -> None:
        """Create the layers."""
        self.from_x = WeightNormConv(self.channels, causal.ABOVE_AND_LEFT)
        self.from_z = Conv(self.channels, 3)
        self.blocks = [GatedResidual(self.channels, DROPOUT) for _ in range(BLOCKS)]
        self.query = WeightNormConv(HEADS * HEAD_DIM)
        self.key_value = WeightNormConv(2 * HEADS * HEAD_DIM)
        self.attended = WeightNormConv(self.channels)
        self.hidden = WeightNormConv(self.channels)
        self.output = WeightNormConv(self.image_shape[-1])

    def __call__(self, x: Maps, context: Context) -> Maps:
        """Compute the logits of all pixels of known images."""
        h = self.features(all_windows(x), context, all_windows)
        found = causal.causal_attention(self.queries(h, context), *self.keys_values(x, h, context))
        return self.head(h, found)

    def context(self, z_maps: Float[Array, "B H W 2"]) -> Context:
        """Compute the context of all pixels from the two maps of z."""
        # Differs from the authors' code: the maps of z are not masked. There, a pixel sees only a part of z.
        axes = (np.linspace(-0.5, 0.5, n, dtype=np.float32) for n in self.image_shape[:2])
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
        coordinates = jnp.broadcast_to(grid, (len(z_maps), *grid.shape))
        return Context(self.from_z(z_maps), jnp.concatenate([z_maps, coordinates], axis=-1))

    def features(self, x_windows: Windows, context: Context, windows: Callable[[Maps], Windows]) -> Maps:
        """Compute the features of each pixel from the pixels before it and the context."""
        h = self.from_x(x_windows) + context.start
        for block in self.blocks:
            h = block(h, windows)
        return h

    def queries(self, h: Maps, context: Context) -> Float[Array, "B h L d"]:
        """Compute the queries of the attention."""
        return _heads(self.query(nn.elu(jnp.concatenate([h, context.side], axis=-1))))

    def keys_values(
        self, x: Float[Array, "B H W _"], h: Maps, context: Context
    ) -> tuple[Float[Array, "B h d L"], Float[Array, "B h d L"]]:
        """Compute keys and values. They may depend on x_j, because only later pixels attend to them."""
        joint = jnp.concatenate([x, h, context.side], axis=-1)
        key, value = jnp.split(self.key_value(nn.elu(joint)), 2, axis=-1)
        return _heads(key).swapaxes(2, 3), _heads(value).swapaxes(2, 3)

    def head(self, h: Maps, found: Float[Array, "B h L d"]) -> Float[Array, "B H W _"]:
        """Compute the logits from the features and the output of the attention."""
        h = h + self.attended(found.swapaxes(1, 2).reshape(*h.shape[:3], HEADS * HEAD_DIM))
        return self.output(nn.elu(self.hidden(nn.elu(h))))


def _heads(a: Float[Array, "B H W hd"]) -> Float[Array, "B h L d"]:
    return a.reshape(len(a), -1, HEADS, HEAD_DIM).swapaxes(1, 2)


class PixelSNAIL(ConvHVAE):
    """An HVAE whose p(x|z1,z2) is a product over pixels, each conditioned on the pixels before it."""

    def setup_decoder(self) -> None:
        """Create the maps of z1 and z2, and the autoregressive decoder."""
        pixels = self.image_shape[0] * self.image_shape[1]
        self.p_x_z1 = GatedDense(pixels)
        self.p_x_z2 = GatedDense(pixels)
        self.p_x = Decoder(self.channels, self.image_shape)

    def context(self, z2: Float[Array, "B D"], z1: Float[Array, "B D1"]) -> Context:
        """Compute the context of all pixels from the latents."""
        maps = jnp.stack([self.p_x_z1(z1), self.p_x_z2(z2)], axis=-1)
        return self.p_x.context(maps.reshape(-1, *self.image_shape[:2], 2))

    def logits(self, x: Float[Array, "B H W C"], *latents: Float[Array, "B _"]) -> Float[Array, "B H W C"]:
        """Compute the logits of all pixels of known images."""
        return self.p_x(x, self.context(*latents))

    def log_px(self, x: Float[Array, "B H W C"], *latents: Float[Array, "B _"]) -> Float[Array, " B"]:
        """log p(x | all latents)."""
        return self.family.log_prob(x, self.logits(x, *latents))

    def render(self, latents: Latents, u: Float[Array, "#B H W C"], draw: bool = False) -> Float[Array, "B H W C"]:
        """Draw images pixel by pixel. Without `draw`, return each pixel's mean given the drawn pixels before it."""
        num_pixels = self.image_shape[0] * self.image_shape[1]
        context = self.context(*latents)
        u = jnp.broadcast_to(u, (len(latents[0]), *self.image_shape))
        heads = jnp.zeros((len(u), HEADS, HEAD_DIM, num_pixels))
        empty = all_windows(jnp.zeros_like(u))
        start = Drawn(empty, empty, 2 * BLOCKS * [all_windows(jnp.zeros_like(context.start))], heads, heads)
        # A JAX loop needs a pure function. It cannot call the methods of a bound Flax module.
        model, variables = self.unbind()

        def draw_next(drawn: Drawn, number: Int[Array, ""]) -> tuple[Drawn, None]:
            return cast(Drawn, model.apply(variables, drawn, context, u, number, method="draw_pixel")), None

        drawn, _ = lax.scan(draw_next, start, jnp.arange(num_pixels))
        return causal.without_border(drawn.image if draw else drawn.mean)

    def draw_pixel(self, drawn: Drawn, context: Context, u: Maps, number: Int[Array, ""]) -> Drawn:
        """Draw pixel `number`. The activations of the pixels before it are not computed again."""
        pixel = Pixel(drawn.maps, *jnp.divmod(number, self.image_shape[1]))
        context = jax.tree.map(pixel.here, context)
        h = self.p_x.features(pixel.window(drawn.image), context, pixel.next_window)
        query = self.p_x.queries(h, context)
        found = jax.vmap(causal.attend, (0, 0, 0, None))(query, drawn.key, drawn.value, number)
        logits = self.p_x.head(h, found)
        x = self.family.quantile(pixel.here(u), logits)
        key, value = self.p_x.keys_values(x, h, context)
        return Drawn(
            pixel.write(drawn.image, x),
            pixel.write(drawn.mean, self.family.mean(logits)),
            pixel.maps,
            lax.dynamic_update_slice_in_dim(drawn.key, key, number, axis=3),
            lax.dynamic_update_slice_in_dim(drawn.value, value, number, axis=3),
        )
