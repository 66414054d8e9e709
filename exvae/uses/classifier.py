"""The classifier of the paper's data augmentation: its loss on real and new images, and its compiled step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from jaxtyping import Array, Float, Int, UInt8

from exvae import data
from exvae.data.batches import map_batches
from exvae.distributions import Normal, sample_normal, to_unit
from exvae.encoding import encode
from exvae.models.layers import Dense
from exvae.runs.trained import TrainedModel
from exvae.scale import sharding
from exvae.uses import generate

MOMENTUM, LAST_RATE = 0.9, 0.01  # of SGD; the last rate as a fraction of the first
BATCH = 1000  # images classified at a time


class Classifier(nn.Module):
    """H-H-classes with ReLU; permutation invariant: it sees pixels, not their places."""

    hidden_dim: int
    num_classes: int

    @nn.compact
    def __call__(self, x: Float[Array, "B ..."]) -> Float[Array, "B classes"]:
        h = x.reshape(len(x), -1)
        for _ in range(2):
            h = nn.relu(Dense(self.hidden_dim)(h))
        return Dense(self.num_classes)(h)


class Source(NamedTuple):
    """What a step draws from, on the devices. The model does not change: its codes are computed once."""

    images: UInt8[Array, "N H W C"]
    labels: Int[Array, " N"]
    codes: Normal  # r(z|x) of every image, or q(z|x) where the prior is not over exemplars


@struct.dataclass
class State:
    """Everything that training a classifier changes."""

    step: Int[Array, ""]
    params: dict
    opt_state: optax.OptState


def synthesize(key: Array, model: nn.Module, params: dict, codes: Normal) -> Float[Array, "B H W C"]:
    """Decoder means at z ~ r(z|x), rounded to the 256 levels of real images. Nothing flows back into the model."""
    key_z, key_x = jax.random.split(key)
    mean = generate.decode(key_x, model, params, sample_normal(key_z, codes), draw=False)
    return jax.lax.stop_gradient(jnp.round(mean * 255.0) * (1.0 / 255.0))


def loss_fn(
    classifier: Classifier,
    params: dict,
    real: Array,
    new: Array | None,
    labels: Array,
    lambda_: float,
    smoothing: float,
) -> Float[Array, ""]:
    """- lambda log p(y|x) - (1 - lambda) log p(y|x~), averaged over the batch; labels smoothed.

    Real and new images pass the network as one batch. With lambda = 1 there are no new ones, with 0 no real ones.
    """
    parts = [(weight, x) for weight, x in ((lambda_, real), (1.0 - lambda_, new)) if weight > 0]
    # An image and its new version stand side by side: a device keeps its part of the batch.
    x = jnp.stack([x for _, x in parts], axis=1)  # (B, parts, H, W, C)
    logits = classifier.apply({"params": params}, x.reshape(-1, *x.shape[2:]))
    targets = optax.smooth_labels(jax.nn.one_hot(labels, classifier.num_classes), smoothing)
    losses = optax.softmax_cross_entropy(logits.reshape(*x.shape[:2], -1), targets[:, None])  # (B, parts)
    return jnp.mean(losses @ jnp.array([weight for weight, _ in parts]))


def make_optimizer(options: Any, num_steps: int) -> optax.GradientTransformation:
    rate = options.learning_rate
    return optax.sgd(optax.linear_schedule(rate, LAST_RATE * rate, num_steps), momentum=MOMENTUM)


def make_step(classifier: Classifier, model: nn.Module, optimizer, *, lambda_: float, smoothing: float) -> Callable:
    """The compiled step: (state, model's params, source, key, index) -> (state, loss), new images drawn afresh."""

    @jax.default_matmul_precision("highest")
    def step(state: State, model_params: dict, source: Source, key: Array, index: Int[Array, " B"]):
        real, new = to_unit(source.images[index]), None
        if lambda_ < 1:
            codes = jax.tree.map(lambda leaf: leaf[index], source.codes)
            new = synthesize(jax.random.fold_in(key, state.step), model, model_params, codes)
        loss, grads = jax.value_and_grad(
            lambda params: loss_fn(classifier, params, real, new, source.labels[index], lambda_, smoothing)
        )(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return State(state.step + 1, optax.apply_updates(state.params, updates), opt_state), loss

    return jax.jit(step, donate_argnums=0)


def init_state(key: Array, classifier: Classifier, optimizer, image_shape: tuple[int, ...]) -> State:
    params = classifier.init(key, jnp.zeros((1, *image_shape)))["params"]
    return State(jnp.int32(0), params, optimizer.init(params))


def make_source(run: TrainedModel, split: data.Split) -> Source:
    """Images, labels and codes on every device."""
    q = encode(run.mesh, run.model, run.params, split.images)
    codes = run.prior.transition(run.params["prior"], q)
    return sharding.replicate(run.mesh, Source(split.images, split.labels, codes))


def predict(classifier: Classifier, params: dict, images: UInt8[np.ndarray, "n H W C"]) -> Int[np.ndarray, " n"]:
    """The most likely class of each image."""
    return map_batches(lambda _, batch: _predict(classifier, params, batch), images, BATCH)


@functools.partial(jax.jit, static_argnums=0)
@jax.default_matmul_precision("highest")
def _predict(classifier: Classifier, params: dict, images: UInt8[Array, "B H W C"]) -> Int[Array, " B"]:
    return jnp.argmax(classifier.apply({"params": params}, to_unit(images)), axis=-1)
