"""TensorFlow Datasets: `mnist`, `fashion_mnist`, `omniglot` and `celeba` from a copy that TFDS prepared.

TensorFlow is needed to prepare a copy, but not to read it: this package reads the array_record or tfrecord files.

TFDS sorts the examples of a split by a hash of their keys. The keys are known, so the order of the original files is
restored. CelebA is the exception: it is decoded while it is read, so it keeps TFDS's order.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import logging
import os
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image

from exvae.data.sources import celeba, tfds_records
from exvae.data.types import NotHere, Parts, Split, Undecoded
from exvae.errors import UserError

_DOWNLOADED_FROM = {
    "mnist": "https://storage.googleapis.com",
    "fashion_mnist": "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com",
    "omniglot": "https://github.com",
    "celeba": "https://drive.google.com",
}
NAMES = tuple(_DOWNLOADED_FROM)

_OMNIGLOT_DRAWERS = 20
_OMNIGLOT_TRAIN_DRAWERS = 15  # in the paper's file, drawers 1-15 of each character are train, 16-20 are test
# (label, drawer) of the 45 test drawings that the paper's 8070 do not include.
_OMNIGLOT_LEFT_OUT = (
    (7, 20), (9, 20), (54, 19), (76, 16), (136, 20), (177, 19), (217, 18), (234, 18), (326, 19), (377, 20), (381, 17),
    (382, 20), (396, 18), (432, 18), (435, 19), (445, 20), (509, 16), (510, 20), (526, 18), (552, 20), (562, 18),
    (583, 17), (711, 19), (730, 20), (781, 18), (799, 17), (812, 16), (820, 17), (906, 16), (921, 20), (944, 20),
    (994, 18), (1096, 20), (1147, 18), (1226, 19), (1335, 20), (1367, 17), (1395, 20), (1422, 16), (1459, 19),
    (1468, 18), (1492, 16), (1588, 16), (1597, 16), (1600, 18),
)  # fmt: skip


def read(name: str, data_dir: str | None = None) -> Parts:
    """Read the splits of a data set. If there is no copy and TensorFlow is installed, prepare one first.

    The splits are `train` and `test`. CelebA also has `valid`, and its images are not decoded yet. Omniglot is as in
    the paper: bright strokes at 28 x 28, split by drawer (24345 / 8070), not by alphabet as in TFDS.

    Args:
      name: one of `NAMES`.
      data_dir: TFDS's folder; by default `TFDS_DATA_DIR` or TFDS's own default.

    Raises:
      NotHere: there is no copy and none can be prepared.
      UserError: there is a copy and it is damaged.
    """
    if name not in NAMES:
        raise NotHere(f"TFDS is used only for {', '.join(NAMES)}")
    root = pathlib.Path(data_dir or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets").expanduser()
    with _quiet():
        folder = _find_copy(root, name) or _prepare(root, name)
        with _named(folder):
            if name == "celeba":
                return _read_celeba(folder)
            return _read_omniglot(folder) if name == "omniglot" else _read_digits(folder)


def folder_name(name: str) -> str:
    """TFDS's name for the data set."""
    return "celeb_a" if name == "celeba" else name


# Find or prepare a copy.


def _find_copy(root: pathlib.Path, name: str) -> pathlib.Path | None:
    """Find the newest prepared version from the names of folders: importing TFDS would take a second."""
    versions = [
        path.parent for path in (root / folder_name(name)).glob("*/dataset_info.json") if path.parent.name[0].isdigit()
    ]
    return max(
        versions, key=lambda folder: [int(part) for part in folder.name.split(".") if part.isdigit()], default=None
    )


def _prepare(root: pathlib.Path, name: str) -> pathlib.Path:
    nothing = f"no prepared copy of {name} under {root}"
    for package in ("tensorflow_datasets", "tensorflow"):
        if importlib.util.find_spec(package) is None:
            raise NotHere(
                f"{nothing}, and {package} is not installed to make one (pip install -r requirements-tfds.txt)"
            )
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # must be set before TensorFlow is imported
    try:
        import tensorflow_datasets as tfds

        _check_network(root, name)
        builder = tfds.builder(folder_name(name), data_dir=root, file_format="array_record")
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(try_download_gcs=False))
        return pathlib.Path(builder.data_dir)
    except Exception as error:  # no network, full disk, wrong checksum, missing package: in all cases there is no copy
        raise NotHere(f"{nothing}, and TFDS failed to make one: {_one_line(error)}") from error


def _check_network(root: pathlib.Path, name: str) -> None:
    """Try to reach the host once: without a network, TFDS would retry for minutes."""
    import requests

    if any((root / "downloads" / folder_name(name)).glob("*.INFO")):
        return  # downloaded before, or put there by hand
    try:
        requests.head(_DOWNLOADED_FROM[name], timeout=10)
    except requests.RequestException as error:
        raise ConnectionError(f"{_DOWNLOADED_FROM[name]} does not answer") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide TFDS's hints about optional packages, which it logs as warnings, and its downloader's retries."""
    from absl import logging as absl_logging

    loggers = [absl_logging.get_absl_logger(), logging.getLogger("urllib3")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _named(folder: pathlib.Path) -> Iterator[None]:
    """Add the folder to every error that reading a copy raises."""
    try:
        yield
    except ImportError as error:
        raise NotHere(f"TFDS copy at {folder} cannot be read: {_one_line(error)}") from error
    except Exception as error:  # TFDS, array_record, protobuf and PIL raise different kinds for a damaged file
        raise UserError(
            f"TFDS copy at {folder} is damaged; delete it to prepare it again: {_one_line(error)}"
        ) from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:197] + "..."


# Read the three kinds of data sets.


def _read_digits(folder: pathlib.Path) -> dict[str, Split]:
    info = _load_info(folder)
    splits = {}
    for split in ("train", "test"):
        pngs, labels = _read_examples(info, split)
        order = _key_order(split, [str(i) for i in range(len(pngs))])
        images = np.empty((len(pngs), 28, 28, 1), np.uint8)
        images[order, ..., 0] = [_decode(png, (28, 28)) for png in pngs]
        original = np.empty(len(pngs), np.int32)
        original[order] = labels
        splits[split] = Split(images, original)
    return splits


def _read_omniglot(folder: pathlib.Path) -> dict[str, Split]:
    info = _load_info(folder)
    names = info.features["label"].names
    parts = [_read_omniglot_part(info, split, names) for split in ("train", "test")]
    images, labels, drawers = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    by_character = np.lexsort((drawers, labels))
    images, labels, drawers = images[by_character], labels[by_character], drawers[by_character]
    train = drawers <= _OMNIGLOT_TRAIN_DRAWERS
    left_out = np.isin(labels * 100 + drawers, [label * 100 + drawer for label, drawer in _OMNIGLOT_LEFT_OUT])
    return {
        "train": Split(images[train], labels[train]),
        "test": Split(images[~train & ~left_out], labels[~train & ~left_out]),
    }


def _read_omniglot_part(info: Any, split: str, names: list[str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images, labels and drawers of one of TFDS's splits. Drawers are not stored, but the keys contain them."""
    pngs, labels = _read_examples(info, split)
    wanted = [(label, drawer) for label in np.unique(labels) for drawer in range(1, _OMNIGLOT_DRAWERS + 1)]
    keys = [f"{names[label]}_{label + 1:04d}_{drawer:02d}.png" for label, drawer in wanted]
    stored = np.array(wanted, np.int32)[_key_order(split, keys)]
    if not np.array_equal(stored[:, 0], labels):
        raise ValueError(f"the {len(labels)} examples of split {split} are not in the order in which TFDS writes them")
    images = np.stack([_shrink(_decode(png, (105, 105))) for png in pngs])
    return images[..., None], stored[:, 0], stored[:, 1]


def _shrink(ink_on_paper: np.ndarray) -> np.ndarray:
    """Convert dark strokes on white (105, 105) to bright strokes on black (28, 28), antialiased and bicubic."""
    # Differs from the paper: its images are those of chardata.mat. These are made from the original drawings.
    # As floats: with 8-bit images, Pillow would clip the overshoot of the filter after each direction.
    bright = Image.fromarray(255.0 - ink_on_paper.astype(np.float32)).resize((28, 28), Image.Resampling.BICUBIC)
    return np.clip(np.rint(np.asarray(bright)), 0, 255).astype(np.uint8)


def _read_celeba(folder: pathlib.Path) -> dict[str, Split[Undecoded]]:
    info = _load_info(folder)
    shards = {}
    for part, split in (("train", "train"), ("valid", "validation"), ("test", "test")):
        paths = map(pathlib.Path, info.splits[split].filepaths)
        shards[part] = list(zip(paths, info.splits[split].shard_lengths, strict=True))
    return celeba.from_shards(folder, shards, functools.partial(_read_jpgs, folder, info.file_format.value))


def _read_jpgs(folder: pathlib.Path, file_format: str, path: pathlib.Path) -> list[bytes]:
    try:
        with _named(folder):
            return [
                example["image"].bytes_list.value[0] for example in tfds_records.read_features(str(path), file_format)
            ]
    except NotHere as error:  # too late to try another source
        raise UserError(str(error)) from error


# Read the examples and restore their order.


def _load_info(folder: pathlib.Path) -> Any:
    import tensorflow_datasets as tfds

    return tfds.builder_from_directory(folder).info


def _read_examples(info: Any, split: str) -> tuple[list[bytes], np.ndarray]:
    """The encoded images and the labels of a split, in the stored order."""
    pngs, labels = [], []
    for path in info.splits[split].filepaths:
        for feature in tfds_records.read_features(os.fspath(path), info.file_format.value):
            pngs.append(feature["image"].bytes_list.value[0])
            labels.append(feature["label"].int64_list.value[0])
    if len(pngs) != info.splits[split].num_examples:
        raise ValueError(f"split {split} has {len(pngs)} of {info.splits[split].num_examples} examples")
    return pngs, np.array(labels, np.int32)


def _key_order(split: str, keys: list[str]) -> np.ndarray:
    """`order[j]` is the index of the key stored at place j. TFDS sorts by a hash, salted with the name of the split."""
    from tensorflow_datasets.core import hashing

    hasher = hashing.Hasher(split)
    return np.array(sorted(range(len(keys)), key=lambda i: hasher.hash_key(keys[i])))


def _decode(png: bytes, shape: tuple[int, int]) -> np.ndarray:
    with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
        pixels = np.asarray(image.convert("L"))
    if pixels.shape != shape:
        raise ValueError(f"an image is {pixels.shape[0]} x {pixels.shape[1]}, not {shape[0]} x {shape[1]}")
    return pixels
