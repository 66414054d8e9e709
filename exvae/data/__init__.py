"""Images as bytes: `load(config.data)` returns the splits of a named data set or of the user's own images."""

from __future__ import annotations

import difflib

import ml_collections
import numpy as np
from jaxtyping import UInt8

from exvae.data import decoding, registry, splits
from exvae.data.types import Dataset, Parts, Split
from exvae.errors import UserError

__all__ = ["Dataset", "Split", "check_name", "check_size", "join", "load", "load_exemplars", "names"]


def names() -> tuple[str, ...]:
    """The data sets that need no path. The others are `npz:PATH` and `images:PATH`."""
    return tuple(registry.SOURCES)


def load(data_config: ml_collections.ConfigDict, *, binarize: bool = True) -> Dataset:
    """Load `config.data.name`. Valid and test are binarized once, unless `binarize` is False.

    Train keeps its grey levels or colours: each training step binarizes its own batch, and exemplars are not binarized.
    """
    check_name(data_config.name)
    raw = splits.assign(_read(data_config.name, data_config), seed=data_config.split_seed)
    dataset = Dataset(**decoding.decode(vars(raw), memory_mib=data_config.memory_mib))
    return splits.binarize(dataset) if binarize else dataset


def load_exemplars(which: str, grey: Dataset, *, memory_mib: float = decoding.MEMORY_MIB) -> Split:
    """Load the images that `config.eval.exemplars` names: train, train+valid, npz:PATH or images:PATH."""
    if which == "train":
        return grey.train
    if which == "train+valid":
        return join(grey.train, grey.valid)
    height, _, channels = grey.train.images.shape[1:]
    parts = _read(which, ml_collections.ConfigDict({"image_size": height, "colour": channels == 3}))
    name = "all" if "all" in parts else "train"
    split = decoding.decode({name: parts[name]}, memory_mib=memory_mib)[name]
    check_size(split.images, grey.train.images.shape[1:], f"config.eval.exemplars={which}")
    return split


def join(*parts: Split) -> Split:
    """Concatenate splits. The result has labels if all parts have them."""
    known = [part.labels for part in parts if part.labels is not None]
    labels = np.concatenate(known) if len(known) == len(parts) else None
    return Split(decoding.concatenate([part.images for part in parts]), labels)


def check_size(images: UInt8[np.ndarray, "n H W C"], image_shape: tuple[int, ...], where: str) -> None:
    """Check that images have the size of the model."""
    if images.shape[1:] != tuple(image_shape):
        here, there = ("x".join(map(str, shape)) for shape in (images.shape[1:], image_shape))
        raise UserError(f"{where}: images of {here}, but the model is for {there}")


def check_name(name: str) -> None:
    """Raise a UserError with the nearest name if `name` is not a data set. No files are read."""
    kind, _, path = name.partition(":")
    if name in names() or (kind in registry.PATH_SOURCES and path):
        return
    allowed = [*names(), *(f"{kind}:PATH" for kind in registry.PATH_SOURCES)]
    heads = {entry.split(":")[0]: entry for entry in allowed}
    near = difflib.get_close_matches(name.split(":")[0].lower(), heads, n=1, cutoff=0.5)
    hint = f" (did you mean {heads[near[0]]}?)" if near else ""
    raise UserError(f"config.data.name={name} is unknown{hint}; allowed: {', '.join(allowed)}")


def _read(name: str, options: ml_collections.ConfigDict) -> Parts:
    """The parts that the source of this name returns. Their images may still be encoded."""
    kind, colon, path = name.partition(":")
    return (registry.PATH_SOURCES if colon else registry.SOURCES)[kind](options, path)
