"""The split into train, valid and test, and the binarization of valid and test."""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from exvae.data.types import Dataset, Parts, RawDataset, RawSplit, Split, Undecoded
from exvae.errors import UserError

BINARIZATION_SEED = 777  # the authors' seed
_BLOCK = 1000  # images binarized at a time, so their random numbers take only a few megabytes


def assign(
    parts: Parts,
    *,
    seed: int,
    num_valid: int | None = None,
    shuffle: bool = True,
) -> RawDataset:
    """Make train, valid and test from the parts that a source returns.

    Args:
      parts: `{"train", "test"}` or `{"train", "valid", "test"}`, which are kept, or `{"all"}`, which is split into 80,
        10 and 10 %.
      seed: seed of the shuffle; the same seed gives the same split on every machine.
      num_valid: number of training images that become valid if the source has no valid; None: a tenth.
      shuffle: whether valid is a random part of train, or its last images (MNIST, Fashion-MNIST).
    """
    _check_shapes(parts)
    if "all" in parts:
        return _from_pool(parts["all"], seed)
    train, test = parts["train"], parts["test"]
    if "valid" in parts:
        return Dataset(_contiguous(train), _contiguous(parts["valid"]), _contiguous(test))
    num_valid = max(1, len(train) // 10) if num_valid is None else num_valid
    num_train = len(train) - num_valid
    if num_train < 1:
        raise UserError(f"{len(train)} training images are too few: {num_valid} of them become the validation set")
    if shuffle:
        # Differs from the authors' code: the split of Omniglot has a seed. There it changes when a run resumes.
        order = np.random.default_rng(seed).permutation(len(train))
        return Dataset(_take(train, order[:num_train]), _take(train, order[num_train:]), _contiguous(test))
    # Slices do not copy the images.
    return Dataset(_take(train, slice(num_train)), _take(train, slice(num_train, None)), _contiguous(test))


def binarize(dataset: Dataset) -> Dataset:
    """Binarize valid, then test, to 0 and 255 with one random stream. Train keeps its grey levels."""
    stream = np.random.RandomState(BINARIZATION_SEED)
    valid = Split(draw_binary(stream, dataset.valid.images), dataset.valid.labels)
    test = Split(draw_binary(stream, dataset.test.images), dataset.test.labels)
    return Dataset(dataset.train, valid, test)


def as_modelled(dataset: Dataset, likelihood: str) -> Dataset:
    """Binarize the data if the likelihood is Bernoulli. Models with other likelihoods use it unchanged."""
    return binarize(dataset) if likelihood == "bernoulli" else dataset


def draw_binary(stream: np.random.RandomState, images: UInt8[np.ndarray, "n H W C"]) -> UInt8[np.ndarray, "n H W C"]:
    """Draw the same values as `255 * stream.binomial(1, images / 255)` in float32, seven times as fast.

    For each pixel, numpy's legacy binomial draws one uniform number u and returns u > 1 - p if p <= 1/2, else
    not (u > p). There are only 256 grey levels, so a table replaces both comparisons.
    """
    p = (np.arange(256, dtype=np.float32) / 255).astype(np.float64)
    threshold, flip = np.maximum(p, 1 - p), p > 0.5
    binary = np.empty(images.shape, np.uint8)
    for start in range(0, len(images), _BLOCK):
        block = images[start : start + _BLOCK]
        ones = (stream.random_sample(block.shape) > threshold[block]) ^ flip[block]
        np.multiply(ones, np.uint8(255), out=binary[start : start + _BLOCK])
    return binary


def _from_pool(everything: RawSplit, seed: int) -> RawDataset:
    n = len(everything)
    if n < 3:
        raise UserError(f"{n} images are too few to split into train, valid and test")
    tenth = max(1, n // 10)
    order = np.random.default_rng(seed).permutation(n)
    train, valid, test = np.split(order, [n - 2 * tenth, n - tenth])
    return Dataset(_take(everything, train), _take(everything, valid), _take(everything, test))


def _take(split: RawSplit, index: np.ndarray | slice) -> RawSplit:
    labels = None if split.labels is None else split.labels[index]
    return _contiguous(Split(split.images[index], labels))


def _contiguous(split: RawSplit) -> RawSplit:
    labels = None if split.labels is None else np.ascontiguousarray(split.labels, np.int32)
    # A slice of a contiguous array is contiguous: images that are mapped from a file are not copied.
    images = split.images if isinstance(split.images, Undecoded) else np.ascontiguousarray(split.images)
    return Split(images, labels)


def _check_shapes(parts: Parts) -> None:
    for key, part in parts.items():
        if not len(part):
            raise UserError(f"the {key} part of the data holds no images")
    shapes = {key: part.images.shape[1:] for key, part in parts.items()}
    if len(set(shapes.values())) > 1:
        sizes = ", ".join(f"{key} {'x'.join(map(str, shape))}" for key, shape in shapes.items())
        raise UserError(f"images of mixed size: {sizes}; all parts must have the same height, width and channels")
