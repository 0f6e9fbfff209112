"""`runtime.ranks.module_buffers` on two ranks that are threads: what is sent, and when nothing is. With training runs:
adversarial/ranks/test_buffers_in_training.py."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import RankError
from lightning_ptm.runtime.ranks import module_buffers
from lightning_ptm.runtime.ranks.module_buffers import ModuleBuffers

RANKS = 2
WAIT_S = 60


class Wire:
    """Messages between the ranks, in turn."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(RANKS, timeout=WAIT_S)
        self.brought: list[Any] = [None] * RANKS
        self.sent_bytes: list[int] = []
        """Bytes of each broadcast of a tensor."""

    def told(self, rank: int, value: Any) -> list[Any]:
        self.brought[rank] = value
        self.barrier.wait()
        all_of_them = list(self.brought)
        self.barrier.wait()
        return all_of_them


class Thread:
    """The part of a communicator that is used here."""

    def __init__(self, wire: Wire, rank: int) -> None:
        self.wire = wire
        self.rank = rank
        self.world_size = RANKS

    def all_reduce(self, values: Tensor, *, maximum: bool = False) -> Tensor:
        assert maximum
        return torch.stack(self.wire.told(self.rank, values.clone())).amax(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        given = self.wire.told(self.rank, tensor.clone())[source]
        tensor.copy_(given)
        if self.rank == 0:
            self.wire.sent_bytes.append(tensor.nbytes)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self.wire.told(self.rank, value)[source]


class Model(nn.Module):
    """Buffers of several dtypes, one for each rank's own use, and one that is none."""

    _ddp_params_and_buffers_to_ignore = ("inner.own",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.inner = nn.Module()
        self.inner.register_buffer("own", torch.zeros(3))
        self.inner.register_buffer("codes", torch.zeros(2, 3, dtype=torch.int16).t())
        self.inner.register_buffer("turned", torch.zeros(2, dtype=torch.complex64).conj())
        self.inner.register_buffer("empty", torch.zeros(0, 5))
        self.inner.register_buffer("none", None)
        self.inner.register_buffer("sparse", torch.eye(2).to_sparse())
        self.inner.register_buffer("meta", torch.zeros(2, device="meta"))


UNSENT = ("inner.own", "inner.sparse", "inner.meta")


class Ranks:
    """A model on each rank, equal in the beginning."""

    def __init__(self, *, trains: bool = True, build: Callable[[int], nn.Module] = lambda rank: Model()) -> None:
        self.wire = Wire()
        self.models = [build(rank) for rank in range(RANKS)]
        self.parts = [
            ModuleBuffers(model, Thread(self.wire, rank), trains=trains)  # type: ignore[arg-type]
            for rank, model in enumerate(self.models)
        ]

    def changed(self) -> list[bool]:
        return [part.changed() for part in self.parts]

    def follow(self) -> list[int]:
        """Bytes of each broadcast."""
        self.wire.sent_bytes.clear()
        with ThreadPoolExecutor(RANKS) as threads:
            for each in [threads.submit(part.follow_rank_0) for part in self.parts]:
                each.result(WAIT_S)
        return list(self.wire.sent_bytes)

    def assert_alike(self) -> None:
        first, second = (dict(model.named_buffers()) for model in self.models)
        for name in first:
            assert name in UNSENT or torch.equal(first[name], second[name]), name


NORM_BYTES = 4 * 4 + 4 * 4 + 8
INNER_BYTES = 6 * 2 + 2 * 8


def test_the_first_time_all_is_sent_and_then_nothing() -> None:
    ranks = Ranks()
    ranks.models[1].norm.running_mean.fill_(5.0)
    assert ranks.changed() == [True, True]
    assert ranks.follow() == [NORM_BYTES + INNER_BYTES]
    ranks.assert_alike()
    assert ranks.changed() == [False, False]
    assert ranks.follow() == []


CHANGES: dict[str, tuple[Callable[[nn.Module, float], Any], int]] = {
    "in place": (lambda model, value: model.norm.running_var.fill_(value), NORM_BYTES),
    "through .data": (lambda model, value: model.norm.running_var.data.fill_(value), NORM_BYTES),
    "through numpy": (lambda model, value: model.norm.running_var.numpy().fill(value), NORM_BYTES),
    "replaced": (lambda model, value: setattr(model.norm, "running_mean", torch.full((4,), value)), NORM_BYTES),
    "a scalar": (lambda model, value: model.norm.num_batches_tracked.fill_(int(value)), NORM_BYTES),
    "transposed": (lambda model, value: model.inner.codes.fill_(int(value)), INNER_BYTES),
    "conjugated": (lambda model, value: model.inner.turned.copy_(torch.full((2,), 1j * value)), INNER_BYTES),
}


@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize("how", list(CHANGES))
def test_a_change_is_seen_and_the_modules_buffers_are_rank_0s(how: str, who: int) -> None:
    ranks = Ranks()
    ranks.follow()
    change, size_bytes = CHANGES[how]
    change(ranks.models[who], 3.0)
    assert ranks.changed() == [rank == who for rank in range(RANKS)]
    assert ranks.follow() == [size_bytes]  # of that module alone
    ranks.assert_alike()
    plain = Model()
    if who == 0:
        change(plain, 3.0)
    expected, found = dict(plain.named_buffers()), dict(ranks.models[1].named_buffers())
    assert all(torch.equal(found[name], value) for name, value in expected.items() if name not in UNSENT)
    assert ranks.changed() == [False, False]


def test_what_is_on_a_gpu_is_always_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks()
    ranks.follow()
    # There is none here: one module's buffers are said to be on it.
    owns = [model.norm._buffers.values() for model in ranks.models]
    elsewhere = {id(buffer) for buffers in owns for buffer in buffers}
    monkeypatch.setattr(module_buffers, "in_ram", lambda buffer: id(buffer) not in elsewhere)
    for _ in range(2):
        assert ranks.changed() == [True, True]
        assert ranks.follow() == [NORM_BYTES]


def test_what_is_put_back_has_not_changed() -> None:
    ranks = Ranks()
    ranks.follow()
    ranks.models[1].norm.running_mean.fill_(3.0)
    ranks.models[1].norm.running_mean.fill_(0.0)
    assert ranks.changed() == [False, False]


def test_each_ranks_own_is_not_looked_at() -> None:
    ranks = Ranks()
    ranks.models[1].inner.own.fill_(9.0)
    ranks.follow()
    assert ranks.models[1].inner.own.tolist() == [9.0] * 3
    ranks.models[0].inner.own.fill_(8.0)
    assert ranks.changed() == [False, False]


def test_a_buffer_that_can_be_written_no_more_is_replaced() -> None:
    ranks = Ranks()
    ranks.follow()
    for rank, model in enumerate(ranks.models):
        with torch.inference_mode():
            model.norm.running_mean = torch.full((4,), rank + 1.0)
    ranks.follow()
    ranks.assert_alike()
    assert ranks.models[1].norm.running_mean.tolist() == [1.0] * 4


@pytest.mark.parametrize("trains", [False, True])
def test_changes_matter_when_they_are_due(trains: bool) -> None:
    ranks = Ranks(trains=trains)
    part = ranks.parts[0]
    assert part.changed() is trains
    part.iteration_begins(compare_next=True)
    assert part.changed()
    part.iteration_begins(compare_next=False)
    assert not part.changed()
    part.backward_outside(reduced=True)
    assert part.changed()
    part.backward_outside(reduced=False)
    assert not part.changed()


def wider(rank: int) -> nn.Module:
    model = Model()
    if rank == 1:
        model.inner.register_buffer("codes", torch.zeros(7))
    return model


def more(rank: int) -> nn.Module:
    model = Model()
    if rank == 1:
        model.register_buffer("mine", torch.zeros(2))
    return model


def fewer(rank: int) -> nn.Module:
    model = Model()
    if rank == 1:
        model.inner.turned = None
    return model


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (wider, r"\(here Module.codes: torch.float32 \[7\], which rank 0 has not\)"),
        (more, r"\(here Model.mine: torch.float32 \[2\], which rank 0 has not\)"),
        (fewer, "ranks have different buffers of modules, so .*; register the same buffers"),
    ],
)
def test_other_buffers_are_an_error_of_all_ranks(build: Callable[[int], nn.Module], says: str) -> None:
    ranks = Ranks(build=build)
    errors = []

    def follow(part: ModuleBuffers) -> None:
        with pytest.raises(RankError) as caught:
            part.follow_rank_0()
        errors.append((part, caught))

    with ThreadPoolExecutor(RANKS) as threads:
        for each in [threads.submit(follow, part) for part in ranks.parts]:
            each.result(WAIT_S)
    assert len(errors) == RANKS
    next(caught for part, caught in errors if part is ranks.parts[1]).match(says)


def test_a_model_without_buffers_sends_nothing() -> None:
    ranks = Ranks(build=lambda rank: nn.Linear(2, 2))
    assert ranks.changed() == [False, False]
    assert ranks.follow() == []


def test_modules_are_those_of_torch_in_its_order() -> None:
    shared = nn.BatchNorm1d(2)
    root = nn.Sequential(nn.Sequential(shared, nn.Linear(2, 2)), nn.ModuleList([nn.Sequential(nn.Identity(), shared)]))
    root.register_module("none", None)
    root[1].append(root[0])
    assert list(map(id, module_buffers._modules_in(root))) == list(map(id, root.modules()))
