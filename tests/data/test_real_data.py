"""The real data sets, if there is a copy in EXVAE_DATA_DIR or in ../shared/data next to the repository."""

import os
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict

from exvae import data
from exvae.data import decoding
from exvae.data.sources import celeba

FOLDER = Path(os.environ.get("EXVAE_DATA_DIR") or Path(__file__).parents[3] / "shared" / "data")


def load(name, **options):
    if not (FOLDER / name).is_dir():
        pytest.skip(f"no {name} in {FOLDER}; set EXVAE_DATA_DIR to test on real data")
    fields = dict(dir=str(FOLDER), split_seed=0, image_size=28, colour=False, num_images=0, memory_mib=1024)
    return data.load(ConfigDict({"name": name, **fields}), **options)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [("mnist", (50000, 10000, 10000)), ("fashion_mnist", (50000, 10000, 10000)), ("omniglot", (23000, 1345, 8070)),
     ("static_mnist", (50000, 10000, 10000))],
)  # fmt: skip
def test_real_set_has_the_sizes_of_the_paper(name, sizes):
    dataset = load(name)
    for split, size in zip((dataset.train, dataset.valid, dataset.test), sizes, strict=True):
        assert split.images.shape == (size, 28, 28, 1) and split.images.dtype == np.uint8
        assert split.images.flags.c_contiguous
    assert set(np.unique(dataset.valid.images)) == set(np.unique(dataset.test.images)) == {0, 255}


def test_real_mnist_draw_equals_numpy_on_the_first_images():
    grey, binary = load("mnist", binarize=False), load("mnist")
    expected = np.random.RandomState(777).binomial(1, grey.valid.images[:500].astype(np.float32) / 255)
    np.testing.assert_array_equal(binary.valid.images[:500], 255 * expected)
    assert grey.train.labels[:5].tolist() == [5, 0, 4, 1, 9]


def test_real_omniglot_has_every_character_in_train():
    dataset = load("omniglot")
    assert np.unique(dataset.train.labels).tolist() == list(range(1623))
    assert set(dataset.test.labels) <= set(dataset.train.labels)


def test_real_celeba_mean_is_a_face():
    """The mean of 300 images is a face. (Decoding all images takes seconds.)"""
    if not (FOLDER / "celeba").is_dir():
        pytest.skip(f"no celeba in {FOLDER}; set EXVAE_DATA_DIR to test on real data")
    parts = celeba.read(FOLDER / "celeba", "celeba")
    assert sum(map(len, parts.values())) in (10_000, 202_599)
    part = parts["all" if "all" in parts else "train"]
    images = decoding.decode({"some": data.Split(part.images[:300])}, memory_mib=1024)["some"].images
    mean = images.mean(0)
    # In the mean face, eyes are darker than cheeks, both sides are alike, and skin is more red than blue.
    eyes, cheeks = mean[27:32, 16:48].mean(), mean[38:43, 18:46].mean()
    assert eyes < cheeks - 15
    assert np.abs(mean - mean[:, ::-1]).mean() < 10
    assert mean[20:45, 20:44, 0].mean() > mean[20:45, 20:44, 2].mean() + 25
