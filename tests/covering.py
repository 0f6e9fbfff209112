"""Few of many cases, in which every two choices (or so many as one asks for) meet that meet in any.

A case is one choice of each of some axes, by name.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

Case = tuple[str, ...]


def meetings(case: Case, together: int = 2) -> set[Any]:
    """Every `raise_on_all_ranks` of its choices."""
    return set(itertools.combinations(enumerate(case), together))


def few(cases: Sequence[Case], seed: int = 0, together: int = 2) -> list[Case]:
    """Few of these in which every `raise_on_all_ranks` choices meet that meet in any: greedily, the best of some
    drawn ones."""
    draw = random.Random(seed)
    found = {case: meetings(case, together) for case in cases}
    missing = set().union(*found.values())
    chosen: list[Case] = []
    while missing:
        wanted = min(missing)
        candidates = [case for case in draw.sample(cases, min(len(cases), 300)) if wanted in found[case]]
        candidates = candidates or [case for case in cases if wanted in found[case]]
        chosen.append(max(candidates, key=lambda case: len(found[case] & missing)))
        missing -= found[chosen[-1]]
    return chosen
