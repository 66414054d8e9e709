"""Splits and binarization, compared with direct computation."""

import numpy as np
import pytest

from exvae.data import splits
from exvae.data.types import Dataset, Split
from exvae.errors import UserError


def numbered(n, start=0):
    """Images with their number encoded in two pixels. Labels are the same numbers."""
    number = np.arange(start, start + n)
    images = np.stack([number // 256, number % 256], 1).astype(np.uint8).reshape(n, 2, 1, 1)
    return Split(images, number.astype(np.int32))


def numbers(split):
    return split.images[:, 0, 0, 0].astype(int) * 256 + split.images[:, 1, 0, 0]


def assert_labels_follow(dataset):
    for split in (dataset.train, dataset.valid, dataset.test):
        np.testing.assert_array_equal(numbers(split), split.labels)
        assert split.images.flags.c_contiguous and split.labels.dtype == np.int32


def test_split_of_mnist_takes_the_end_of_train():
    dataset = splits.assign({"train": numbered(600), "test": numbered(100, 600)}, seed=0, num_valid=100, shuffle=False)
    assert_labels_follow(dataset)
    assert numbers(dataset.train).tolist() == list(range(500))
    assert numbers(dataset.valid).tolist() == list(range(500, 600))
    assert numbers(dataset.test).tolist() == list(range(600, 700))


def test_split_of_omniglot_is_the_seeded_permutation():
    parts = {"train": numbered(24345), "test": numbered(8070, 24345)}
    dataset = splits.assign(parts, seed=3, num_valid=1345)
    order = np.random.default_rng(3).permutation(24345)
    assert_labels_follow(dataset)
    np.testing.assert_array_equal(numbers(dataset.train), order[:23000])
    np.testing.assert_array_equal(numbers(dataset.valid), order[23000:])
    np.testing.assert_array_equal(numbers(dataset.test), numbers(parts["test"]))


@pytest.mark.parametrize(("n", "sizes"), [(5000, (4000, 500, 500)), (10, (8, 1, 1)), (3, (1, 1, 1)), (19, (17, 1, 1))])
def test_split_of_a_pool_is_80_10_10_and_disjoint(n, sizes):
    dataset = splits.assign({"all": numbered(n)}, seed=0)
    assert_labels_follow(dataset)
    found = [numbers(split) for split in (dataset.train, dataset.valid, dataset.test)]
    assert tuple(map(len, found)) == sizes
    assert sorted(np.concatenate(found)) == list(range(n))


def test_split_depends_on_the_seed_only():
    a, b, c = (splits.assign({"all": numbered(100)}, seed=seed).train.labels.tolist() for seed in (0, 0, 1))
    assert a == b and a != c


def test_split_keeps_the_parts_of_the_source():
    parts = {"train": numbered(5), "valid": numbered(4, 5), "test": numbered(3, 9)}
    dataset = splits.assign(parts, seed=0)
    for key, part in parts.items():
        np.testing.assert_array_equal(getattr(dataset, key).images, part.images)


def test_split_without_valid_takes_a_tenth_of_train():
    dataset = splits.assign({"train": numbered(50), "test": numbered(9, 50)}, seed=0)
    assert (len(dataset.train), len(dataset.valid), len(dataset.test)) == (45, 5, 9)
    assert sorted([*numbers(dataset.train), *numbers(dataset.valid)]) == list(range(50))


def test_split_of_too_few_empty_or_mixed_is_an_error():
    with pytest.raises(UserError, match="2 images are too few"):
        splits.assign({"all": numbered(2)}, seed=0)
    with pytest.raises(UserError, match="1 training images are too few"):
        splits.assign({"train": numbered(1), "test": numbered(1)}, seed=0)
    with pytest.raises(UserError, match="the test part of the data holds no images"):
        splits.assign({"train": numbered(9), "test": numbered(0)}, seed=0)
    with pytest.raises(UserError, match="mixed size: train 2x1x1, test 3x3x1"):
        splits.assign({"train": numbered(9), "test": Split(np.zeros((4, 3, 3, 1), np.uint8))}, seed=0)


def test_binarization_is_the_authors_draw_bit_for_bit():
    rng = np.random.default_rng(0)
    valid, test = (rng.integers(0, 256, (n, 20, 20, 1), dtype=np.uint8) for n in (1234, 2345))  # more than one block
    train = rng.integers(0, 256, (3, 20, 20, 1), dtype=np.uint8)
    dataset = splits.binarize(Dataset(Split(train), Split(valid), Split(test)))
    stream = np.random.RandomState(777)
    np.testing.assert_array_equal(dataset.valid.images, 255 * stream.binomial(1, valid.astype(np.float32) / 255))
    np.testing.assert_array_equal(dataset.test.images, 255 * stream.binomial(1, test.astype(np.float32) / 255))
    np.testing.assert_array_equal(dataset.train.images, train)
    assert dataset.test.images.dtype == np.uint8 and dataset.test.images.flags.c_contiguous


def test_binarization_leaves_binary_images_alone():
    binary = np.random.default_rng(0).integers(0, 2, (2000, 8, 8, 1)).astype(np.uint8) * np.uint8(255)
    dataset = splits.binarize(Dataset(Split(binary), Split(binary), Split(binary)))
    np.testing.assert_array_equal(dataset.valid.images, binary)
    np.testing.assert_array_equal(dataset.test.images, binary)
