"""Best-first search with lower bounds: the candidates with the least costs, of which few are computed.

I1: if no bound exceeds its candidate's cost, the costs that are found are those that computing all of them would find.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """Result of a search.

    Attributes:
        best: the candidates with the least costs, one of each group, cheapest first.
        proven: whether no candidate of another group can be cheaper than the last of `best`; False if the search ended early.
    """

    best: tuple[T, ...]
    proven: bool


def best_first(
    candidates: Sequence[T],
    bound: Callable[[T], float],
    cost: Callable[[T], float | None],
    *,
    group: Callable[[T], Hashable],
    wanted: int,
    goes_on: Callable[[], bool] = lambda: True,
) -> Found[T]:
    """Returns the candidates with the least costs.

    Args:
        bound: a lower bound of the cost, called once for each candidate.
        cost: called for a candidate only while no cost and no other bound is less than its bound. None: it is impossible.
        group: candidates of one group are alternatives, of which the cheapest counts.
        wanted: number of groups to find.
        goes_on: whether another cost may be computed.
    """
    # Of equal values costs are first, as no candidate with that bound can be cheaper, then earlier candidates.
    queue = [(bound(each), True, place) for place, each in enumerate(candidates)]
    heapq.heapify(queue)
    best: dict[Hashable, T] = {}
    proven = True
    while queue and len(best) < wanted:
        _, is_bound, place = heapq.heappop(queue)
        candidate = candidates[place]
        if group(candidate) in best:
            continue
        if not is_bound:
            best[group(candidate)] = candidate
        elif proven := goes_on():
            if (exact := cost(candidate)) is not None:
                heapq.heappush(queue, (exact, False, place))
        else:
            break
    for _, is_bound, place in sorted(queue):
        if not is_bound and len(best) < wanted:
            best.setdefault(group(candidates[place]), candidates[place])
    return Found(tuple(best.values()), proven)
