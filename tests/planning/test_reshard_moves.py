"""Every element that is wanted comes to its place once, in bounded rounds, whatever the two layouts are."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.planning.reshard_moves import Move, ShardRange, moves, rounds

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def laid(sizes: list[int], order: list[int], piece: int, ranks: int) -> list[ShardRange]:
    """Parameters end to end in that order, dealt out to ranks in pieces, as flats are; joined nowhere."""
    found, position = [], 0
    for parameter in order:
        first = 0
        while first < sizes[parameter]:
            turn, inside = divmod(position, piece)
            numel = min(sizes[parameter] - first, piece - inside)
            found.append(ShardRange(parameter, first, numel, turn % ranks, turn // ranks * piece + inside))
            first, position = first + numel, position + numel
        position += 3  # padding
    return sorted(found, key=lambda each: (each.rank, each.place))


def by_parameter(stretches: list[ShardRange]) -> dict[int, list[ShardRange]]:
    found: dict[int, list[ShardRange]] = {}
    for each in sorted(stretches, key=lambda each: each.first):
        found.setdefault(each.parameter, []).append(each)
    return found


def shards(stretches: list[ShardRange]) -> dict[tuple[int, int], tuple[int, int]]:
    """By rank and place, which element of which parameter is there."""
    return {
        (each.rank, each.place + at): (each.parameter, each.first + at)
        for each in stretches
        for at in range(each.numel)
    }


@settings(deadline=None)
@given(data=st.data(), sizes=SIZES, ranks=st.integers(1, 4), limit=st.integers(1, 30))
def test_all_that_is_wanted_comes_to_its_place_once(
    data: st.DataObject, sizes: list[int], ranks: int, limit: int
) -> None:
    names = list(range(len(sizes)))
    old = laid(sizes, data.draw(st.permutations(names)), data.draw(st.integers(1, 50)), ranks)
    chosen = data.draw(st.permutations(names))[: data.draw(st.integers(1, len(names)))]
    new = laid(sizes, chosen, data.draw(st.integers(1, 50)), ranks)
    before = shards(old)
    planned = list(moves(new, by_parameter(old)))
    found: dict[tuple[int, int], tuple[int, int]] = {}
    ends: Counter[int] = Counter()
    for each in rounds(planned, limit):
        sent, received = Counter[int](), Counter[int]()
        for move in each:
            sent[move.source] += move.numel
            received[move.target] += move.numel
            assert move.to >= ends[move.target], "writes go on from where they were"
            ends[move.target] = move.to + move.numel
            for at in range(move.numel):
                place = (move.target, move.to + at)
                assert place not in found
                found[place] = before[move.source, move.place + at]
        assert max(*sent.values(), *received.values()) <= limit
    assert found == shards(new)
    assert sum(move.numel for move in planned) == sum(each.numel for each in new)


def test_what_stays_on_its_rank_in_its_place_is_one_move() -> None:
    here = [ShardRange(7, 0, 100, 0, 5)]
    (move,) = moves(here, {7: here})
    assert move == Move(7, 0, 5, 0, 5, 100) and move.local


def test_of_what_nobody_holds_nothing_is_moved() -> None:
    assert not list(moves([ShardRange(1, 0, 4, 0, 0)], {2: [ShardRange(2, 0, 4, 0, 0)]}))
