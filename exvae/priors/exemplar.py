"""The exemplar prior: a Parzen window over the latent means of the training images, Eq. (8)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from exvae.arrays import Array, Record
from exvae.distributions import Normal, sample_normal
from exvae.priors.parzen import exemplar_log_prob
from exvae.priors.prior import Encoder, Exemplars
from exvae.retrieval import NOBODY

USES_EXEMPLARS = True


def init(key: Array, options: ConfigDict, input_shape: tuple[int, ...]) -> dict:
    """Draw log sigma^2 ~ N(0, 1)."""
    del options, input_shape
    return {"log_var": jax.random.normal(key, ())}


def training_log_prob(
    params: dict, encode: Encoder, z: Float[Array, "S D"], exemplars: Exemplars | None, mesh: Mesh
) -> Float[Array, " S"]:
    """Eq. (10), (11) and (12): the Parzen window over the exemplars that each code may see."""
    del encode
    assert exemplars is not None, "the exemplar prior needs exemplars"
    return exemplar_log_prob(
        z,
        exemplars.means,
        params["log_var"],
        count=exemplars.count,
        exemplar_index=exemplars.index,
        leave_out=exemplars.leave_out,
        neighbours=exemplars.neighbours,
        mesh=mesh,
    )


class Components(Record):
    """The mixture of Eq. (8), or some of its components."""

    means: Float[Array, "N D"]
    log_var: Float[Array, ""]  # log sigma^2
    count: int | Int[Array, ""]  # number of all components, even if `means` has only some of them

    def at(self, index: Int[Array, " C"] | None) -> Components:
        """Select the components of these exemplars. None selects all."""
        return self if index is None else self.replace(means=self.means[index])

    def centred(self, origin: Float[Array, " D"]) -> Components:
        """Shift the mixture so that `origin` is zero. Squares are then small for codes near it."""
        return self.replace(means=self.means - origin)


def components(
    params: dict, encode: Encoder, means: Float[Array, "N D"] | None, count: int | Int[Array, ""] | None = None
) -> Components:
    """Return the whole mixture. Rows of `means` after the first `count` are padding."""
    del encode
    assert means is not None, "the exemplar prior needs the latent means of its exemplars"
    return Components(means, params["log_var"], len(means) if count is None else count)


def log_prob(components: Components, z: Float[Array, "S D"], mesh: Mesh | None = None) -> Float[Array, " S"]:
    """Eq. (8) over all means, without regularizers. With a mesh, each device processes a part of them."""
    row = jnp.arange(len(components.means))
    index = jnp.where(row < components.count, row, NOBODY)
    count, log_var = components.count, components.log_var
    return exemplar_log_prob(z, components.means, log_var, count=count, exemplar_index=index, mesh=mesh)


def transition(params: dict, q: Normal) -> Normal:
    """r(z|x) = N(z | mu(x), sigma^2 I), Eq. (7)."""
    return q._replace(log_var=jnp.broadcast_to(params["log_var"], q.mean.shape))


def sample(
    key: Array, components: Components, shape: tuple[int, int], temperature: float | Float[Array, ""]
) -> Float[Array, "n D"]:
    """Draw an exemplar x_n uniformly for each code, then the code from r(z|x_n).

    `exvae/uses/generate.py` does the same in two steps because it also reports the exemplars.
    """
    key_pick, key_z = jax.random.split(key)
    mean = components.means[jax.random.randint(key_pick, shape[:1], 0, components.count)]
    return sample_normal(key_z, Normal(mean, jnp.broadcast_to(components.log_var, mean.shape)), temperature)
