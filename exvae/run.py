"""A trained model, read back from its folder, and all that it can be used for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from jaxtyping import Array, Float, Int, Shaped

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

Images = Shaped[np.ndarray, "n H W C"]  # as a user has them: bytes, booleans or floats in 0..1; channels may be missing
Pictures = Float[np.ndarray, "n H W C"]  # float32 in 0..1


@dataclasses.dataclass(frozen=True)
class Run(TrainedModel):
    """A trained model with all that it can be used for.

    Methods take images as bytes, booleans or floats in 0..1. Everything random is a function of the key.
    """

    def with_exemplars(self, images: Images, labels: Int[np.ndarray, " n"] | None = None) -> Run:
        """The same model with other exemplars, as many as there are: p(z|X) is over them. Nothing is trained."""
        images = self._bytes(images)
        labels = None if labels is None else to_labels(np.asarray(labels), len(images), "labels")
        return dataclasses.replace(self, exemplars=data.Split(images, labels))

    def sample(
        self,
        key: Array,
        n: int,
        *,
        index: Int[np.ndarray, " s"] | None = None,
        label: int | None = None,
        temperature: float = 1.0,
        draw: bool = False,
    ) -> Pictures:
        """n new images: an exemplar drawn uniformly, z ~ r(z|x_n), decoded.

        Args:
          index: only start from these exemplars. With other priors codes then come from their q(z|x).
          label: only start from exemplars of this class.
          temperature: factor on sigma.
          draw: draw pixels from p(x|z) instead of returning its mean.
        """
        _at_least("n", n, 1)
        _at_least("temperature", temperature, 0)
        sources = None if index is None and label is None else generate.choose(self.exemplars, index, label)
        return generate.sample(key, self, n, sources=sources, temperature=temperature, draw=draw).images

    def augment(
        self, key: Array, images: Images, n: int = 1, *, temperature: float = 1.0
    ) -> Float[np.ndarray, "B n ..."]:
        """n new versions of each image, decoder means at z ~ r(z|x): (len(images), n, H, W, C)."""
        _at_least("n", n, 1)
        _at_least("temperature", temperature, 0)
        copies = np.repeat(self._bytes(images), n, axis=0)
        new = generate.around(key, self, copies, temperature=temperature)
        return new.reshape(-1, n, *self.model.image_shape)

    def augmented_batches(
        self, key: Array, images: Images, labels: Shaped[np.ndarray, " n"], batch_size: int = 100, real: float = 0.4
    ) -> Iterator[tuple[Pictures, Shaped[np.ndarray, " B"]]]:
        """Batches (x, y) without end for any training loop: an image is itself with probability `real`, else new."""
        return augment.batches(key, self, self._bytes(images), np.asarray(labels), size=batch_size, real=real)

    def encode(self, images: Images) -> Normal:
        """q(z|x) of the top latent: `.mean` is the representation, `.log_var` its uncertainty."""
        return encode(self.mesh, self.model, self.params, self._bytes(images))

    def reconstruct(self, images: Images) -> Pictures:
        """Mean images at the posterior means of all latents."""
        return generate.reconstruct(self, self._bytes(images))

    def interpolate(self, a: Images, b: Images, steps: int = 10) -> Float[np.ndarray, "n steps H W C"]:
        """From each image of a to that of b along a line in latent space; the ends are the reconstructions."""
        _at_least("steps", steps, 2)
        a, b = self._bytes(a), self._bytes(b)
        if len(a) != len(b):
            raise UserError(f"interpolate needs as many images on both sides, not {len(a)} and {len(b)}")
        return generate.interpolate(self, a, b, steps)

    def nearest_exemplars(self, images: Images, k: int = 10) -> represent.Explanation:
        """The k exemplars that explain each image best, and their responsibilities r(z|x_n) / sum_m r(z|x_m)."""
        return represent.explain(self, self._bytes(images), k)

    def log_likelihood(self, images: Images, num_samples: int | None = None) -> Float[np.ndarray, " n"]:
        """log p(x) in nats with all exemplars, importance weighting as in `--task=evaluate`.

        A Bernoulli model is one of binary images: grey levels are drawn from once, as those of a test set.
        The samples of an image depend on the run's seed and on its place among the images.

        Args:
          num_samples: S; None: config.eval.iwae_samples.
        """
        num_samples = self.config.eval.iwae_samples if num_samples is None else num_samples
        _at_least("num_samples", num_samples, 1)
        images = self._bytes(images)
        if self.config.model.likelihood == "bernoulli":
            images = splits.draw_binary(np.random.RandomState(splits.BINARIZATION_SEED), images)
        return evaluate.log_likelihoods(self, images, num_samples)

    def _bytes(self, images: Images) -> Images:
        """A user's images as (n, H, W, C) bytes of the model's size."""
        images = to_uint8(np.asarray(images), "images")
        data.check_size(images, self.model.image_shape, "images")
        return images


def _at_least(name: str, value: float, low: int) -> None:
    if not value >= low or (low > 0 and int(value) != value):
        raise UserError(f"{name}={value} must be {'a whole number, ' if low > 0 else ''}at least {low}")


def load(workdir: str | Path, *, data_dir: str = "") -> Run:
    """The trained model in a run's folder. `data_dir`: where its data are, if they have moved since."""
    workdir = Path(workdir)
    config = configs.stored(folder.read_config(workdir), workdir)
    config.data.dir = data_dir or config.data.dir
    return open_trained(Run, config, workdir)
