"""Cores beside a device, on machines of /sys trees that are written here; threads are really bound."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_ptm.memory import accelerators
from lightning_ptm.memory.accelerators import CudaBackend
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.io import IoQueue
from lightning_ptm.memory.numa import cores_listed, cores_near, keep_to, kept_to
from lightning_ptm.memory.transfer import Transfer

HERE = "0000:dc:00.0"


def system(folder: Path, nodes: dict[int, str], device: str | None) -> Path:
    """A /sys with such nodes, by their lists of cores, and a device on the node that is named."""
    for node, cores in nodes.items():
        place = folder / f"devices/system/node/node{node}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cores + "\n")
    (folder / "devices/system/node/possible").write_text("0-1\n")
    if device is not None:
        place = folder / "bus/pci/devices" / HERE
        place.mkdir(parents=True)
        (place / "numa_node").write_text(device + "\n")
    return folder


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[int]]:
    """The cores that this thread may run on, as the system reports them."""
    cores = set(range(8))
    monkeypatch.setattr(os, "sched_getaffinity", lambda who: set(cores))
    yield cores


@pytest.mark.parametrize(
    ("nodes", "device", "may", "near"),
    [
        ({0: "0-3", 1: "4-7"}, "1", range(8), {4, 5, 6, 7}),
        ({0: "0-1,4-5", 1: "2-3,6-7"}, "0", range(8), {0, 1, 4, 5}),  # as with two threads a core
        ({0: "0-3", 1: "4-7"}, "1", (2, 3, 4, 5), {4, 5}),
        ({0: "0-3", 1: "4-7", 2: ""}, "1", range(8), {4, 5, 6, 7}),  # a node of memory alone
        ({0: "0-7"}, "0", range(8), None),  # one node
        ({0: "0-7"}, "-1", range(8), None),
        ({0: "0-3", 1: "4-7"}, "-1", range(8), None),  # the system does not know
        ({0: "0-3", 1: "4-7"}, None, range(8), None),  # not on this bus
        ({0: "0-3", 1: "4-7"}, "1", (4, 5), None),  # there already
        ({0: "0-3", 1: "4-7"}, "1", (0, 1), None),  # somebody has chosen otherwise
        ({0: "0-3", 1: "4-7"}, "1", (0, 1, 2, 4), None),
        ({}, "1", range(8), None),
    ],
)
def test_cores_beside_a_device(
    tmp_path: Path,
    allowed: set[int],
    nodes: dict[int, str],
    device: str | None,
    may: range | tuple[int, ...],
    near: set[int] | None,
) -> None:
    allowed.intersection_update(may)
    tmp_path.joinpath("devices/system/node").mkdir(parents=True)
    found = cores_near(HERE, system(tmp_path, nodes, device))
    assert found == near


def test_nothing_is_near_where_the_system_is_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cores_near(HERE, tmp_path / "none") is None
    tmp_path.joinpath("devices/system/node").mkdir(parents=True)
    monkeypatch.delattr(os, "sched_getaffinity")  # macOS, Windows
    assert cores_near(HERE, system(tmp_path, {0: "0", 1: "1"}, "0")) is None


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,5,8-9\n", {0, 1, 2, 5, 8, 9}), ("", set()), ("\n", set()), ("3", {3})]
)
def test_lists_of_cores(text: str, cores: set[int]) -> None:
    assert cores_listed(text) == cores


def here() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0))


several = pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores to choose from")


@several
def test_threads_keep_to_cores() -> None:
    before = here()
    one = frozenset([min(before)])
    seen: list[frozenset[int]] = []

    def work() -> None:
        keep_to(one)
        inner = threading.Thread(target=lambda: seen.append(here()))
        inner.start()
        inner.join()
        seen.append(here())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [one, one] and here() == before
    with pytest.raises(KeyError), kept_to(one):
        assert here() == one
        raise KeyError
    assert here() == before
    with kept_to(None):
        assert here() == before
    keep_to(frozenset([4095]))  # no such core: the system refuses
    assert here() == before


@dataclass(frozen=True)
class OneCore(CpuBackend):
    """A device beside the first of this process's cores."""

    cores: frozenset[int]

    def numa_cores(self) -> frozenset[int]:
        return self.cores


@dataclass(frozen=True)
class Looks:
    seen: list[frozenset[int]]

    def run(self, staging: object) -> None:
        self.seen.append(here())


@dataclass(frozen=True)
class LooksAtThreads:
    seen: list[int]

    def run(self, staging: object) -> None:
        self.seen.append(torch.get_num_threads())


def test_io_threads_copy_on_one_core() -> None:
    """Also where compute uses several: its own number stays."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    seen: list[int] = []
    queue = IoQueue(1, lambda page: 0, threads_per_lane=1, page_size=4096, backend=CpuBackend())
    try:
        transfer = Transfer(1)
        queue.submit([(0, LooksAtThreads(seen))], transfer.piece_finished)
        transfer.wait()
        assert seen == [1] and torch.get_num_threads() == 2
    finally:
        queue.close()
        torch.set_num_threads(before)


@several
def test_io_threads_keep_to_the_cores_beside_the_device() -> None:
    before, one, seen = here(), frozenset([min(here())]), []
    queue = IoQueue(1, lambda page: 0, threads_per_lane=1, page_size=4096, backend=OneCore(one), pin=False)
    try:
        transfer = Transfer(1)
        queue.submit([(0, Looks(seen))], transfer.piece_finished)
        transfer.wait()
    finally:
        queue.close()
    assert seen == [one] and here() == before


def test_ram_that_a_device_copies_from_is_committed_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    locked: list[frozenset[int]] = []
    before, one = here(), frozenset([min(here())])
    backend = CudaBackend(torch.device("cuda", 3))
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xDC, pci_device_id=0)
    monkeypatch.setattr(torch.get_device_module("cuda"), "get_device_properties", lambda device: properties)
    monkeypatch.setattr(accelerators, "cores_near", lambda address: asked.append(address) or one)
    monkeypatch.setattr(CudaBackend, "lock_pages", lambda self, *memory: locked.append(here()))
    monkeypatch.setattr(CudaBackend, "unlock_pages", lambda self, address: None)
    backend.host_region(4096, pin=False).close()
    assert asked == [] and locked == []
    backend.host_region(4096, pin=True).close()
    assert asked == [HERE] and locked == [one] and here() == before
    del properties.pci_bus_id
    assert backend.numa_cores() is None and asked == [HERE]
