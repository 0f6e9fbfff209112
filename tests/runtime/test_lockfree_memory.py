"""RAM of lock-free updates, counted in pages; their gradients in pages of a real pool; several disks."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from kit.plain_loop import PlainLoop, TrainModule, make_trainer, tokens
from kit.stacks import WIDTH, Block, ScheduledStack, Stack
from lock_free_runs import WHERE, Gate, Watch, assert_all_applied, built, run
from torch import nn

from lightning_ptm import PageIOError
from lightning_ptm.config import Settings
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.disk import FileOps
from lightning_ptm.runtime.deciding.blueprint import Blueprint, Request
from lightning_ptm.runtime.deciding.decide import decide
from lightning_ptm.runtime.engine.engine import Engine
from lightning_ptm.runtime.gradients import store as gradient_store
from lightning_ptm.runtime.gradients.store import GradientPages
from lightning_ptm.runtime.machine import heap
from lightning_ptm.runtime.machine.heap import Freed, Heap
from lightning_ptm.runtime.machine.machine import Machine
from lightning_ptm.terms import Tier

PAGE = 64 << 10
IS_GLIBC = hasattr(ctypes.CDLL(None), "malloc_trim")
BATCHES = tokens(12)


def engine_of(strategy: object) -> Engine:
    return strategy.engine  # type: ignore[attr-defined,no-any-return]


def owners(engine: Engine, tier: Tier) -> Counter[str]:
    """Tensors of a tier by what they are for."""
    return Counter(
        " ".join(word for word in tensor.name.split() if not word.isdigit())
        for tensor in engine.allocator.live_tensors()
        if tensor.tier is tier
    )


def used_pages(engine: Engine, tier: Tier) -> int:
    return (engine.allocator.capacity_bytes(tier) - engine.allocator.free_bytes(tier)) // PAGE


def held_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes of gradients that wait, and that jobs have taken. The threads must stand still."""
    buffers = [flat.buffer for flat in engine.updates._buffering._flats]  # type: ignore[attr-defined]
    waiting = [contribution for buffer in buffers for contribution in buffer.waiting]
    taken = [buffer.applying for buffer in buffers if buffer.applying is not None]

    def size(contributions: Sequence[object]) -> int:
        tensors = [tensor for each in contributions for tensor in each.source._flat]  # type: ignore[attr-defined]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    return size(waiting), size(taken)


def test_pages_are_those_of_parameters_versions_and_chunks_in_flight(strategy_at) -> None:
    """RAM: 2 bytes a parameter, as many for gradients that wait however late they are, and 33 pages in flight."""
    gate = Gate()
    strategy = strategy_at("lock_free", lock_free={"max_staleness": 100}, debug={"poison": False})
    strategy.file_ops = gate
    seen: list[tuple[int, Counter[str], int, int]] = []

    def after(step: int) -> None:
        engine = engine_of(strategy)
        if step == 2:
            engine.drain()
            gate.open_.clear()
        if step > 2 and not gate.open_.is_set():
            engine.updates._buffering.counts()  # type: ignore[attr-defined]  # all that was handed over has arrived
            seen.append((used_pages(engine, Tier.DEVICE), owners(engine, Tier.DEVICE), *held_bytes(engine)))
        if step == 10:
            gate.open_.set()

    watch = Watch(after)
    module = run(strategy, built(), watch)
    assert_all_applied(watch.seen[-1][1], 12)
    gradients = 2 * sum(parameter.numel() for parameter in module.parameters())
    block = 2 * sum(parameter.numel() for parameter in module.blocks[0].parameters())  # type: ignore[union-attr,index]
    assert -(-block // PAGE) == 2 and len(seen) == 8
    for used, kinds, waiting, taken in seen:
        # A block's version takes two pages, the root's one. Four blocks are in the making at most, and one root.
        # Staging has eight chunks of three pages: parameters and two moments.
        assert kinds == {"flat parameters": 5, "version in the making": 4 + 1, "update staging torch.float32": 8 * 3}
        homes = -(-gradients // PAGE)
        assert homes <= used - (4 * 2 + 1 + 8 * 3) <= homes + 1  # one page more where flats do not meet in a page
        assert waiting <= gradients and taken <= gradients
    assert {waiting for _, _, waiting, _ in seen[1:]} == {gradients}  # so long as it was late, it did not grow
    assert len({used for used, _, _, _ in seen}) == 1


class Wide(nn.Module):
    """A language model's units, without any memory."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50304, width)
        self.blocks = nn.ModuleList(Attending(width) for _ in range(depth))


class Attending(Block):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.inside = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)


def drawn(depth: int, width: int) -> Blueprint:
    with torch.device("meta"):
        module = Wide(depth, width)
    request = Request(
        module,
        [torch.optim.AdamW(module.parameters())],
        Settings(lock_free=True, disk_path="/"),
        torch.bfloat16,
        True,
        CpuBackend(),
        False,
        False,
        False,
    )
    return decide(request, Machine(False, 0, 24 << 30, 1 << 40, 2, 1), 1)


@pytest.mark.parametrize(("depth", "width", "versions"), [(12, 768, 2 * 4 + 19), (24, 1024, 2 * 7 + 25)])
def test_at_real_sizes_at_most_64_pages_are_in_flight(depth: int, width: int, versions: int) -> None:
    """Pages have 4 MiB; models are GPT 124M and 355M. Larger units have larger versions: two of a unit's size always
    exist."""
    found = drawn(depth, width)
    assert found.lock_free is not None and found.lock_free.gradients == ()
    pages = sum(row.count * -(-row.numel * row.item_bytes // (4 << 20)) for row in found.lock_free.spares)
    assert pages == versions
    assert pages + 3 * found.staging_chunks <= 64


# -- gradients in pages -----------------------------------------------------------------------------------------------


class FivePages(ScheduledStack):
    """Blocks of width 128: five pages of 16-bit parameters, and as many of gradients."""

    def __init__(self) -> None:
        Stack.__init__(self, depth=3, make_block=lambda: Block(128), width=128)


def test_sets_of_several_pages_lie_in_a_row_and_apart(disk: Path) -> None:
    numel = 5 * PAGE // 2 - 100
    with Allocator(
        page_size=PAGE,
        backend=CpuBackend(),
        sizes={Tier.HOST: 24 * PAGE},
        disk_paths=[],
        poison=True,
    ) as allocator:
        made = [allocator.allocate("gradient", numel, torch.bfloat16, Tier.HOST) for _ in range(3)]
        supply = GradientPages(made)
        taken = [supply.take(numel, torch.bfloat16) for _ in made]
        frames = [frame for tensor in taken for frame in tensor.pages.frames]
        assert len(frames) == len(set(frames)) == 3 * 5
        for value, tensor in enumerate(taken):
            assert tensor.is_contiguous
            tensor.tensor().fill_(float(value))
        thread = threading.Thread(target=lambda: [supply.give_back(tensor) for tensor in taken])
        thread.start()
        again = [supply.take(numel, torch.bfloat16) for _ in made]
        thread.join()
        # The pages were not given up in between: what another user wrote is still there, and only there.
        assert sorted(int(tensor.tensor()[0]) for tensor in again) == [0, 1, 2]
        assert all(bool((tensor.tensor() == tensor.tensor()[0]).all()) for tensor in again)
        assert allocator.free_bytes(Tier.HOST) == (24 - 15) * PAGE


@pytest.mark.parametrize("accumulate", [1, 2])
def test_flats_of_several_pages_of_gradients_are_the_plain_loops_bits(strategy_at, accumulate) -> None:
    expected = PlainLoop(FivePages, accumulate=accumulate).run(BATCHES)
    strategy = strategy_at("lock_free_three_tiers", device_memory="3MiB")
    watch = Watch()
    module = run(strategy, built(FivePages), watch, accumulate_grad_batches=accumulate)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(module.losses, expected.losses, strict=True))
    assert_all_applied(watch.seen[-1][1], 12 // accumulate)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_set_of_gradient_pages_comes_back(strategy_at, clip) -> None:
    """Also those of gradients that were added to others while the disk served nothing."""
    gate = Gate()
    strategy = strategy_at(
        "lock_free_three_tiers", device_memory="3MiB", lock_free={"max_staleness": 4}, debug={"poison": False}
    )
    strategy.file_ops = gate
    counts: list[tuple[int, int, int]] = []

    def after(step: int) -> None:
        engine = engine_of(strategy)
        if step == 2:
            gate.open_.clear()
        if step == 5:
            gate.open_.set()
        if step >= 12:
            engine.drain()
            gradients = [flat.gradient for flats in engine.flats for flat in flats]
            (sets,) = {gradient.shard._supply.give_back.__self__ for gradient in gradients}
            free = [tensor for tensors in sets._free.values() for tensor in tensors]
            assert all(tensor.is_contiguous for tensor in free)
            kept = [gradient.shard.pages for gradient in gradients if gradient.shard.pages is not None]
            assert {id(tensor) for tensor in free}.isdisjoint(map(id, kept))
            counts.append((len(free), len(kept), owners(engine, Tier.HOST)["gradient"]))

    watch = Watch(after)
    run(strategy, built(FivePages), watch, gradient_clip_val=clip)
    assert_all_applied(watch.seen[-1][1], 12)
    assert counts and all(free + kept == total for free, kept, total in counts)
    assert len({total for _, _, total in counts}) == 1


# -- several disks ----------------------------------------------------------------------------------------------------


class CountedDisks(FileOps):
    """Notes how many bytes go to and come from each folder; a folder can be made to fail."""

    def __init__(self) -> None:
        self.folder_of: dict[int, str] = {}
        self.read: Counter[str] = Counter()
        self.written: Counter[str] = Counter()
        self.failing: str | None = None
        self._lock = threading.Lock()

    def open(self, path: str, flags: int, mode: int) -> int:
        file = super().open(path, flags, mode)
        self.folder_of[file] = path if flags & os.O_TMPFILE == os.O_TMPFILE else os.path.dirname(path)
        return file

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._count(self.read, fd, super().preadv, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return self._count(self.written, fd, super().pwritev, buffers, offset)

    def _count(
        self, counter: Counter[str], fd: int, call: Callable[..., int], buffers: Sequence[memoryview], offset: int
    ) -> int:
        if self.folder_of[fd] == self.failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        moved = call(fd, buffers, offset)
        with self._lock:
            counter[self.folder_of[fd]] += moved
        return moved


@pytest.fixture
def disks(tmp_path: Path) -> list[str]:
    folders = [tmp_path / name for name in ("first", "second", "third")]
    for folder in folders:
        folder.mkdir()
    return [str(folder) for folder in folders]


@pytest.mark.parametrize("where", WHERE)
def test_master_states_are_striped_over_several_disks(strategy_at, disks, where) -> None:
    counted = CountedDisks()
    strategy = strategy_at(where, disk_path=disks, debug={"poison": False})
    strategy.file_ops = counted
    module = run(strategy, built())
    expected = PlainLoop(ScheduledStack).run(BATCHES)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(module.losses, expected.losses, strict=True))
    for moved in (counted.read, counted.written):
        assert sorted(moved) == disks
        # Neighbouring pages lie on different disks, so none has a third more than its share.
        assert max(moved.values()) < 4 / 3 * sum(moved.values()) / len(disks)
    assert all(os.listdir(folder) == [] for folder in disks)


@pytest.mark.parametrize("staleness", [0, 3])
def test_a_disk_among_several_that_fails_is_named(strategy_at, disks, staleness) -> None:
    counted = CountedDisks()
    strategy = strategy_at(
        "lock_free", disk_path=disks, lock_free={"max_staleness": staleness}, debug={"poison": False}
    )
    strategy.file_ops = counted

    def after(step: int) -> None:
        if step == 3:
            counted.failing = disks[1]

    module = built()
    with pytest.raises(PageIOError, match=os.strerror(errno.EIO)) as caught:
        run(strategy, module, Watch(after))
    assert caught.value.path == disks[1] and disks[1] in str(caught.value)
    assert len(module.losses) <= 3 + staleness + 1
    assert all(os.listdir(folder) == [] for folder in disks)


# -- the heap ---------------------------------------------------------------------------------------------------------

MIB = 1 << 20


def resident_mib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) >> 10


def step() -> torch.Tensor:
    """200 MiB of activations, gone at its end, and something behind them that stays."""
    activations = [torch.ones(MIB, dtype=torch.uint8) for _ in range(200)]
    stays = torch.ones(1000)
    activations.clear()
    return stays


@pytest.mark.skipif(not IS_GLIBC, reason="needs glibc")
def test_freed_memory_is_kept_until_ram_is_short_and_from_then_on_goes_back(monkeypatch) -> None:
    """The setting is the process's, as in every run; the runs of other tests decide anew."""
    monkeypatch.setattr(heap, "_RESERVE_BYTES", 0)
    monkeypatch.setattr(heap, "_LOOK_S", 0)  # steps here follow each other at once
    kept = Heap(Freed.STAYS)
    held = [step()]
    before = resident_mib()
    kept.between_steps()
    assert before - resident_mib() < 20
    monkeypatch.setattr(heap, "_RESERVE_BYTES", 1 << 60)  # more than this machine has free
    kept.between_steps()
    low = resident_mib()
    assert before - low > 150
    # There is enough again: it does not go back and forth.
    monkeypatch.setattr(heap, "_RESERVE_BYTES", 0)
    held.append(step())
    kept.between_steps()
    assert resident_mib() - low < 50


def test_lock_free_gives_freed_memory_back_when_told(strategy_at) -> None:
    """Heap settings do not change the numbers."""
    losses = []
    for freed in ("keep", "return"):
        module: TrainModule = built()
        make_trainer(strategy_at("lock_free", tuning={"freed_memory": freed})).fit(module, BATCHES.loader())
        losses.append(module.losses)
    assert all(torch.equal(one, other) for one, other in zip(*losses, strict=True))


class Adapters(nn.Module):
    """One of two, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.adapters = nn.ModuleList(nn.Linear(WIDTH, 16 * WIDTH) for _ in range(2))
        self.down = nn.Linear(16 * WIDTH, WIDTH)
        self.used = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.adapters[self.used](x)))


class Alternating(Stack):
    """All blocks change the adapter after so many micro-batches."""

    def __init__(self, period: int) -> None:
        super().__init__(depth=12, make_block=Adapters)
        self.period = period

    def middle(self, x: torch.Tensor, index: int) -> torch.Tensor:
        for block in self.blocks:
            block.used = index // self.period % 2  # type: ignore[assignment]
        return super().middle(x, index)


@pytest.mark.slow_unless("4-settings0-options0")
@pytest.mark.parametrize(
    ("bound", "settings", "options"),
    [
        (4, {}, {}),
        pytest.param(16, {}, {}, marks=pytest.mark.slow),
        (16, {"device_memory": "auto"}, {}),  # gradients in `.grad`
        pytest.param(4, {}, {"gradient_clip_val": 1.0}, marks=pytest.mark.slow),
        pytest.param(4, {}, {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
    ],
)
def test_gradients_that_cannot_be_added_never_take_all_pages(
    strategy_at, monkeypatch, bound, settings, options
) -> None:
    """The gradients of each step are of other parameters than those that wait, in all blocks."""
    monkeypatch.setattr(gradient_store, "_TIMEOUT_S", 5.0)
    strategy = strategy_at(
        "lock_free_three_tiers",
        lock_free={"max_staleness": bound},
        debug={"poison": False},
        **{"device_memory": "8MiB", "host_memory": "256MiB", **settings},
    )
    most: list[int] = []

    def after(step: int) -> None:
        buffers = [flat.buffer for flat in engine_of(strategy).updates._buffering._flats]  # type: ignore[attr-defined]
        most.append(max(len(buffer.waiting) for buffer in buffers))

    torch.manual_seed(0)
    accumulate = options.get("accumulate_grad_batches", 1)
    module, watch = Alternating(accumulate), Watch(after)
    make_trainer(strategy, callbacks=[watch], **options).fit(module, tokens(8).loader())
    assert all(torch.isfinite(loss) for loss in module.losses)
    assert all(
        (audit.produced, audit.applied, audit.pending) == (8 // accumulate, 8 // accumulate, 0)
        for audit in watch.seen[-1][1]
    )
    assert max(most) <= 2
