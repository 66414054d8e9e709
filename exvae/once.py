"""A cache of compiled functions: in a process, equal configs share them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ml_collections import ConfigDict, FrozenConfigDict

P = ParamSpec("P")
T = TypeVar("T")

# The config groups that a compiled function may read. It gets no others, so changes elsewhere do not recompile it.
GROUPS = ("model", "prior", "retrieval", "objective", "optim", "eval")
_CLEAR: list[Callable[[], None]] = []


def for_equal_configs(make: Callable[Concatenate[ConfigDict, P], T]) -> Callable[Concatenate[ConfigDict, P], T]:
    """Cache make(config, ...) by `GROUPS` of the config and by the other arguments."""
    cache = functools.lru_cache(maxsize=16)(make)
    cached: Callable[..., T] = cache

    @functools.wraps(make)
    def made(config: ConfigDict, *args: P.args, **options: P.kwargs) -> T:
        return cached(FrozenConfigDict({name: config[name] for name in GROUPS}), *args, **options)

    _CLEAR.append(cache.cache_clear)
    return made


def forget() -> None:
    """Clear all caches, so that the next calls compile again."""
    for clear in _CLEAR:
        clear()
