"""The port to the device: the stand-ins of a CPU, who page-locks with which device current, and nobody goes around it."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.devices import on_cuda, on_device

import lightning_ptm.callbacks
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.memory.accelerators import AcceleratorBackend, CudaBackend
from lightning_ptm.memory.backend import (
    Backend,
    CpuBackend,
    CurrentStream,
    _makes_streams,
    backend_here,
    backend_of,
    device_has_own_memory,
    in_ram,
)
from lightning_ptm.memory.io import IoQueue, Staging
from lightning_ptm.memory.region import DeviceRegion, HostRegion
from lightning_ptm.memory.transfer import Transfer

PAGE = 1 << 16
PACKAGES = {"lightning_ptm": Path(lightning_ptm.__path__[0]), "callbacks": Path(lightning_ptm.callbacks.__path__[0])}


def sources() -> Iterator[tuple[str, str]]:
    for name, folder in PACKAGES.items():
        for path in sorted(folder.rglob("*.py")):
            yield f"{name}/{path.relative_to(folder)}", path.read_text()


def files_with(pattern: str) -> list[str]:
    return [name for name, text in sources() if re.search(pattern, text)]


def test_cuda_is_named_in_one_file() -> None:
    assert files_with(r"torch\.cuda\b|\bcudart\b|from torch import .*\bcuda\b") == [
        "lightning_ptm/memory/accelerators.py"
    ]


def test_nobody_else_asks_what_the_device_is() -> None:
    kinds = "cpu|cuda|xpu|mps|npu|hpu"
    asks = rf"\bis_(?:cuda|cpu)\b|[!=]=\s*[\"'](?:{kinds})[\"']|[\"'](?:{kinds})[\"']\s*[!=]="
    # Models use public names only, and whether Apex's optimizer suits their parameters is nothing that a run decides. What
    # stands for logits names the attributes that it answers itself.
    others = {"lightning_ptm/models/kernels.py", "lightning_ptm/parallel/logits.py"}
    assert set(files_with(asks)) <= {"lightning_ptm/memory/backend.py", *others}


def test_the_search_reaches_the_files() -> None:
    found = dict(sources())
    assert {
        "lightning_ptm/trainer/strategy.py",
        "lightning_ptm/runtime/engine/engine.py",
        "callbacks/page_monitor.py",
    } <= set(found)
    assert len(found) > 150


def test_a_device_names_its_backend() -> None:
    assert backend_of("cpu") == CpuBackend() == backend_of(torch.device("cpu"))
    assert (CpuBackend().name, CpuBackend().has_own_memory, CpuBackend().collectives) == ("cpu", False, "gloo")
    with pytest.raises(
        ConfigError, match=r"pages cannot be on meta devices: torch computes on cpu.*; choose one of these"
    ):
        backend_of("meta")


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, *, streams: bool = True) -> None:
    """torch answers as on a machine with such an accelerator, with nothing behind the answers."""
    there, made = torch.device(kind), iter(range(100))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: there)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: -1)
    monkeypatch.setattr(torch, "Stream", lambda device: next(made) if streams else -1)
    monkeypatch.setattr(torch, "Event", lambda device: SimpleNamespace(record=lambda stream: None))
    _makes_streams.cache_clear()


@pytest.fixture(autouse=True)
def forget_pretences() -> Iterator[None]:
    yield
    _makes_streams.cache_clear()


def test_torchs_accelerator_is_a_backend_whatever_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "xpu")
    second = backend_of(torch.device("xpu", 1))
    assert second == AcceleratorBackend(torch.device("xpu:1")) != backend_of("xpu:0")
    assert (second.name, second.has_own_memory, second.collectives) == ("xpu", True, "xccl")
    assert backend_here() == AcceleratorBackend(torch.device("xpu"))
    assert backend_here(1) == second
    with pytest.raises(ConfigError, match="pages cannot be on cuda devices: torch computes on cpu and xpu"):
        backend_of("cuda")


def test_cuda_has_its_own_and_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda"))
    second = backend_of(torch.device("cuda", 1))
    assert second == CudaBackend(torch.device("cuda:1")) != backend_of("cuda:0")
    assert (second.name, second.has_own_memory, second.collectives) == ("cuda", True, "nccl")
    assert second != AcceleratorBackend(torch.device("cuda:1"))


def test_a_device_without_streams_is_refused_and_its_machine_computes_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pretend(monkeypatch, "mps", streams=False)  # a new stream is the old one
    with pytest.raises(ConfigError, match=r"mps devices: torch has no streams for them, .*; use accelerator='cpu'"):
        backend_of("mps")
    assert backend_here() == CpuBackend()
    monkeypatch.undo()
    pretend(monkeypatch, "mps")
    monkeypatch.setattr(torch, "Stream", lambda device: torch.device("nothing"))  # raises
    with pytest.raises(ConfigError, match="no streams"):
        backend_of("mps")
    pretend(monkeypatch, "mps")

    def record(stream: object) -> None:
        raise NotImplementedError("no events")

    monkeypatch.setattr(torch, "Event", lambda device: SimpleNamespace(record=record))
    with pytest.raises(ConfigError, match="no streams"):
        backend_of("mps")


def test_collectives_that_nobody_has_registered_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"no library of collectives between meta devices.*; use devices=1"):
        AcceleratorBackend(torch.device("meta")).collectives  # noqa: B018


def test_kinds_of_devices_of_other_machines_are_those_that_torch_knows() -> None:
    assert [device_has_own_memory(kind) for kind in ("cpu", "cuda", "xpu")] == [False, True, True]
    for unknown in ("gpu", "cuda:0", ""):
        with pytest.raises(ConfigError, match=f"no devices of the kind '{unknown}'"):
            device_has_own_memory(unknown)


def test_work_of_a_cpu_has_ended_when_the_call_returns() -> None:
    backend: Backend = CpuBackend()
    stream = backend.stream()
    began = backend.mark(timed=True)
    stream.follow()
    stream.follow(began)
    with stream.entered():
        values = torch.arange(1000).sum()
    ended = backend.mark(timed=True)
    stream.join()
    ended.order()
    ended.synchronize()
    backend.synchronize()
    backend.make_current()
    backend.record_use(values)
    assert began.done()
    assert ended.done()
    assert 0 <= ended.seconds_since(began) < 60
    assert began.seconds_since(ended) <= 0


def test_a_cpus_memory_is_ram() -> None:
    backend: Backend = CpuBackend()
    regions = backend.host_region(PAGE, pin=True), backend.device_region(PAGE)
    for region in regions:
        assert isinstance(region, HostRegion)
        assert not region.pinned
        assert backend.holds(region.tensor)
        assert in_ram(region.tensor)
        region.close()
    assert not in_ram(torch.empty(1, device="meta"))
    assert not backend.has_own_memory
    assert backend.free_bytes() == 0
    before = backend.bytes_outside_region(0)
    kept = torch.ones(10 << 20, dtype=torch.uint8)
    assert backend.bytes_outside_region(5) - before in (0, *range(kept.numel(), kept.numel() + PAGE))  # 0: not glibc
    assert backend.random_state() is None
    assert backend.count() == 1
    assert backend.description().endswith("CPU cores")


@dataclass
class Ledger:
    """Ledger of page-locks."""

    locked: dict[int, int] = field(default_factory=dict)
    refuses: bool = False

    def lock_pages(self, address: int, size_bytes: int) -> None:
        if self.refuses:
            raise ConfigError(f"no {size_bytes} bytes")
        self.locked[address] = size_bytes

    def unlock_pages(self, address: int) -> None:
        del self.locked[address]


def test_a_region_is_unlocked_once() -> None:
    ledger = Ledger()
    region = HostRegion(2 * PAGE, lock=ledger)
    assert ledger.locked == {region.tensor.data_ptr(): 2 * PAGE}
    assert region.pinned
    region.close()
    region.close()
    assert ledger.locked == {}
    assert not region.pinned
    assert not HostRegion(0, lock=ledger).pinned
    with pytest.raises(ConfigError, match=f"no {PAGE} bytes"):
        HostRegion(PAGE, lock=Ledger(refuses=True))


@dataclass(frozen=True)
class Watched(CpuBackend):
    """Tells which thread came when."""

    told: list[tuple[int, str]] = field(default_factory=list)

    def make_current(self) -> None:
        self.told.append((threading.get_ident(), "current"))

    def host_region(self, size_bytes: int, *, pin: bool) -> HostRegion:
        self.told.append((threading.get_ident(), f"region, pin={pin}"))
        return HostRegion(size_bytes)


@dataclass(frozen=True)
class Bounces:
    """A job that needs staging; all threads have one before any ends."""

    together: threading.Barrier

    def run(self, staging: Staging) -> None:
        self.together.wait(30)
        assert staging.region.tensor.numel() > PAGE


def test_io_threads_take_the_ranks_device_before_they_page_lock() -> None:
    watched, threads = Watched(), 4
    together = threading.Barrier(threads)
    queue = IoQueue(2, lambda page: page % 2, threads_per_lane=2, page_size=PAGE, backend=watched, pin=True)
    try:
        transfer = Transfer(threads)
        queue.submit([(lane, Bounces(together)) for lane in (0, 0, 1, 1)], transfer.piece_finished)
        transfer.wait()
    finally:
        queue.close()
    threads_seen = {ident for ident, _ in watched.told}
    assert len(threads_seen) == threads
    assert threading.get_ident() not in threads_seen
    for ident in threads_seen:
        assert [what for who, what in watched.told if who == ident] == ["current", "region, pin=True"]


def test_the_stand_in_of_a_stream_waits_for_marks() -> None:
    """The stand-in carries copies within a device: they keep the order of the current stream, and of the marks that
    they follow."""
    orders: list[str] = []

    class Told:
        def order(self) -> None:
            orders.append("ordered")

    stream = CurrentStream()
    stream.follow()
    assert orders == []
    stream.follow(Told())  # type: ignore[arg-type]
    assert orders == ["ordered"]


@pytest.fixture
def last() -> Backend:
    """The last device of the machine: with several, not the one that threads begin with."""
    return backend_here(torch.accelerator.device_count() - 1)


@pytest.mark.gpu
@on_device
def test_a_thread_has_the_device_that_it_was_given(last: Backend) -> None:
    seen: list[int] = []

    def work() -> None:
        last.make_current()
        seen.append(torch.accelerator.current_device_index())

    before = torch.accelerator.current_device_index()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [last.device.index]
    assert torch.accelerator.current_device_index() == before


@pytest.mark.gpu
@on_device
def test_streams_follow_and_are_joined(last: Backend) -> None:
    stream = last.stream()
    source = torch.zeros(1 << 20, device=last.device)
    target = torch.empty_like(source)
    last.synchronize()
    began = last.mark(timed=True)
    source.fill_(3.0)
    stream.follow()
    with stream.entered():
        target.copy_(source, non_blocking=True)
        copied = last.mark(timed=True)
    copied.order()
    last.record_use(target)
    result = target + 1
    stream.join()
    last.synchronize()
    assert copied.done()
    assert copied.seconds_since(began) >= 0
    assert result.eq(4.0).all()


@pytest.mark.gpu
@on_device
def test_memory_and_random_numbers_of_a_device(last: Backend) -> None:
    beside = last.bytes_outside_region(0)
    free = last.free_bytes()
    region = last.device_region(64 << 20)
    assert last.holds(region.tensor)
    assert not in_ram(region.tensor)
    assert last.free_bytes() <= free
    assert 0 <= last.bytes_outside_region(64 << 20) - beside <= 2 << 20  # and a block, and torch's rounding
    region.close()
    locked = last.host_region(PAGE, pin=True)
    assert locked.pinned
    assert in_ram(locked.tensor)
    locked.close()
    state = last.random_state()
    assert state is not None
    first = torch.rand(5, device=last.device)
    last.set_random_state(state)
    assert torch.equal(torch.rand(5, device=last.device), first)
    assert last.count() == torch.accelerator.device_count()


@pytest.mark.gpu
@on_device
def test_streams_have_an_order_of_their_own_in_each_thread(last: Backend) -> None:
    """One stream is entered by two threads at once, and again inside of itself; each has its own back behind that."""
    last.make_current()
    stream, before = last.stream(), last.current_stream()
    both = threading.Barrier(2)
    found: list[bool] = []

    def enter() -> None:
        last.make_current()
        own = last.current_stream()
        with stream.entered():
            both.wait(30)
            found.append(last.current_stream() == stream)
            both.wait(30)
        found.append(last.current_stream() == own)

    thread = threading.Thread(target=enter)
    thread.start()
    with stream.entered(), stream.entered():
        both.wait(30)
        found.append(last.current_stream() == stream)
        both.wait(30)
    thread.join()
    found.append(last.current_stream() == before != stream)
    assert found == [True] * 4


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("size", [0, 1, 4096, PAGE, 3 * PAGE + 7])
def test_a_page_locked_region_has_its_bytes_in_ram(last: Backend, size: int) -> None:
    region = last.host_region(size, pin=True)
    assert region.tensor.numel() == len(region.memory) == size
    assert region.pinned == (size > 0)
    if size:
        assert region.tensor.is_pinned()
        assert region.tensor.data_ptr() % 4096 == 0
        region.memory[-1] = 7
        assert region.tensor[-1] == 7
    kept = region.tensor
    region.close()
    region.close()
    assert not region.pinned
    assert kept.numel() == 0 or kept[-1] == 7  # the memory lives with its last view


@pytest.mark.gpu
@pytest.mark.cuda
@on_cuda
def test_the_host_does_not_spin_while_it_waits_for_a_mark(last: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that spins is one that the CPU's updates lack."""
    made: list[dict[str, bool]] = []
    event = torch.cuda.Event

    def noted(**how: bool) -> torch.cuda.Event:
        made.append(how)
        return event(**how)

    monkeypatch.setattr(torch.cuda, "Event", noted)
    last.mark().synchronize()
    last.mark(timed=True).synchronize()
    assert [how["blocking"] for how in made] == [True, True]


@pytest.mark.gpu
@pytest.mark.cuda
@on_cuda
def test_page_locking_that_fails_leaves_no_error_behind(last: CudaBackend) -> None:
    """The runtime would tell of it at the next launch of whoever launches a kernel."""
    region = last.host_region(PAGE, pin=True)
    with pytest.raises(ConfigError, match=f"CUDA could not page-lock {PAGE} bytes"):
        last.lock_pages(region.tensor.data_ptr(), PAGE)
    assert torch.ones(3, device=last.device).mul(2).sum().item() == 6
    region.close()


def test_pages_get_the_memory_of_what_is_only_in_reference_cycles(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    def empty(*args: Any, **options: Any) -> torch.Tensor:
        if alive() is not None:
            raise torch.OutOfMemoryError("out of memory")
        return whole(*args, **options)

    whole, alive = torch.empty, weakref.ref(Cycle())
    monkeypatch.setattr(torch, "empty", empty)
    assert DeviceRegion(PAGE, torch.device("cpu")).tensor.numel() == PAGE
    alive = weakref.ref(held := Cycle())
    with pytest.raises(CapacityError, match="has no room for it"):
        DeviceRegion(PAGE, torch.device("cpu"))
    del held
