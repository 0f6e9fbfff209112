"""Streams of a CUDA device: a unit may be called on any, the host runs ahead, and updates have one of their own."""

from __future__ import annotations

import gc
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_cuda import SMALL, Model, train
from torch import Tensor

from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.gradients import store
from lightning_ptm.update.arithmetic import Arithmetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class OnSideStreams(Model):
    """Every other block on a stream of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = [torch.cuda.Stream() for _ in self.blocks]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        main = torch.cuda.current_stream()
        for number, (block, side) in enumerate(zip(self.blocks, self.sides, strict=True)):
            if number % 2 == 0:
                x = block(x)
                continue
            side.wait_stream(main)
            x.record_stream(side)
            with torch.cuda.stream(side):
                x = block(x)
            main.wait_stream(side)
            x.record_stream(main)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss


HOST: dict[str, Any] = {"offload_parameters": "host", "offload_optimizer": "host", **SMALL}
UNCHECKED: dict[str, Any] = {**HOST, "debug": {"poison": False}}
"""Without the search for writes to weights, which the host waits for."""


@pytest.mark.parametrize("where", ["activations", "host", "disk", "lock_free", "recompute"])
def test_units_on_streams_of_their_users_compute_the_same(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 10)
    settings: dict[str, Any] = {
        "activations": {"offload_activations": "host"},
        "host": HOST,
        "disk": {"offload_parameters": "disk", "offload_optimizer": "disk", "disk_path": str(tmp_path), **SMALL},
        "lock_free": {**HOST, "lock_free": {"max_staleness": 0}},
        "recompute": {**HOST, "recompute": "all", "offload_activations": "host"},
    }[where]
    losses, weights = train(**settings)
    on_side, after = train(model=OnSideStreams, **settings)
    assert torch.equal(losses, on_side)
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))


class Moves(Model):
    """Every other batch is computed on another stream."""

    def __init__(self) -> None:
        super().__init__()
        self.home, self.side = torch.cuda.current_stream(), torch.cuda.Stream()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self._go_to(self.side if batch_idx % 2 else self.home)
        batch.record_stream(torch.cuda.current_stream())

    def on_train_end(self) -> None:
        self._go_to(self.home)

    @staticmethod
    def _go_to(stream: torch.cuda.Stream) -> None:
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)


@pytest.mark.parametrize("homes", [{}, HOST], ids=["device", "host"])
def test_batches_on_streams_of_their_own_compute_the_same(homes: dict[str, Any]) -> None:
    losses, weights = train(**homes)
    moved, after = train(model=Moves, **homes)
    assert torch.equal(losses, moved)
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))


class LooksAside(Model):
    """At gradients, on a stream that nothing else ever waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.side = torch.cuda.Stream()
        self.sums: list[Tensor] = []

    def on_after_backward(self) -> None:
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            for parameter in self.parameters():
                assert parameter.grad is not None
                self.sums.append(parameter.grad.sum())

    def on_train_end(self) -> None:
        self.side.synchronize()
        found = torch.stack(self.sums).view(-1, len(list(self.parameters())))
        assert found.isfinite().all() and found.any(1).all()


def test_gradients_in_pages_may_be_looked_at_on_a_stream_that_nobody_waits_for(tmp_path: Path) -> None:
    disk: dict[str, Any] = {
        "offload_parameters": "disk",
        "offload_optimizer": "disk",
        "disk_path": str(tmp_path),
        **SMALL,
    }
    losses, weights = train("32-true", **disk)
    looked, after = train("32-true", model=LooksAside, **disk)
    assert torch.equal(losses, looked)
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))


class Breaks(Model):
    """Raises after the second backward pass of a step, whose gradients are on their way to sums in RAM."""

    def on_after_backward(self) -> None:
        if len(self.losses) == 2:
            raise ZeroDivisionError


def test_a_run_that_breaks_off_leaves_no_copy_of_gradients_under_way() -> None:
    """The device pages of a pending copy would be freed while it reads them."""
    try:
        train("32-true", model=Breaks, accumulate=2, **HOST)
    except ZeroDivisionError:
        broken = True
    assert broken
    gc.collect()  # here, not in a test that follows


fake: Any = sys.modules.get("fake_device")
on_fake_alone = pytest.mark.skipif(fake is None, reason="asks the fake device what the host has waited for")


class Counted(Model):
    """Notes what the thread that computes, and autograd's, wait for in forward and backward of the third step."""

    found: tuple[Any, ...] = ()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.before = fake.lib.fc_waits()

    def on_after_backward(self) -> None:
        if self.global_step == 2:
            beside = {thread.ident for thread in threading.enumerate() if thread is not threading.main_thread()}
            Counted.found += tuple(wait for wait in fake.host_waits(self.before) if wait.thread not in beside)


RUNS: dict[str, dict[str, Any]] = {
    "in RAM": {},
    "clipped": {"clip": 1.0},
    "with little device memory": {"device_memory": "6MiB"},
    "with activations in RAM": {"offload_activations": "host", "clip": 1.0},
    "recomputed": {"recompute": "all", "precision": "32-true"},
    "with a loss scale": {"precision": "16-mixed"},
    "lock-free": {"lock_free": {"max_staleness": 2}},
    "with masters on disk": {"offload_optimizer": "disk"},
}


@on_fake_alone
@pytest.mark.parametrize("run", RUNS)
def test_the_host_waits_for_nothing_inside_forward_and_backward(
    run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 10)
    Counted.found = ()
    settings = {**UNCHECKED, **RUNS[run]}
    if settings["offload_optimizer"] == "disk":
        settings["disk_path"] = str(tmp_path)
    train(model=Counted, **settings)
    assert [f"{wait.what} {wait.where}" for wait in Counted.found] == []


@on_fake_alone
def test_the_counter_finds_a_wait() -> None:
    class Waits(Counted):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            loss.item()
            return loss

    Counted.found = ()
    train(model=Waits, **UNCHECKED)
    assert [wait.what for wait in Counted.found] == ["value"]


@on_fake_alone
@pytest.mark.parametrize("where", ["in place", "in pages"])
def test_a_loss_scale_waits_for_the_device_once_a_step(where: str) -> None:
    """However many gradients there are to be looked at for inf and NaN."""
    before = fake.lib.fc_waits()
    train("16-mixed", accumulate=1 if where == "in place" else 2)
    steps = [wait for wait in fake.host_waits(before) if "(unscale)" in wait.where or "(all_finite)" in wait.where]
    assert len(steps) == 4


def test_updates_on_the_device_have_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each would wait for all of the backward pass that the host has queued by then."""
    seen: set[int] = set()
    update = Arithmetic.update

    def noted(self: Arithmetic, *args: Any, **kwargs: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        seen.add(torch.cuda.current_stream().cuda_stream)
        update(self, *args, **kwargs)

    monkeypatch.setattr(Arithmetic, "update", noted)
    train()
    assert len(seen) == 1
    assert torch.cuda.current_stream().cuda_stream not in seen


@on_fake_alone
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_gradients_that_are_added_up_in_ram_come_through_page_locked_memory(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU adds them: the thread of compute waits for those of earlier units, and the device goes on meanwhile."""
    monkeypatch.setattr(store, "UNITS_AHEAD", 1)  # the fake device has copied those of two units before by then
    Counted.found = ()
    losses, weights = train(precision, model=Counted, accumulate=2, **UNCHECKED)
    assert {wait.what for wait in Counted.found} == {"event"}
    waits = [wait.where for wait in Counted.found if "(done)" not in wait.where]  # those that have come already
    assert waits
    assert [where for where in waits if "limit_additions" not in where] == []
    plain, after = train(precision, accumulate=2, offload_parameters="device", offload_optimizer="host")
    assert torch.equal(losses, plain)
    assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True))
