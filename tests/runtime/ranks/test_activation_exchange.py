"""When ranks of a tensor group meet before they exchange: once behind each occasion, and wherever that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ptm.comm.deadlock_detector import DeadlockDetector
from lightning_ptm.errors import RankError
from lightning_ptm.planning.mesh import Axis
from lightning_ptm.runtime.ranks.activation_exchange import ActivationExchange

GROUP, SIZE = 3, 2


class World:
    """Stands for the group's communicator, for the meeting points and for the executor: notes what they are asked."""

    world_size = SIZE
    exchanged: Callable[[], tuple[int, Sequence[str]]]

    def __init__(self) -> None:
        self.occasions = 0
        self.notes: list[str] = []
        self.met: list[str] = []
        self.words: list[int] = []
        self.absent = False
        self.deadlock_detector = DeadlockDetector(None, "", 0)

    def meet_group(self, group: int, size: int, exchange: str) -> None:
        assert (group, size) == (GROUP, SIZE)
        if self.absent:
            raise RankError("not all of them come")
        self.notes.append("meet")
        self.met.append(exchange)

    def issue(self, collective: Any, value: Tensor, near: Any, word: int) -> Tensor:
        self.words.append(word)
        self.notes.append("exchange")
        return value


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def exchanges(world: World) -> ActivationExchange:
    anything: Any = world
    return ActivationExchange({Axis.TENSOR: anything}, GROUP, anything, anything)


def exchange(exchanges: ActivationExchange, name: str = "sum", value: Tensor | None = None, layer: str = "") -> None:
    anything: Any = None
    exchanges.issue(Axis.TENSOR, layer, name, anything, torch.zeros(2) if value is None else value)


def test_the_group_meets_before_its_first_exchange_behind_an_occasion(
    world: World, exchanges: ActivationExchange
) -> None:
    for _ in range(2):
        exchange(exchanges)
    world.occasions += 1
    for _ in range(2):
        exchange(exchanges)
    assert world.notes == ["meet", "exchange", "exchange"] * 2  # I1


def test_it_meets_again_where_a_rank_may_ask_alone(world: World, exchanges: ActivationExchange) -> None:
    exchange(exchanges)
    exchanges.meet_again()
    exchange(exchanges)
    exchange(exchanges)
    assert world.notes == ["meet", "exchange", "meet", "exchange", "exchange"]  # I2


def test_ranks_that_come_to_different_exchanges_bring_different_words(
    world: World, exchanges: ActivationExchange
) -> None:
    """By which the meeting tells them apart: number, kind, shape, dtype, and whether in a backward pass."""
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda grad: exchange(exchanges))
    for name, value in (("sum", None), ("gather", None), ("sum", torch.zeros(3)), ("sum", torch.zeros(2).half())):
        exchange(exchanges, name, value)
        exchanges.meet_again()
    weight.sum().backward()
    assert len(set(world.met)) == len(world.met) == 5
    without_number = {each.partition(" ")[2] for each in world.met}
    assert len(without_number) == 5


def words_of_the_next_meeting(layers: list[str]) -> str:
    world: Any = World()
    exchanges = ActivationExchange({Axis.TENSOR: world}, GROUP, world, world)
    for layer in ["first", *layers]:
        exchange(exchanges, layer=layer)
    world.occasions += 1
    exchange(exchanges, layer="last")
    return world.met[-1]


def test_a_meeting_tells_what_was_exchanged_since_the_one_before() -> None:
    """The meeting compares how many layers exchanged tensors of one shape, and in which order."""
    words = [words_of_the_next_meeting(layers) for layers in (["a", "b"], ["a", "b"], ["b", "a"], ["a"], ["a", "a"])]
    assert words[0] == words[1]
    assert len(set(words)) == 4


def test_each_exchange_has_a_word_for_all_so_far(world: World, exchanges: ActivationExchange) -> None:
    """By which ranks of one machine tell, without a meeting, that they are at different ones."""
    other = World()
    others: Any = other
    elsewhere = ActivationExchange({Axis.TENSOR: others}, GROUP, others, others)
    for ours, theirs in (("a", "a"), ("b", "c"), ("d", "d")):
        exchange(exchanges, layer=ours)
        exchange(elsewhere, layer=theirs)
    assert [one == another for one, another in zip(world.words, other.words, strict=True)] == [True, False, False]
    assert len(set(world.words)) == 3


def test_what_a_group_has_met_for_is_not_told_again(world: World, exchanges: ActivationExchange) -> None:
    for layer in ("a", "b"):
        exchange(exchanges, layer=layer)
    world.occasions += 1
    exchange(exchanges, layer="c")
    exchange(exchanges, layer="d")
    group, told = world.deadlock_detector.exchanged()
    assert group == GROUP
    assert [each.split()[3] for each in told] == ["c", "d"]


def of_batches(*batches: str) -> tuple[World, ActivationExchange]:
    world: Any = World()
    exchanges = ActivationExchange({Axis.TENSOR: world}, GROUP, world, world)
    exchange(exchanges, layer="first")
    for batch in batches:
        exchanges.computes(batch)
    exchange(exchanges, layer="last")
    return world, exchanges


def test_a_meeting_tells_which_batches_are_computed() -> None:
    """The group meets for the first exchange of each; of those of which nothing is exchanged, too, all are told."""
    found = [of_batches(*batches)[0] for batches in (["0 a"], ["0 b"], ["0 a", "1 c"], ["0 b", "1 c"], [])]
    assert [len(world.met) for world in found] == [2, 2, 2, 2, 1]
    assert len({world.met[-1] for world in found}) == 5
    assert of_batches("0 a")[0].met == found[0].met


def test_where_a_group_does_not_come_its_batch_is_among_what_is_told(
    world: World, exchanges: ActivationExchange
) -> None:
    exchange(exchanges, layer="a")
    for batch in map(str, range(3)):
        exchanges.computes(batch)
    world.absent = True
    with pytest.raises(RankError):
        exchange(exchanges, layer="b")
    _, told = world.deadlock_detector.exchanged()
    assert [each.split(" (")[0] for each in told] == ["the sum of a", "batch 2", "the sum of b"]


def test_nothing_is_exchanged_with_a_group_that_does_not_come(world: World, exchanges: ActivationExchange) -> None:
    world.absent = True
    with pytest.raises(RankError, match="not all of them come"):
        exchange(exchanges)
    assert world.notes == []
    world.absent = False
    exchange(exchanges)
    assert world.notes == ["meet", "exchange"]
