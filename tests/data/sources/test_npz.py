"""NumPy archives: the accepted contents, and the messages about all others."""

import numpy as np
import pytest

from exvae.data.sources import npz
from exvae.data.types import NotHere
from exvae.errors import UserError

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 4, 4), dtype=np.uint8)


def save(tmp_path, **arrays):
    path = tmp_path / "data.npz"
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    "stored",
    [IMAGES, IMAGES[..., None], IMAGES.reshape(12, 16), IMAGES / 255.0, (IMAGES / 255.0).astype(np.float32)],
    ids=["(n,H,W)", "(n,H,W,1)", "flat", "float64", "float32"],
)
def test_npz_equivalent_arrays_give_the_same_images(tmp_path, stored):
    parts = npz.read(save(tmp_path, images=stored))
    np.testing.assert_array_equal(parts["all"].images, IMAGES[..., None])
    assert parts["all"].images.dtype == np.uint8 and parts["all"].labels is None


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.float32])
def test_npz_binary_images_become_0_and_255(tmp_path, dtype):
    binary = IMAGES > 127
    parts = npz.read(save(tmp_path, images=binary.astype(dtype)))
    np.testing.assert_array_equal(parts["all"].images[..., 0], 255 * binary)


def test_npz_colour_images_keep_their_channels(tmp_path):
    colour = np.stack([IMAGES, IMAGES[::-1], 255 - IMAGES], axis=-1)
    np.testing.assert_array_equal(npz.read(save(tmp_path, images=colour))["all"].images, colour)


def test_npz_parts_and_labels_are_read(tmp_path):
    labels = np.arange(12)
    path = save(
        tmp_path, train=IMAGES, train_labels=labels, valid=IMAGES[:2], test=IMAGES[2:5], test_labels=labels[2:5]
    )
    parts = npz.read(path)
    assert set(parts) == {"train", "valid", "test"}
    np.testing.assert_array_equal(parts["train"].labels, labels)
    np.testing.assert_array_equal(parts["test"].labels, [2, 3, 4])
    assert parts["valid"].labels is None and parts["train"].labels.dtype == np.int32


def test_npz_keys_of_keras_and_character_ids_are_read(tmp_path):
    parts = npz.read(save(tmp_path, x_train=IMAGES, y_train=np.arange(12), test=IMAGES[:3], test_charid=[7, 8, 9]))
    np.testing.assert_array_equal(parts["train"].labels, np.arange(12))
    np.testing.assert_array_equal(parts["test"].labels, [6, 7, 8])  # character ids count from 1


def test_npz_train_alone_is_one_pool(tmp_path):
    assert set(npz.read(save(tmp_path, train=IMAGES))) == {"all"}


NAN = (IMAGES / 255.0).astype(np.float32)
NAN[3, 1, 2] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": NAN}, "data.npz: images: 1 values are NaN or infinite"),
        ({"images": IMAGES.astype(np.float32)}, "floats must lie in 0..1"),
        ({"images": IMAGES / 255.0 - 0.5}, "floats must lie in 0..1"),
        ({"images": IMAGES.astype(np.int64)}, "dtype int64; expected uint8"),
        ({"images": np.zeros((0, 4, 4), np.uint8)}, "holds no images"),
        ({"images": IMAGES.reshape(8, 24)}, r"shape \(8, 24\); expected"),
        ({"images": np.zeros((3, 4, 4, 2), np.uint8)}, r"shape \(3, 4, 4, 2\); expected"),
        ({"images": IMAGES, "labels": np.arange(5)}, "labels: expected 12 integers, found shape"),
        ({"images": IMAGES, "labels": np.array(["a"] * 12)}, "labels: expected 12 integers"),
        ({"images": IMAGES, "train": IMAGES}, "holds both images and train"),
        ({"test": IMAGES}, "holds test but needs train and test"),
        ({"train": IMAGES, "valid": IMAGES}, "holds train, valid but needs train and test"),
        ({"pictures": IMAGES}, "holds pictures; expected train and test, or images"),
    ],
)
def test_npz_bad_content_is_named(tmp_path, arrays, message):
    with pytest.raises(UserError, match=message):
        npz.read(save(tmp_path, **arrays))


def test_npz_object_array_of_mixed_sizes_is_an_error_and_not_unpickled(tmp_path):
    mixed = np.empty(2, object)
    mixed[:] = [np.zeros((4, 4), np.uint8), np.zeros((5, 4), np.uint8)]
    with pytest.raises(UserError, match="images of mixed size"):
        npz.read(save(tmp_path, images=mixed))


def test_npz_missing_truncated_or_other_file_is_an_error(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        npz.read(tmp_path / "absent.npz")
    with pytest.raises(UserError, match="is a folder"):
        npz.read(tmp_path)
    path = save(tmp_path, images=IMAGES)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="data.npz: truncated or not an npz file"):
        npz.read(path)
    path.write_bytes(b"some text")
    with pytest.raises(UserError, match="truncated or not an npz file"):
        npz.read(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="truncated or not an npz file"):
        npz.read(path)
    np.save(tmp_path / "one.npy", IMAGES)
    with pytest.raises(UserError, match="holds one array"):
        npz.read(tmp_path / "one.npy")


def test_npz_flipped_byte_is_an_error(tmp_path):
    path = save(tmp_path, images=IMAGES)
    data = bytearray(path.read_bytes())
    data[data.index(IMAGES.tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="Bad CRC"):
        npz.read(path)


def test_npz_find_prefers_the_exact_name_and_refuses_to_guess(tmp_path):
    with pytest.raises(NotHere, match=r"no omniglot\*.npz"):
        npz.find(tmp_path, "omniglot")
    (tmp_path / "omniglot28.npz").touch()
    assert npz.find(tmp_path, "omniglot").name == "omniglot28.npz"
    (tmp_path / "omniglot32.npz").touch()
    with pytest.raises(UserError, match="omniglot28.npz, omniglot32.npz"):
        npz.find(tmp_path, "omniglot")
    (tmp_path / "omniglot.npz").touch()
    assert npz.find(tmp_path, "omniglot").name == "omniglot.npz"


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_large_arrays_of_bytes_are_mapped(tmp_path, monkeypatch, rng, save):
    """Only an uncompressed array can be mapped. The contents are the same either way."""
    monkeypatch.setattr(npz, "MAPPED_FROM", 1000)
    train = rng.integers(0, 256, (50, 7, 7, 3), dtype=np.uint8)
    save(tmp_path / "large.npz", test=train[:5], labels=np.arange(3), train=train, train_labels=np.arange(50))
    parts = npz.read(tmp_path / "large.npz")
    np.testing.assert_array_equal(parts["train"].images, train)
    np.testing.assert_array_equal(parts["test"].images, train[:5])
    np.testing.assert_array_equal(parts["train"].labels, np.arange(50))
    base = parts["train"].images
    while isinstance(base.base, np.ndarray):
        base = base.base
    assert isinstance(base, np.memmap) == (save is np.savez)
    # Floats are converted to bytes, so they are not mapped.
    np.savez(tmp_path / "floats.npz", train=train / 255, test=train[:5] / 255)
    np.testing.assert_array_equal(npz.read(tmp_path / "floats.npz")["train"].images, train)
