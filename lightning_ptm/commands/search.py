"""Search of `plan` for the largest value of a model argument that fits.

Owns only the search; the caller determines whether a value fits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning_ptm.errors import ConfigError

_MOST = 1 << 24
"""Limit as a multiple of the first value, which nothing that takes memory can reach."""
_MOST_REFUSED = 256
"""Number of consecutive invalid values after which the search ends."""


def largest_value(first: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 up that fits, if all smaller ones fit, too; 0 if none does.

    Args:
        first: a guess; the closer, the fewer calls of `fits`.
        fits: may raise ConfigError for an invalid number, such as one that ranks cannot divide: it is skipped, unless it is
            the guess or a double of it.

    Raises:
        ConfigError: nothing is too large, or hardly any number is valid.
    """
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST * first:
            raise ConfigError(
                f"values up to {low} all fit, so this argument does not change the memory that is needed; name "
                "another argument, such as layers"
            )
    # From here on `low` fits (or is 0) and `high` does not. From above, by halves: sizes are right within a factor.
    while high - low > 1:
        nearest = _nearest(low, high, fits)
        if nearest is None:
            return low
        value, it_fits = nearest
        low, high = (value, high) if it_fits else (low, value)
    return low


def _nearest(low: int, high: int, fits: Callable[[int], bool]) -> tuple[int, bool] | None:
    """A valid number between the two, near their middle, and whether it fits; None if none is valid."""
    middle = (low + high) // 2
    for refused, value in enumerate(itertools.chain(range(middle, low, -1), range(middle + 1, high))):
        try:
            return value, fits(value)
        except ConfigError:
            if refused >= _MOST_REFUSED:
                raise
    return None


def with_argument(document: Mapping[str, Any], name: str, value: int | None, path: str | Path) -> dict[str, Any]:
    """A copy of a config whose model has `value` for its argument `name`; None leaves it unchanged.

    Raises:
        ConfigError: the config has no model argument of that name that is a whole number from 1 up.
    """
    model = document.get("model")
    arguments = _arguments(document)
    given = arguments.get(name)
    if not takes_argument(document, name):
        numbers = [each for each, held in arguments.items() if isinstance(held, int) and not isinstance(held, bool)]
        raise ConfigError(
            f"largest is {name!r}, and the model of {path} has {f'{given!r} for it' if name in arguments else 'none'}; "
            f"name an argument that is a whole number there ({', '.join(numbers) or 'there is none'})"
        )
    if value is not None:
        arguments[name] = value
    return {**document, "model": {**(model or {}), "init_args": arguments}}


def takes_argument(document: Mapping[str, Any], name: str) -> bool:
    """Whether a config has a model argument of that name that is a whole number from 1 up."""
    given = _arguments(document).get(name)
    return isinstance(given, int) and not isinstance(given, bool) and given >= 1


def _arguments(document: Mapping[str, Any]) -> dict[str, Any]:
    model = document.get("model")
    return dict(model.get("init_args") or {}) if isinstance(model, Mapping) else {}
