"""The interface of a prior. A prior works with codes and latent means, not with images: it is given an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.arrays import Array, Record
from exvae.distributions import Normal

Encoder = Callable[[Float[Array, "P ..."]], Normal]  # inputs of the encoder -> q(z|x) of the top latent


class Exemplars(Record):
    """The exemplars of a training step, and which of them each of the S codes may see."""

    means: Float[Array, "U D"]  # mu(x_j), encoded in this step
    index: Int[Array, " U"]  # number of each exemplar in the training set; NOBODY marks an empty slot
    count: Float[Array, " S"] | Int[Array, " S"] | int  # number of mixture components, for each code
    leave_out: Int[Array, " S"] | None  # exemplar that each code must not see: its own image; None: no such exemplar
    neighbours: Int[Array, "S K"] | None  # the only exemplars that each code may see; None: all of them


@runtime_checkable
class Prior(Protocol):
    """p(z) of the top latent. The priors of this package are modules with these names. An object works as well."""

    USES_EXEMPLARS: bool  # whether p(z) is built from latent means of the training images

    def init(self, key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
        """Initial parameters, stored as params["prior"].

        Args:
          options: config.prior.
          input_shape: shape of one input of the encoder.
        """
        ...

    def training_log_prob(
        self, params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
    ) -> Float[Array, " S"]:
        """log p(z) in the training objective. `exemplars` is None if the prior does not use them."""
        ...

    def components(
        self,
        params: dict,
        encode: Encoder,
        means: Float[Array, "N D"] | None,
        count: int | Int[Array, ""] | None = None,
    ) -> Any:
        """The components of p(z) after training. They are computed once and used for many codes.

        Args:
          means: latent means of all exemplars. None if the prior does not use them.
          count: the number of exemplars. Further rows of `means` are padding. None means no padding.
        """
        ...

    def log_prob(self, components: Any, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
        """log p(z) after training. With a mesh, each device may process a part of the components."""
        ...

    def transition(self, params: dict, q: Normal) -> Normal:
        """The distribution of codes around an image with posterior q: r(z|x) for an exemplar prior, otherwise q."""
        ...

    def sample(
        self, key: Array, components: Any, shape: tuple[int, int], temperature: float | Float[Array, ""]
    ) -> Float[Array, "n D"]:
        """Draw codes from p(z). `temperature` scales the standard deviation of each component."""
        ...
