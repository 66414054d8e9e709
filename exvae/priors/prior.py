"""The interface of a prior. A prior works with codes and latent means. It gets an encoder for inputs of its own."""

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
    index: Int[Array, " U"]  # index of each exemplar in the training set; NOBODY marks an empty slot
    count: Float[Array, " S"] | Int[Array, " S"] | int  # number of mixture components, for each code
    leave_out: Int[Array, " S"] | None  # index of each code's own image; None without leave-one-out
    neighbours: Int[Array, "S K"] | None  # indices of the only exemplars that each code may see; None: all


@runtime_checkable
class Prior(Protocol):
    """p(z) of the top latent. The priors of this package are modules with these names. Any object works as well."""

    USES_EXEMPLARS: bool  # whether p(z) is built from latent means of the training images

    def init(self, key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
        """Return the initial parameters, which are stored as params["prior"].

        Args:
          options: config.prior.
          input_shape: shape of one input of the encoder.
        """
        ...

    def training_log_prob(
        self, params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
    ) -> Float[Array, " S"]:
        """Compute log p(z) in the training objective. `exemplars` is None if the prior does not use them."""
        ...

    def components(
        self,
        params: dict,
        encode: Encoder,
        means: Float[Array, "N D"] | None,
        count: int | Int[Array, ""] | None = None,
    ) -> Any:
        """Compute the components of p(z) after training. Call this once and use the result for many codes.

        Args:
          means: latent means of all exemplars. None if the prior does not use them.
          count: the number of exemplars. Further rows of `means` are padding. None means no padding.
        """
        ...

    def log_prob(self, components: Any, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
        """Compute log p(z) after training. With a mesh, each device may process a part of the components."""
        ...

    def transition(self, params: dict, q: Normal) -> Normal:
        """Return the distribution of codes around an image: r(z|x) for an exemplar prior, otherwise q = q(z|x)."""
        ...

    def sample(
        self, key: Array, components: Any, shape: tuple[int, int], temperature: float | Float[Array, ""]
    ) -> Float[Array, "n D"]:
        """Draw codes from p(z). `temperature` scales the standard deviation of each component."""
        ...
