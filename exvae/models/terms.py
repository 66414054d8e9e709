"""The records that an architecture returns, and a check of their shapes."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jaxtyping import Float

from exvae.arrays import Array
from exvae.distributions import Normal


class Terms(NamedTuple):
    """The terms of the ELBO without the prior of the top latent, one row for each sample of z.

    elbo = log_px + log_ratio - log_q + log p(z). `exvae.priors` computes the last term.
    """

    z: Float[Array, "B D"]  # sample of the top latent
    q: Normal  # q(z|x), the posterior of the top latent
    log_px: Float[Array, " B"]  # log p(x | all latents)
    log_ratio: Float[Array, " B"] | float  # log p(z1|z) - log q(z1|x,z) of the lower latent; 0 if there is none
    log_q: Float[Array, " B"]  # log q(z|x)


class Observed(NamedTuple):
    """The encoder's output for a batch. It is computed once; latents can then be drawn any number of times."""

    x: Float[Array, "B H W C"]
    q: Normal  # q(z|x), the posterior of the top latent
    features: Float[Array, "I F"] | None  # one row per image, input of the lower latent's posterior; None if unused

    def repeat(self, times: int) -> Observed:
        """Repeat each row `times` times, to draw that many codes for each image. `features` are not repeated."""
        if times == 1:
            return self
        x, q = jax.tree.map(lambda leaf: jnp.repeat(leaf, times, axis=0), (self.x, self.q))
        return Observed(x, q, self.features)


def check(terms: Terms, *, num_rows: int, latent_dim: int) -> None:
    """Check the shapes and dtypes of what `draw` or `terms` returned. This costs nothing in a compiled function.

    Raises:
      AssertionError: names the field, its shape and the expected one.
    """
    per_code = {"log_px": terms.log_px, "log_ratio": terms.log_ratio, "log_q": terms.log_q}
    for name, value in per_code.items():
        if name != "log_ratio" or not isinstance(value, float):
            _check("Terms", name, value, (num_rows,))
    _check("Terms", "z", terms.z, (num_rows, latent_dim))
    _check_normal("Terms", terms.q, (num_rows, latent_dim))


def check_observed(seen: Observed, *, image_shape: tuple[int, ...], num_images: int, latent_dim: int) -> None:
    """Check the shapes and dtypes of what `observe` returned, as `check` does for `draw`."""
    _check("Observed", "x", seen.x, (num_images, *image_shape))
    _check_normal("Observed", seen.q, (num_images, latent_dim))
    if seen.features is not None:
        _check("Observed", "features", seen.features, (num_images, *seen.features.shape[1:]))


def _check_normal(record: str, q: Normal, shape: tuple[int, ...]) -> None:
    _check(record, "q.mean", q.mean, shape)
    _check(record, "q.log_var", q.log_var, shape)


def _check(record: str, name: str, value: Array | float, shape: tuple[int, ...]) -> None:
    what = f"the architecture gave {record}.{name}"
    message = f"{what} of shape {jnp.shape(value)}, it must be {shape}"
    chex.assert_shape(value, shape, custom_message=message)
    message = f"{what} of dtype {jnp.result_type(value)}, it must be a float"
    chex.assert_type(value, jnp.floating, custom_message=message)
