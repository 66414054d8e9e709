"""The classifier for data augmentation: its loss on real and new images, and its compiled training step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, PyTree, UInt8
from ml_collections import ConfigDict

from exvae import data
from exvae.data.batches import map_batches
from exvae.distributions import Normal, sample_normal, to_unit
from exvae.encoding import encode
from exvae.models.layers import Dense
from exvae.once import for_equal_configs
from exvae.runs.trained import TrainedModel
from exvae.scale import sharding
from exvae.uses import generate

MOMENTUM = 0.9  # of SGD
LAST_RATE = 0.01  # the last learning rate as a fraction of the first
BATCH = 1000  # images classified at a time


class Classifier(nn.Module):
    """A network with two hidden layers and ReLU. It ignores the positions of pixels (permutation invariant)."""

    hidden_dim: int
    num_classes: int

    @nn.compact
    def __call__(self, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
        h = x.reshape(len(x), -1)
        for _ in range(2):
            h = nn.relu(Dense(self.hidden_dim)(h))
        return Dense(self.num_classes)(h)


class Source(NamedTuple):
    """The training images on the devices. The model does not change, so their codes are computed only once."""

    images: UInt8[Array, "N H W C"]
    labels: Int[Array, " N"]
    codes: Normal  # r(z|x) of every image, or q(z|x) if the prior has no exemplars


@struct.dataclass
class State:
    """Everything that a training step of the classifier changes."""

    # Not typed as arrays, because checkpoints also handle states that hold shapes or None.
    step: PyTree  # () int32
    params: PyTree
    opt_state: optax.OptState


Step = Callable[[State, dict, Source, Array, Array], tuple[State, Array]]


def synthesize(key: Array, model: nn.Module, params: dict, codes: Normal) -> Float[Array, "B H W C"]:
    """Decode z ~ r(z|x) to means, rounded to the 256 levels of real images."""
    # Differs from the authors' code: no gradient flows into the model, which is fixed. The code computes that gradient.
    key_z, key_x = jax.random.split(key)
    mean = generate.decode(key_x, model, params, sample_normal(key_z, codes), draw=False)
    return jax.lax.stop_gradient(jnp.round(mean * 255.0) * (1.0 / 255.0))


def loss_fn(
    classifier: Classifier,
    params: dict,
    real: Float[Array | np.ndarray, "B H W C"],
    new: Float[Array | np.ndarray, "B H W C"] | None,
    labels: Int[Array | np.ndarray, " B"],
    *,
    lambda_: float,
    smoothing: float,
) -> Float[Array, ""]:
    """- lambda log p(y|x) - (1 - lambda) log p(y|x~), averaged over the batch, with smoothed labels.

    Real images x and new images x~ pass through the network as one batch.

    Args:
      real: the real images; not used if lambda is 0.
      new: a new image for each real one; not used if lambda is 1, when it may be None.
    """
    parts = [(weight, x) for weight, x in ((lambda_, real), (1.0 - lambda_, new)) if weight > 0]
    # An image and its new version are adjacent, so each device keeps its part of the batch.
    x = jnp.stack([x for _, x in parts if x is not None], axis=1)  # (B, parts, H, W, C)
    logits = _logits(classifier, params, x.reshape(-1, *x.shape[2:]))
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classifier.num_classes), smoothing)
    losses = optax.softmax_cross_entropy(logits.reshape(*x.shape[:2], -1), targets[:, None])  # (B, parts)
    return jnp.mean(losses @ jnp.array([weight for weight, _ in parts]))


@for_equal_configs("augment.learning_rate")
def make_optimizer(config: ConfigDict, num_steps: int) -> optax.GradientTransformation:
    """Build SGD with momentum and a learning rate that falls linearly."""
    rate = config.augment.learning_rate
    return optax.sgd(optax.linear_schedule(rate, LAST_RATE * rate, num_steps), momentum=MOMENTUM)


@for_equal_configs("augment.label_smoothing")
def make_step(
    config: ConfigDict,
    classifier: Classifier,
    model: nn.Module,
    optimizer: optax.GradientTransformation,
    *,
    lambda_: float,
) -> Step:
    """Compile the step (state, parameters of the model, source, key, indices of images) -> (state, loss).

    Each step draws its own new images.
    """

    @jax.default_matmul_precision("highest")
    def step(
        state: State, model_params: dict, source: Source, key: Array, index: Int[Array, " B"]
    ) -> tuple[State, Float[Array, ""]]:
        real, new = to_unit(source.images[index]), None
        if lambda_ < 1:
            codes = jax.tree.map(lambda leaf: leaf[index], source.codes)
            new = synthesize(jax.random.fold_in(key, state.step), model, model_params, codes)
        how = {"lambda_": lambda_, "smoothing": config.augment.label_smoothing}
        loss, grads = jax.value_and_grad(
            lambda params: loss_fn(classifier, params, real, new, source.labels[index], **how)
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def init_state(
    key: Array, classifier: Classifier, optimizer: optax.GradientTransformation, image_shape: tuple[int, ...]
) -> State:
    """Return the state before the first step."""
    params = classifier.init(key, jnp.zeros((1, *image_shape)))["params"]
    return State(jnp.int32(0), params, optimizer.init(params))


def make_source(run: TrainedModel, split: data.Split) -> Source:
    """Put the images, labels and codes of a split with labels on every device."""
    q = encode(run.mesh, run.model, run.params, split.images)
    codes = run.prior.transition(run.params["prior"], q)
    return Source(*sharding.replicate(run.mesh, (split.images, split.labels, codes)))


def predict(classifier: Classifier, params: dict, images: UInt8[np.ndarray, "n H W C"]) -> Int[np.ndarray, " n"]:
    """Return the most likely class of each image."""
    return map_batches(lambda _, batch: _predict(classifier, params, batch), images, BATCH)


@functools.partial(jax.jit, static_argnums=0)
@jax.default_matmul_precision("highest")
def _predict(classifier: Classifier, params: dict, images: UInt8[Array, "B H W C"]) -> Int[Array, " B"]:
    return jnp.argmax(_logits(classifier, params, to_unit(images)), axis=-1)


def _logits(classifier: Classifier, params: dict, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
    return cast(Array, classifier.apply({"params": params}, x))
