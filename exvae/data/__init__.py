"""Data as bytes: `load(config.data)` gives train, valid and test of a named set or of the user's own images."""

from __future__ import annotations

import difflib
from pathlib import Path

import ml_collections
import numpy as np
from jaxtyping import UInt8

from exvae.data import registry, splits, storage
from exvae.data.types import Dataset, Split
from exvae.errors import UserError

__all__ = ["Dataset", "Split", "check_name", "check_size", "join", "load", "load_exemplars", "names"]

_PREFIXES = ("npz:", "images:")


def names() -> tuple[str, ...]:
    """The named data sets; `npz:PATH` and `images:PATH` come on top of them."""
    return (*registry.SETS, "mnist_5k", "glyphs")


def load(data_config: ml_collections.ConfigDict, *, binarize: bool = True) -> Dataset:
    """Loads `config.data.name`; valid and test are binarized once unless `binarize` is False.

    Train keeps its grey levels or colours: it is binarized afresh each step, exemplars never.
    """
    check_name(data_config.name)
    dataset = _find(data_config)
    dataset = Dataset(**storage.decode(vars(dataset), memory_mib=data_config.memory_mib))
    return splits.binarize(dataset) if binarize else dataset


def load_exemplars(which: str, grey: Dataset, *, memory_mib: float = storage.MEMORY_MIB) -> Split:
    """What `config.eval.exemplars` names: train, train+valid, npz:PATH or images:PATH."""
    if which == "train":
        return grey.train
    if which == "train+valid":
        return join(grey.train, grey.valid)
    height, _, channels = grey.train.images.shape[1:]
    parts = _find_own(which, image_size=height, colour=channels == 3)
    name = "all" if "all" in parts else "train"
    split = storage.decode({name: parts[name]}, memory_mib=memory_mib)[name]
    check_size(split.images, grey.train.images.shape[1:], f"config.eval.exemplars={which}")
    return split


def join(*parts: Split) -> Split:
    """One after another; labels only where all parts have them."""
    labels = None if any(part.labels is None for part in parts) else np.concatenate([part.labels for part in parts])
    return Split(storage.concatenate([part.images for part in parts]), labels)


def check_size(images: UInt8[np.ndarray, "n H W C"], image_shape: tuple[int, ...], where: str) -> None:
    """Refuse images of another size than the model's."""
    if images.shape[1:] != tuple(image_shape):
        here, there = ("x".join(map(str, shape)) for shape in (images.shape[1:], image_shape))
        raise UserError(f"{where}: images of {here}, but the model is for {there}")


def check_name(name: str) -> None:
    """Raises UserError with the nearest name if `name` is no data set; reads nothing."""
    if name in names() or any(name.startswith(prefix) and name != prefix for prefix in _PREFIXES):
        return
    allowed = [*names(), "npz:PATH", "images:PATH"]
    heads = {entry.split(":")[0]: entry for entry in allowed}
    near = difflib.get_close_matches(name.split(":")[0].lower(), heads, n=1, cutoff=0.5)
    hint = f" (did you mean {heads[near[0]]}?)" if near else ""
    raise UserError(f"config.data.name={name} is unknown{hint}; allowed: {', '.join(allowed)}")


def _find(data_config: ml_collections.ConfigDict) -> Dataset:
    """Dispatches on the name; modules are imported where needed, so that a set costs only its own imports."""
    name, seed = data_config.name, data_config.split_seed
    if name in registry.SETS:
        return registry.load(name, data_config.dir, seed)
    if name == "mnist_5k":
        from exvae.data.sources import bundled

        parts = bundled.read()
    elif name == "glyphs":
        from exvae.data.sources import glyphs

        if data_config.num_images < 3:
            raise UserError(f"config.data.num_images={data_config.num_images} must be at least 3")
        parts = {"all": glyphs.generate(data_config.num_images, seed)}  # one seed names both drawings and split
    else:
        parts = _find_own(name, image_size=data_config.image_size, colour=data_config.colour)
    return splits.assign(parts, seed=seed)


def _find_own(name: str, *, image_size: int, colour: bool) -> dict[str, Split]:
    """The parts of npz:PATH or images:PATH."""
    kind, _, path = name.partition(":")
    if kind == "npz":
        from exvae.data.sources import npz

        return npz.read(Path(path).expanduser())
    from exvae.data.sources import images

    return images.find(Path(path).expanduser(), image_size=image_size, colour=colour)
