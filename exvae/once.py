"""A cache of compiled functions: in a process, equal configs share them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from ml_collections import ConfigDict, FrozenConfigDict

P = ParamSpec("P")
T = TypeVar("T")
Make = Callable[Concatenate[ConfigDict, P], T]

_CLEAR: list[Callable[[], None]] = []


def for_equal_configs(*fields: str) -> Callable[[Make[P, T]], Make[P, T]]:
    """Cache make(config, ...) by some fields of the config and by the other arguments.

    Args:
      fields: the fields that the result depends on, such as "prior.name", or "prior" for all fields of a group. `make`
        gets no others, so it cannot read them by mistake, and changes elsewhere do not recompile its result.
    """

    def decorate(make: Make[P, T]) -> Make[P, T]:
        cache = functools.lru_cache(maxsize=16)(make)
        cached: Callable[..., T] = cache

        @functools.wraps(make)
        def made(config: ConfigDict, *args: P.args, **options: P.kwargs) -> T:
            return cached(_part(config, fields), *args, **options)

        _CLEAR.append(cache.cache_clear)
        return made

    return decorate


def _part(config: ConfigDict, fields: tuple[str, ...]) -> FrozenConfigDict:
    """A copy with these fields only. It does not change with the config."""
    part: dict[str, Any] = {}
    for field in fields:
        group, _, name = field.partition(".")
        part[group] = {**part.get(group, {}), name: config[group][name]} if name else config[group]
    return FrozenConfigDict(part)


def forget() -> None:
    """Clear all caches, so that the next calls compile again."""
    for clear in _CLEAR:
        clear()
