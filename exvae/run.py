"""A trained model, loaded from its folder, with methods for all its uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Shaped, UInt8

from exvae import config as configs
from exvae import data
from exvae.data import splits
from exvae.data.sources.npz import to_labels, to_uint8
from exvae.distributions import Normal
from exvae.encoding import encode
from exvae.errors import UserError
from exvae.evaluation import evaluate
from exvae.runs import folder
from exvae.runs.trained import TrainedModel, open_trained
from exvae.uses import augment, generate, represent

Images = np.ndarray | Array | Sequence[Any]  # (n, H, W, C) or (n, H, W): bytes, booleans or floats in 0..1
Labels = np.ndarray | Array | Sequence[Any]  # (n,)
Pictures = Float[np.ndarray, "_ H W C"]  # float32 in 0..1
Number = float  # methods check it and raise a UserError


@dataclasses.dataclass(frozen=True)
class Run(TrainedModel):
    """A trained model, with methods for all its uses.

    Methods take images as bytes, booleans or floats in 0..1. The channel axis may be missing. All random numbers are a
    function of the key.
    """

    def with_exemplars(self, images: Images, labels: Labels | None = None) -> Run:
        """Return the same model with other exemplars, any number of them. Nothing is trained."""
        pixels = self._bytes(images)
        numbers = None if labels is None else to_labels(np.asarray(labels), len(pixels), "labels")
        return dataclasses.replace(self, exemplars=data.Split(pixels, numbers))

    def sample(
        self,
        key: Array,
        n: Number,
        *,
        index: generate.Indices | None = None,
        label: int | None = None,
        temperature: Number = 1.0,
        draw: bool = False,
    ) -> Pictures:
        """Draw n new images: choose an exemplar x_n uniformly, draw z ~ r(z|x_n), decode z.

        Args:
          key: a random key.
          n: number of images.
          index: start only from these exemplars. If the prior has no exemplars, codes come from their q(z|x).
          label: start only from exemplars of this class.
          temperature: factor on sigma.
          draw: draw pixels from p(x|z) instead of returning its mean.
        """
        _at_least("n", n, 1)
        _at_least("temperature", temperature, 0)
        sources = None if index is None and label is None else generate.choose(self.exemplars, index, label)
        return generate.sample(key, self, int(n), sources=sources, temperature=temperature, draw=draw).images

    def augment(
        self, key: Array, images: Images, n: Number = 1, *, temperature: Number = 1.0
    ) -> Float[np.ndarray, "B n H W C"]:
        """Make n new versions of each image: decoder means at z ~ r(z|x)."""
        _at_least("n", n, 1)
        _at_least("temperature", temperature, 0)
        copies = np.repeat(self._bytes(images), int(n), axis=0)
        new = generate.around(key, self, copies, temperature=temperature)
        return new.reshape(-1, int(n), *self.model.image_shape)

    def augmented_batches(
        self, key: Array, images: Images, labels: Labels, batch_size: int = 100, real: Number = 0.4
    ) -> Iterator[tuple[Pictures, Shaped[np.ndarray, " B"]]]:
        """Return an endless iterator over batches (x, y) for any training loop.

        Args:
          key: a random key.
          images: the training images.
          labels: their labels, of any type.
          batch_size: images in a batch.
          real: the probability that an image is used itself. Otherwise a new image replaces it.
        """
        return augment.batches(key, self, self._bytes(images), np.asarray(labels), size=batch_size, real=real)

    def encode(self, images: Images) -> Normal:
        """Return the posterior q(z|x) of the top latent: `.mean` is the representation, `.log_var` its log-variance."""
        return encode(self.mesh, self.model, self.params, self._bytes(images))

    def reconstruct(self, images: Images) -> Pictures:
        """Return the mean of p(x|z) at the posterior means of all latents."""
        return generate.reconstruct(self, self._bytes(images))

    def interpolate(self, a: Images, b: Images, steps: Number = 10) -> Float[np.ndarray, "n steps H W C"]:
        """Interpolate in latent space from each image of a to that of b. Both ends are reconstructions."""
        _at_least("steps", steps, 2)
        first, second = self._bytes(a), self._bytes(b)
        if len(first) != len(second):
            raise UserError(
                f"interpolate needs the same number of images on both sides, not {len(first)} and {len(second)}"
            )
        return generate.interpolate(self, first, second, int(steps))

    def nearest_exemplars(self, images: Images, k: int = 10) -> represent.Explanation:
        """Find the k exemplars that explain each image best, and their responsibilities r(z|x_n) / sum_m r(z|x_m)."""
        return represent.explain(self, self._bytes(images), k)

    def log_likelihood(self, images: Images, num_samples: Number | None = None) -> Float[np.ndarray, " n"]:
        """Estimate log p(x) in nats, with all exemplars, by importance sampling as in `--task=evaluate`.

        A Bernoulli model is a model of binary images, so grey images are binarized once, in the same way as a test set.
        The samples of an image depend on the seed of the run and on the position of the image.

        Args:
          images: the images.
          num_samples: S, the importance samples of each image; None: config.eval.iwae_samples.
        """
        samples = self.config.eval.iwae_samples if num_samples is None else num_samples
        _at_least("num_samples", samples, 1)
        pixels = self._bytes(images)
        if self.config.model.likelihood == "bernoulli":
            pixels = splits.draw_binary(np.random.RandomState(splits.BINARIZATION_SEED), pixels)
        return evaluate.log_likelihoods(self, pixels, int(samples))

    def _bytes(self, images: Images) -> UInt8[np.ndarray, "n H W C"]:
        """Convert a user's images to bytes, and check that they have the size of the model."""
        pixels = to_uint8(np.asarray(images), "images")
        data.check_size(pixels, self.model.image_shape, "images")
        return pixels


def _at_least(name: str, value: Number, low: int) -> None:
    if not value >= low or (low > 0 and int(value) != value):
        raise UserError(f"{name}={value} must be {'a whole number, ' if low > 0 else ''}at least {low}")


def load(workdir: str | Path, *, data_dir: str = "") -> Run:
    """Load the trained model of a run.

    Args:
      workdir: the folder of the run.
      data_dir: the folder of its data files, if they have moved since training.
    """
    workdir = Path(workdir)
    config = configs.stored(folder.read_config(workdir), workdir)
    config.data.dir = data_dir or config.data.dir
    return open_trained(Run, config, workdir)
