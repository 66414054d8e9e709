"""IDX files: values are read exactly, and every kind of damaged file is refused."""

import numpy as np
import pytest

from exvae.data.sources import idx
from exvae.data.types import NotHere
from exvae.errors import UserError


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(idx, "COUNTS", {"train": 30, "test": 20})


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip_gives_the_same_values(tmp_path, small, suffix, write_set):
    arrays = write_set(tmp_path, np.random.default_rng(0), suffix=suffix)
    parts = idx.read(tmp_path, "mnist")
    assert set(parts) == {"train", "test"}
    for part, split in parts.items():
        np.testing.assert_array_equal(split.images, arrays[part][..., None])
        np.testing.assert_array_equal(split.labels, arrays[f"{part}_labels"])
        assert split.images.dtype == np.uint8 and split.labels.dtype == np.int32
        assert split.images.flags.c_contiguous


def test_idx_empty_folder_raises_not_here(tmp_path):
    with pytest.raises(NotHere, match="train-images-idx3-ubyte"):
        idx.read(tmp_path, "mnist")


def test_idx_missing_file_is_an_error(tmp_path, small, write_set):
    write_set(tmp_path, np.random.default_rng(0))
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(UserError, match="not t10k-labels-idx1-ubyte"):
        idx.read(tmp_path, "mnist")


@pytest.mark.parametrize("keep", [0, 10, 1000])
def test_idx_truncated_plain_names_file_and_sizes(tmp_path, small, keep, write_set):
    write_set(tmp_path, np.random.default_rng(0))
    path = tmp_path / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=rf"{path}: truncated: expected {16 + 30 * 784} bytes, found {keep}$"):
        idx.read(tmp_path, "mnist")


def test_idx_truncated_gzip_names_file_and_sizes(tmp_path, small, write_set):
    write_set(tmp_path, np.random.default_rng(0), suffix=".gz")
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(UserError, match=rf"{path}: truncated: expected {16 + 20 * 784} bytes, found \d+$"):
        idx.read(tmp_path, "mnist")


def test_idx_invalid_gzip_is_an_error(tmp_path, small, write_set):
    write_set(tmp_path, np.random.default_rng(0), suffix=".gz")
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(b"<html>not found</html>")
    with pytest.raises(UserError, match="train-labels-idx1-ubyte.gz: broken gzip file"):
        idx.read(tmp_path, "mnist")


def test_idx_too_long_is_an_error(tmp_path, encode):
    path = tmp_path / "a"
    path.write_bytes(encode(np.zeros((3, 2, 2), np.uint8)) + b"x")
    with pytest.raises(UserError, match="too long: expected 28 bytes, found 29"):
        idx.read_array(path, (3, 2, 2))


def test_idx_wrong_count_and_wrong_image_size_name_both(tmp_path, encode):
    path = tmp_path / "a"
    path.write_bytes(encode(np.zeros((3, 2, 2), np.uint8)))
    with pytest.raises(UserError, match="wrong size: expected 4 items of 2x2, found 3 items of 2x2"):
        idx.read_array(path, (4, 2, 2))
    with pytest.raises(UserError, match="expected 3 items of 28x28, found 3 items of 2x2"):
        idx.read_array(path, (3, 28, 28))


def test_idx_wrong_magic_is_an_error(tmp_path, encode):
    path = tmp_path / "a"
    path.write_bytes(encode(np.zeros((3, 2, 2), np.uint8)))
    with pytest.raises(UserError, match="not an IDX file of bytes in 1 dimensions"):
        idx.read_array(path, (3,))


def test_idx_files_of_another_set_are_refused(tmp_path, small, write_set):
    write_set(tmp_path, np.random.default_rng(0), first_labels=[5, 0, 4, 1, 9, 2, 1, 3, 1, 4])
    idx.read(tmp_path, "mnist")
    with pytest.raises(UserError, match="belongs to mnist, not to fashion_mnist"):
        idx.read(tmp_path, "fashion_mnist")
