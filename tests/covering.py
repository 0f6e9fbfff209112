"""Few of many cases, in which every two choices meet that meet in any.

A case is one choice of each of some axes, by name.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

Case = tuple[str, ...]


def pairs(case: Case) -> set[Any]:
    """Every two of its choices."""
    return set(itertools.combinations(enumerate(case), 2))


def few(cases: Sequence[Case], seed: int = 0) -> list[Case]:
    """Few of these in which every two choices meet that meet in any: greedily, the best of some drawn ones each time."""
    draw = random.Random(seed)
    missing = set().union(*map(pairs, cases))
    chosen: list[Case] = []
    while missing:
        wanted = min(missing)
        candidates = [case for case in draw.sample(cases, min(len(cases), 300)) if wanted in pairs(case)]
        candidates = candidates or [case for case in cases if wanted in pairs(case)]
        chosen.append(max(candidates, key=lambda case: len(pairs(case) & missing)))
        missing -= pairs(chosen[-1])
    return chosen
