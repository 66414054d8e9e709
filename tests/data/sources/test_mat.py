"""chardata.mat: orientation and labels."""

import numpy as np
import pytest
import scipy.io

from exvae.data.sources import mat
from exvae.data.types import NotHere
from exvae.errors import UserError


def write(folder, images, test_images, **more):
    """Writes images (n, 28, 28) as MATLAB stores them: one column for each image, in column-major order."""
    columns = {key: np.stack([x.ravel(order="F") for x in xs], 1) for key, xs in
               (("data", images), ("testdata", test_images))}  # fmt: skip
    scipy.io.savemat(folder / "chardata.mat", {**columns, **more})


def test_mat_images_come_back_upright(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (5, 28, 28)) / 255.0
    images[0] = 0
    images[0, 3, :] = 1  # a bar along the fourth row
    write(tmp_path, images, images[:2])
    parts = mat.read(tmp_path)
    np.testing.assert_array_equal(parts["train"].images[..., 0], np.rint(255 * images))
    np.testing.assert_array_equal(parts["test"].images[..., 0], np.rint(255 * images[:2]))
    assert parts["train"].images[0, 3, :, 0].tolist() == [255] * 28
    assert parts["train"].images.flags.c_contiguous and parts["train"].labels is None


def test_mat_labels_of_a_character_are_equal_in_train_and_test(tmp_path):
    images = np.zeros((4, 28, 28))
    alphabet, character = np.array([0, 0, 1, 1]), np.array([1, 2, 1, 1])
    onehot = np.eye(50)[alphabet].T
    write(
        tmp_path, images, images, target=onehot, targetchar=character[None],
        testtarget=onehot[:, ::-1], testtargetchar=character[None, ::-1],
    )  # fmt: skip
    parts = mat.read(tmp_path)
    assert parts["train"].labels.tolist() == [0, 1, 2, 2]
    assert parts["test"].labels.tolist() == [2, 2, 1, 0]
    assert parts["train"].labels.dtype == np.int32


def test_mat_absent_truncated_or_wrong_is_named(tmp_path):
    with pytest.raises(NotHere, match="chardata.mat"):
        mat.read(tmp_path)
    write(tmp_path, np.zeros((3, 28, 28)), np.zeros((3, 28, 28)))
    path = tmp_path / "chardata.mat"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UserError, match="chardata.mat: truncated or not a MATLAB file"):
        mat.read(tmp_path)
    scipy.io.savemat(path, {"data": np.zeros((784, 2))})
    with pytest.raises(UserError, match="has no testdata"):
        mat.read(tmp_path)
    scipy.io.savemat(path, {"data": np.zeros((100, 2)), "testdata": np.zeros((784, 2))})
    with pytest.raises(UserError, match=r"data: shape \(100, 2\); expected \(784, n\)"):
        mat.read(tmp_path)
