"""`offload_activations`: which saved tensors leave and return, by hand; whole runs on a CPU, where "host" is allowed too, so
that every number has been in the store and back; and what is refused."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.plain_loop import PlainLoop, fit, make_trainer, tokens
from kit.stacks import WIDTH, Block, ScheduledStack, Stack
from lightning.pytorch import Callback
from other_stream import OtherStream
from torch import Tensor, nn

from lightning_ptm import AngelPTMStrategy, CapacityError, ConfigError, PageIOError, UsageError
from lightning_ptm.memory.activation_buffers import ActivationMover, HostBuffers, HostStore
from lightning_ptm.memory.activation_disk import DiskStore, staging_bytes
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.memory.streams import ComputeStream, copy_streams
from lightning_ptm.planning.activation_choice import Handling
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.autograd.activation_policy import ActivationPolicy
from lightning_ptm.runtime.autograd.offload import Offload, SavedView
from lightning_ptm.runtime.deciding import decide
from lightning_ptm.terms import Tier

CPU = CpuBackend()
BATCHES = tokens(5)


# -- by hand --------------------------------------------------------------------------------------------------------------


class Memory(bytearray):
    """Memory whose end shows."""


def made(value: float, count: int = 64) -> tuple[Tensor, weakref.ref[Memory]]:
    memory = Memory(torch.full((count,), value).numpy().tobytes())
    return torch.frombuffer(memory, dtype=torch.float32), weakref.ref(memory)


@pytest.fixture
def taking() -> Any:
    buffers = HostBuffers(CPU, free_bytes=lambda: 1 << 40)
    module = nn.BatchNorm1d(100)
    mover = ActivationMover(CPU, HostStore(copy_streams(CPU), buffers))
    taken = Offload({Tier.HOST: mover}, CPU, ComputeStream(CPU), [module], lambda tensor: False, least_bytes=64)
    taken.begin_iteration()
    yield taken
    taken.close()


def call(taken: Offload, *tensors: Tensor) -> list[Any]:
    taken.begin("unit", taken.tier)
    packed = [taken.pack(tensor) for tensor in tensors]
    taken.end()
    return packed


def test_a_call_leaves_the_device_when_the_next_one_has_ended(taking: Offload) -> None:
    values, alive, packed = [], [], []
    for number in range(3):
        value, reference = made(float(number))
        packed += call(taking, value)
        values.append(value.clone())
        alive.append(reference)
        del value
    gc.collect()
    assert [reference() is None for reference in alive] == [True, True, False]
    # The last is where it was; the first read of it starts the way back of the call before.
    assert torch.equal(taking.unpack(packed[2]), values[2])
    assert [sent.away.where.value for sent in packed] == ["away", "coming", "leaving"]
    assert torch.equal(taking.unpack(packed[1]), values[1])
    assert [sent.away.where.value for sent in packed] == ["coming", "back", "leaving"]
    assert torch.equal(taking.unpack(packed[0]), values[0])


class Slow:
    """A store in RAM, as a disk is: a copy ends when the test says so, and then refers to its source no longer."""

    def __init__(self) -> None:
        self.ended = False

    def take(self, size_bytes: int) -> Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def write(self, source: Tensor, buffer: Tensor, name: str) -> Any:
        buffer.copy_(source)
        return SimpleNamespace(done=lambda: self.ended, order=lambda: None, synchronize=lambda: None)

    def read(self, buffer: Tensor, target: Tensor, name: str) -> Any:
        target.copy_(buffer)
        return SimpleNamespace(done=lambda: True, order=lambda: None, synchronize=lambda: None)

    def give(self, buffer: Tensor) -> None: ...

    check = give

    def close(self) -> None: ...


def in_short_ram(store: Any, left_bytes: Callable[[], int], **known: bool) -> Offload:
    movers = {Tier.DISK: ActivationMover(CPU, store)}
    return Offload(movers, CPU, ComputeStream(CPU), [], lambda _: False, least_bytes=64, left_bytes=left_bytes, **known)


def test_where_ram_is_short_a_tensor_that_only_waits_for_its_copy_is_freed_with_it() -> None:
    """Within the next call. What something else refers to stays known, so that a call which saves it again sends no copy."""
    store: Any = Slow()
    taken = in_short_ram(store, lambda: 0)
    taken.begin("first", Tier.DISK)
    (gone, gone_alive), (used, used_alive) = made(0.0), made(1.0)
    packed = [taken.pack(gone), taken.pack(used)]
    del gone
    taken.end()
    taken.begin("second", Tier.DISK)
    packed.append(taken.pack(torch.full((64,), 2.0)))
    assert gone_alive() is not None  # its copy has not ended
    store.ended = True
    packed.append(taken.pack(torch.full((64,), 3.0)))
    assert gone_alive() is None and used_alive() is not None
    assert [sent.away.where.value for sent in packed] == ["away", "leaving", "away", "leaving"]
    sent_bytes = taken.sent_bytes
    packed.append(taken.pack(used))
    assert taken.sent_bytes == sent_bytes and packed[4].away is packed[1].away
    taken.end()
    for sent, value in zip(packed, (0.0, 1.0, 2.0, 3.0, 1.0), strict=True):
        assert torch.equal(taken.unpack(sent), torch.full((64,), value))


def test_where_ram_is_short_each_read_prefetches_the_next_tensor_only() -> None:
    store: Any = Slow()
    store.ended = True
    left = [0]
    taken = in_short_ram(store, lambda: left[0])
    packed = []
    for number in range(3):
        packed += call(taken, *(torch.full((64,), float(number)) for _ in range(3)))
    call(taken, torch.ones(64))

    def places() -> str:
        return "".join(sent.away.where.value[0] for sent in packed)

    assert places() == "a" * 9
    assert torch.equal(taken.unpack(packed[8]), torch.full((64,), 2.0))
    assert places() == "aaaaaaacb"
    taken.unpack(packed[7])
    taken.unpack(packed[6])
    assert places() == "aaaaaabbb"
    left[0] = 2 * 3 * 64 * 4  # a call's bytes, and as much
    taken.unpack(packed[5])
    assert places() == "cccccbbbb"


@pytest.mark.parametrize("where", ["much memory", "a device"])
def test_elsewhere_a_tensor_stays_until_the_next_call_has_ended(taking: Offload, where: str) -> None:
    """On a device also if little is left, of which reads then take less."""
    store: Any = Slow()
    store.ended = True
    taking._movers[Tier.HOST]._store = store
    if where == "a device":
        taking = in_short_ram(store, lambda: 0, frees_early=False)
    value, alive = made(0.0)
    packed = call(taking, value, torch.ones(64))
    del value
    taking.begin("second", taking.tier)
    packed.append(taking.pack(torch.ones(64)))
    assert alive() is not None
    taking.end()
    assert alive() is None and [sent.away.where.value for sent in packed] == ["away", "away", "leaving"]
    taking.unpack(packed[2])
    assert [sent.away.where.value for sent in packed[:2]] == ["away" if where == "a device" else "coming"] * 2


def test_whatever_stream_saves_and_reads_copies_go_on_the_runs(
    taking: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = taking._stream = OtherStream()
    stream.watch(monkeypatch, taking._movers[Tier.HOST], "send", "bring", "storage")
    (sent,) = call(taking, torch.ones(64))
    assert torch.equal(taking.unpack(sent), torch.ones(64))
    assert set(stream.noted) == {("send", True), ("bring", True), ("storage", True)}


def test_views_of_one_storage_are_one_copy_and_keep_their_strides(taking: Offload) -> None:
    whole = torch.arange(240.0)
    views = [whole.view(4, 60)[:, 10:20], whole.view(4, 3, 20).transpose(0, 2), whole[7:9].expand(5, 2), whole]
    packed = call(taking, *views)
    call(taking, torch.ones(64))
    assert taking.sent_bytes == 240 * 4 + 64 * 4
    for view, sent in zip(views, packed, strict=True):
        back = taking.unpack(sent)
        assert torch.equal(back, view) and back.stride() == view.stride()
        assert back.storage_offset() == view.storage_offset() and back.data_ptr() != view.data_ptr()


def test_what_is_saved_again_after_a_change_goes_again(taking: Offload) -> None:
    value = torch.ones(64)
    taking.begin("unit", Tier.HOST)
    first = taking.pack(value)
    value.add_(1.0)
    second = taking.pack(value)
    taking.end()
    call(taking, torch.ones(32))
    assert torch.equal(taking.unpack(second), torch.full((64,), 2.0))
    with pytest.raises(UsageError, match="changed in place"):
        taking.unpack(first)


def test_what_stays(taking: Offload) -> None:
    parameter = nn.Parameter(torch.ones(100))
    module = nn.BatchNorm1d(100)
    stream = ComputeStream(CPU)
    taken = Offload(taking._movers, CPU, stream, [module], lambda tensor: tensor[0].item() == 7.0, least_bytes=64)
    taken.begin_iteration()
    assert module.running_mean is not None
    stays = [
        parameter,
        parameter.detach().requires_grad_(),
        module.running_mean[:20],
        torch.full((64,), 7.0),  # said to lie in pages
        torch.ones(15),  # small
        torch.ones(64, dtype=torch.complex64).conj(),
        torch.ones(8, 8).to_sparse(),
    ]
    assert all(kept is tensor for kept, tensor in zip(call(taken, *stays), stays, strict=True))
    outside = torch.ones(64)
    assert taken.pack(outside) is outside
    assert isinstance(call(taken, torch.ones(64))[0], SavedView)


# -- whole runs -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on a CPU are let do it, and with what tiny models save."""
    monkeypatch.setattr(decide, "_check_device_of_its_own", lambda machine: None)
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)


SENT: list[int] = []


class Telling(ScheduledStack):
    """Says how much has gone, in the end."""

    def on_train_batch_end(self, *_: Any) -> None:
        SENT.append(self.trainer.strategy.engine.offload.sent_bytes)  # type: ignore[attr-defined, union-attr]


HIDDEN = 2 * 4 * 16 * 4 * WIDTH
"""Bytes of one block's activations between its layers, in bf16, of a batch."""


@pytest.mark.slow_unless("three_tiers-host", "ram-disk", "three_tiers-disk", "tight-disk", "lock_free_three_tiers-disk")
@pytest.mark.parametrize("to", ["host", "disk"])
def test_numbers_are_those_of_a_plain_loop(anywhere: None, strategy_at: Any, tier: str, to: str) -> None:
    SENT.clear()
    ours = fit(Telling, BATCHES, strategy_at(tier, offload_activations=to, recompute="none"))
    ours.assert_equal(PlainLoop(ScheduledStack).run(BATCHES))
    # Of each block at least what GELU saves and what the second layer does, at each step.
    assert len(SENT) == len(BATCHES) and SENT[0] > 4 * 2 * HIDDEN and [SENT[0] * (n + 1) for n in range(5)] == SENT


@pytest.mark.diagonal
@pytest.mark.parametrize("recompute", ["all", "every 2nd"])
@pytest.mark.parametrize("where", ["ram", "three_tiers"])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_what_units_are_recomputed_from_goes_too(
    anywhere: None, strategy_at: Any, where: str, recompute: str, to: str
) -> None:
    SENT.clear()
    ours = fit(Telling, BATCHES, strategy_at(where, offload_activations=to, recompute=recompute))
    ours.assert_equal(PlainLoop(ScheduledStack).run(BATCHES))
    inputs = HIDDEN // 4
    assert SENT[0] == 4 * inputs if recompute == "all" else 4 * inputs < SENT[0] < 4 * 4 * HIDDEN


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(dropout=0.1), Block()
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.between(self.first(x))))  # type: ignore[no-any-return]


class Nested(Stack):
    def __init__(self) -> None:
        super().__init__(depth=2, make_block=Outer)


class Twice(Stack):
    """Each block is called twice, and one call's backward never comes."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        self.blocks[0](x)
        return x


class TwoPasses(Stack):
    """A backward pass inside of the step, which leaves the graph for another one."""

    def loss(self, batch: Any, index: int) -> Tensor | None:
        x = self.embedding(batch[:, :-1])
        loss = self.score(batch, self.middle(x, index))
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        return loss * (1 + gradient.detach().float().abs().sum())


@pytest.mark.diagonal
@pytest.mark.parametrize("build", [Nested, Twice, TwoPasses])
@pytest.mark.parametrize("where", ["ram", "three_tiers"])
@pytest.mark.parametrize("to", ["host", "disk"])
def test_shapes_of_modules_and_passes(anywhere: None, strategy_at: Any, where: str, build: Any, to: str) -> None:
    units = {"units": ["Outer", "Block"]} if build is Nested else {}
    ours = fit(build, BATCHES, strategy_at(where, offload_activations=to, **units), accumulate_grad_batches=2)
    ours.assert_equal(PlainLoop(build, accumulate=2).run(BATCHES))


def test_the_users_own_hooks_on_saved_tensors_come_first(anywhere: None, strategy_at: Any) -> None:
    class Moving(Telling):
        def loss(self, batch: Any, index: int) -> Tensor | None:
            with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), lambda tensor: tensor):
                return super().loss(batch, index)

    SENT.clear()
    fit(Moving, BATCHES, strategy_at("ram", offload_activations="host")).assert_equal(
        PlainLoop(ScheduledStack).run(BATCHES)
    )
    assert SENT[-1] == 0


class WithSparseBuffer(Telling):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sparse", torch.eye(3).to_sparse())


def test_a_buffer_without_plain_storage_is_no_activation(strategy_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)
    SENT.clear()
    make_trainer(strategy_at("ram", offload_activations="disk")).fit(WithSparseBuffer(), BATCHES.loader())
    assert SENT[-1] > 0


@pytest.mark.parametrize(
    "error", [PageIOError("full", path=Path("disk"), page=0, errno=errno.ENOSPC), ConfigError("gone")]
)
def test_a_full_disk_is_no_room(strategy_at: Any, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Where the run chooses, activations that the disk has no room for stay, also if its folder is gone."""

    def full(store: DiskStore, size_bytes: int) -> Any:
        raise error

    monkeypatch.setattr(offload, "LEAST_BYTES", 512)
    monkeypatch.setattr(DiskStore, "take", full)
    monkeypatch.setattr(ActivationPolicy, "call_begins", lambda policy, unit, _: Handling.DISK)
    SENT.clear()
    ours = fit(Telling, BATCHES, strategy_at("ram"))
    ours.assert_equal(PlainLoop(ScheduledStack).run(BATCHES))
    assert SENT[-1] == 0


def test_buffers_are_taken_once_and_given_up(anywhere: None, strategy_at: Any) -> None:
    totals: list[int] = []
    engines: list[Any] = []

    class Watching(ScheduledStack):
        def on_train_batch_end(self, *_: Any) -> None:
            engines.append(self.trainer.strategy.engine)  # type: ignore[attr-defined]
            totals.append(engines[-1].offload._movers[Tier.HOST]._store._buffers.total_bytes)

    make_trainer(strategy_at("ram", offload_activations="host")).fit(Watching(), BATCHES.loader())
    assert len(set(totals)) == 1 and totals[0] > 0
    gc.collect()
    assert engines[0].offload._movers[Tier.HOST]._store._buffers.total_bytes == 0


class Stores(Callback):
    """The bytes of pages of activations on disk, reserved and in use, after each step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        store = trainer.strategy.engine.offload._movers[Tier.DISK]._store
        self.seen.append((store.total_bytes, store.used_bytes))


class Undecided(ScheduledStack):
    """The second step raises after its forward, catches the error and returns no loss; the third returns no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            try:
                raise ValueError("in the middle")
            except ValueError:
                return None
        return None if batch_idx == 2 else loss


def test_graphs_without_a_backward_leave_no_page_on_disk_in_use(anywhere: None, strategy_at: Any) -> None:
    stores = Stores()
    fit(Undecided, BATCHES, strategy_at("three_tiers", offload_activations="disk"), callbacks=[stores])
    gc.collect()
    totals = {total for total, _ in stores.seen}
    assert len(stores.seen) == 5 and len(totals) == 1 and totals != {0}
    assert stores.seen[-1][1] == 0


@pytest.mark.parametrize("reading", [False, True])
def test_a_broken_disk_ends_the_run_with_its_name(
    anywhere: None, strategy_at: Any, disk: Path, monkeypatch: pytest.MonkeyPatch, reading: bool
) -> None:
    class Broken(FileOps):
        def preadv(self, *args: Any) -> int:
            if reading:
                raise OSError(errno.EIO, "scripted")
            return super().preadv(*args)

        def pwritev(self, *args: Any) -> int:
            if not reading:
                raise OSError(errno.EIO, "scripted")
            return super().pwritev(*args)

    strategy = strategy_at("ram", offload_activations="disk")
    strategy.file_ops = Broken()
    with pytest.raises(PageIOError, match=f"{'reading' if reading else 'writing'} page .*{disk}.*errno 5"):
        fit(ScheduledStack, BATCHES, strategy)


def test_a_full_disk_ends_the_run_with_what_to_do(anywhere: None, strategy_at: Any) -> None:
    with pytest.raises(CapacityError, match=r"take 3 MiB on disk .*leave 2 MiB to them.*raise disk_memory"):
        fit(ScheduledStack, BATCHES, strategy_at("ram", offload_activations="disk", disk_memory="2MiB"))


def test_staging_is_a_row_of_the_inventory(anywhere: None, strategy_at: Any) -> None:
    rows: list[Any] = []

    class Looking(Stores):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            rows.extend(trainer.strategy.engine.blueprint.inventory.of(What.ACTIVATIONS))

    fit(ScheduledStack, tokens(1), strategy_at("three_tiers", offload_activations="disk"), callbacks=[Looking()])
    assert [(row.tier, row.numel) for row in rows] == [(Tier.HOST, staging_bytes(1))]


# -- refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["ram", "three_tiers"])
def test_a_cpu_has_nothing_to_take_them_from(strategy_at: Any, where: str) -> None:
    with pytest.raises(ConfigError, match=r"computes on a CPU, whose activations are in RAM already .*recompute='all'"):
        fit(Stack, BATCHES, strategy_at(where, offload_activations="host"))


def test_recomputing_has_a_setting_of_its_own() -> None:
    with pytest.raises(
        ConfigError, match=r"offload_activations='recompute': use 'auto', 'none', 'host' or 'disk', and recompute='all'"
    ):
        AngelPTMStrategy(offload_activations="recompute")
    with pytest.raises(ConfigError, match=r"offload_activations='nvme': use 'auto', 'none', 'host' or 'disk'$"):
        AngelPTMStrategy(offload_activations="nvme")


def test_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigError, match=r"offload_activations='disk' with disk_path=None: .*; give disk_path="):
        AngelPTMStrategy(offload_activations="disk")
