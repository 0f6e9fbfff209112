"""A digest of a batch tells batches apart by value, whatever they are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import torch.distributed as dist

from lightning_ptm import RankError
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.trainer.same_batches import FIRST, SameBatches, digest, take_first_rank_s_values


@dataclasses.dataclass
class Record:
    tokens: torch.Tensor
    weight: float = 1.0


class Pair(NamedTuple):
    one: Any
    other: Any


class Moved:
    """As libraries' own batches are."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.itself = value, self

    def to(self, device: Any) -> Moved:
        return self


def numbers(value: float = 3.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor([[1, 2], [value, 4]], dtype=dtype)


SAME: dict[str, Callable[[], Any]] = {
    "tensor": numbers,
    "double": lambda: numbers(dtype=torch.float64),
    "sixteen bits": lambda: numbers(dtype=torch.bfloat16),
    "complex": lambda: numbers(dtype=torch.complex64),
    "conjugate": lambda: (numbers(dtype=torch.complex64) * (1 + 1j)).conj(),
    "another value": lambda: numbers(5.0),
    "another shape": lambda: numbers().reshape(4),
    "strided": lambda: numbers().t(),
    "sparse": lambda: numbers().to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "number": lambda: torch.tensor(2),
    "empty": lambda: torch.empty(0, 3),
    "mapping": lambda: {"a": numbers(), "b": [1, 2.5]},
    "other key": lambda: {"a": numbers(), "c": [1, 2.5]},
    "list": lambda: [numbers(), [1, 2]],
    "other nesting": lambda: [numbers(), 1, 2],
    "data class": lambda: Record(numbers()),
    "weight": lambda: Record(numbers(), 2.0),
    "named": lambda: Pair(numbers(), "text"),
    "text": lambda: Pair(numbers(), "other text"),
    "array": lambda: numpy.arange(6).reshape(2, 3),
    "array of other numbers": lambda: numpy.arange(6).reshape(2, 3) + 1,
    "moved": lambda: Moved(numbers()),
    "moved, of other numbers": lambda: Moved(numbers(9.0)),
    "bool": lambda: True,
    "int": lambda: 1,
    "float": lambda: 1.0,
    "nothing": lambda: None,
}


@pytest.mark.parametrize("name", SAME)
def test_equal_batches_have_equal_digests(name: str) -> None:
    assert digest(SAME[name]()) == digest(SAME[name]())
    assert 0 <= digest(SAME[name]()) < 1 << 63


def test_different_batches_have_different_digests() -> None:
    found = {digest(make()): name for name, make in SAME.items()}
    assert sorted(found.values()) == sorted(SAME)


def test_what_nobody_can_look_into_counts_by_its_class() -> None:
    assert digest([object(), iter([1])]) == digest([object(), iter([2])]) != digest([object(), 1])


def test_what_is_not_in_ram_counts_by_its_shape() -> None:
    on_device = [numbers().to("meta"), numbers()]
    assert digest(on_device, here_alone=True) == digest([numbers(9.0).to("meta"), numbers()], here_alone=True)
    assert digest(on_device, here_alone=True) != digest([numbers().to("meta"), numbers(9.0)], here_alone=True)
    assert digest(on_device, here_alone=True) != digest([numbers().reshape(4).to("meta"), numbers()], here_alone=True)
    assert digest([numbers()], here_alone=True) == digest([numbers()])


class Apart(CpuBackend):
    """A device with memory of its own."""

    has_own_memory = True


def told_of(batches: list[Any], *, moves: bool = True) -> list[str]:
    """Returns the digests that a group gets of batches that are moved to such a device, after the first."""
    told: list[str] = []
    same = SameBatches(None, "tensor_parallel_size=2", Apart(), told.append)  # type: ignore[arg-type]
    same._compared["train", 0] = FIRST
    torch.manual_seed(0)
    for index, batch in enumerate(batches, start=1):
        on_device = same.move(batch, lambda batch=batch: [each.to("meta") for each in batch])  # type: ignore[misc]
        same.check(on_device if moves else [each.to("meta") for each in batch], "train", index=index)
    return told


def test_a_batch_is_read_before_it_is_moved() -> None:
    told = told_of([[numbers()], [numbers(5.0)]])
    assert told == told_of([[numbers()], [numbers(5.0)]])
    assert told[1] != told_of([[numbers()], [numbers(6.0)]])[1]
    assert told[0].startswith("1 (train, loader 0; digest ")


def test_another_object_than_was_moved_counts_by_its_shape() -> None:
    """As a callback may have made it; what was moved meanwhile, by whom it may be, does not count."""
    assert told_of([[numbers()]], moves=False) == told_of([[numbers(5.0)]], moves=False)


def test_random_numbers_are_told_with_a_batch() -> None:
    first, second = told_of([[numbers()]]), told_of([[numbers()]])
    assert first == second
    told: list[str] = []
    same = SameBatches(None, "tensor_parallel_size=2", CpuBackend(), told.append)  # type: ignore[arg-type]
    same._compared["train", 0] = FIRST
    for _ in range(2):
        same.check([numbers()], "train", index=1)
        torch.rand(1)
    assert told[0] != told[1]


def test_a_rank_that_has_gone_without_a_word_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that the system has killed while it configured its optimizers."""

    class Group:
        def size(self) -> int:
            return 2

    def gone(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer\nand more")

    monkeypatch.setattr(dist, "all_gather_object", gone)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    with pytest.raises(
        RankError, match=r"tensor group of rank 3 has failed, or hangs, .* \(Connection closed by peer\)"
    ):
        take_first_rank_s_values(torch.nn.Linear(2, 2), Group(), CpuBackend())  # type: ignore[arg-type]
