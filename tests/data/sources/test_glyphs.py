import numpy as np
import pytest

from exvae.data.sources import glyphs
from exvae.errors import UserError


@pytest.fixture(scope="module")
def sample():
    return glyphs.generate(6000, seed=0)


def test_generate_gives_images_and_labels(sample):
    assert sample.images.shape == (6000, 28, 28, 1) and sample.images.dtype == np.uint8
    assert sample.labels.shape == (6000,) and sample.labels.dtype == np.int32
    assert sample.labels.min() >= 0 and sample.labels.max() < glyphs.NUM_CHARACTERS
    assert len(np.unique(sample.labels)) > 1500


def test_generate_same_seed_same_images(sample):
    glyphs._characters.cache_clear()
    glyphs._hands.cache_clear()
    again = glyphs.generate(6000, seed=0)
    np.testing.assert_array_equal(again.images, sample.images)
    np.testing.assert_array_equal(again.labels, sample.labels)


@pytest.mark.parametrize("count", [1, 100, glyphs._BLOCK, glyphs._BLOCK + 1])
def test_generate_smaller_set_is_a_prefix(sample, count):
    fewer = glyphs.generate(count, seed=0)
    np.testing.assert_array_equal(fewer.images, sample.images[:count])
    np.testing.assert_array_equal(fewer.labels, sample.labels[:count])


def test_generate_other_seed_other_images(sample):
    other = glyphs.generate(100, seed=1)
    same = (other.images == sample.images[:100]).all(axis=(1, 2, 3))
    assert not same.any()


def test_generate_grey_levels_like_omniglot(sample):
    """Omniglot at 28 x 28: mean 21.2, standard deviation 60.4, 84 % black, 4 % at 224 or more."""
    images = sample.images
    assert 18 < images.mean() < 24
    assert 55 < images.std() < 66
    assert 0.82 < (images == 0).mean() < 0.90
    assert 0.03 < (images >= 224).mean() < 0.06
    assert images.reshape(len(images), -1).max(1).min() > 150  # no image is empty


def test_generate_keeps_strokes_off_the_edge(sample):
    edge = np.ones((28, 28), bool)
    edge[1:-1, 1:-1] = False
    assert sample.images[:, edge].mean() < 1


def test_generate_same_character_is_closer_than_another(sample):
    x = sample.images.reshape(6000, -1).astype(np.float32) / 255
    order = np.argsort(sample.labels, kind="stable")
    a, b = order[:-1], order[1:]
    pair = sample.labels[a] == sample.labels[b]
    same = np.square(x[a[pair]] - x[b[pair]]).sum(1).mean()
    different = np.square(x[:3000] - x[3000:]).sum(1).mean()
    assert same < 0.85 * different


def test_generate_strokes_are_lines_not_noise(sample):
    """Bright pixels have bright neighbours, unlike pixels in random order."""
    bright = sample.images[..., 0] > 128
    padded = np.pad(bright, ((0, 0), (1, 1), (1, 1)))
    shifts = [(i, j) for i in range(3) for j in range(3) if (i, j) != (1, 1)]
    neighbours = sum(padded[:, i : i + 28, j : j + 28].astype(int) for i, j in shifts)
    assert (neighbours[bright] >= 1).mean() > 0.99
    assert 1.5 < neighbours[bright].mean() < 5  # thin: a filled area would have 8


@pytest.mark.parametrize(("count", "seed", "word"), [(0, 0, "number of glyphs 0"), (5, -1, "seed -1")])
def test_generate_refuses_bad_arguments(count, seed, word):
    with pytest.raises(UserError, match=word):
        glyphs.generate(count, seed)
