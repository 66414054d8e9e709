"""What every prior offers. A prior knows codes and latent means, but no images: an encoder is handed to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from ml_collections import ConfigDict

from exvae.distributions import Normal

Encoder = Callable[[Float[Array, "P ..."]], Normal]  # inputs of the encoder -> q(z|x) of the top latent


class Exemplars(NamedTuple):
    """The exemplars of a training step, and which of them each of the S codes may see."""

    means: Float[Array, "U D"]  # mu(x_j), encoded in this step
    index: Int[Array, " U"]  # number of each exemplar in the training set; NOBODY: an empty slot
    count: Float[Array, " S"] | Int[Array, " S"] | int  # what the mixture is divided by, for each code
    leave_out: Int[Array, " S"] | None  # number of the image behind each code, which is not its own exemplar
    neighbours: Int[Array, "S K"] | None  # numbers of the only exemplars that each code sees; None: it sees all


class Prior(Protocol):
    """p(z) of the top latent. The priors of this package are modules with these names; an object will do as well."""

    USES_EXEMPLARS: bool  # whether p(z) is made of latent means of the training images

    def init(self, key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
        """Fresh parameters, stored as params["prior"].

        Args:
          options: config.prior.
          input_shape: of one input of the encoder.
        """
        ...

    def training_log_prob(
        self, params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
    ) -> Float[Array, " S"]:
        """log p(z) of the training objective. `exemplars` is None if the prior does not use them."""
        ...

    def components(
        self,
        params: dict,
        encode: Encoder,
        means: Float[Array, "N D"] | None,
        count: int | Int[Array, ""] | None = None,
    ) -> Any:
        """What p(z) is made of after training, computed once for many codes.

        Args:
          means: latent means of all exemplars; None if the prior does not use them.
          count: the number of exemplars; further rows of `means` are padding. None: there is no padding.
        """
        ...

    def log_prob(self, components: Any, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
        """log p(z) after training. With a mesh, each device may take a part of the components."""
        ...

    def transition(self, params: dict, q: Normal) -> Normal:
        """The distribution of codes around an image with posterior q: r(z|x) of an exemplar prior, else q itself."""
        ...

    def sample(self, key: Array, components: Any, shape: tuple[int, int], temperature: float) -> Float[Array, "n D"]:
        """Codes from p(z). `temperature` is a factor on the standard deviation of each component."""
        ...
