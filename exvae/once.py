"""What is compiled for a config is compiled once in a process, however often a run is opened or gone on with."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import ml_collections

# All that a compiled function may read of a config: it is given no more, and whatever else changes makes no new one.
GROUPS = ("model", "prior", "retrieval", "objective", "optim", "eval")
_KEPT = []


def for_equal_configs(make: Callable) -> Callable:
    """make(config, ...) that hands out what it made before for the same parts of a config and equal other arguments."""
    kept = functools.lru_cache(maxsize=16)(make)

    @functools.wraps(make)
    def made(config: Any, *args: Any, **options: Any) -> Any:
        return kept(ml_collections.FrozenConfigDict({name: config[name] for name in GROUPS}), *args, **options)

    _KEPT.append(kept)
    return made


def forget() -> None:
    """Whatever was made: the next call makes it anew."""
    for kept in _KEPT:
        kept.cache_clear()
