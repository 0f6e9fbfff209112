"""Policies of freed memory: which settings a run makes, and when. The effect: test_lockfree_memory.py."""

from __future__ import annotations

import subprocess
import sys

import pytest
from kit.plain_loop import make_trainer, tokens
from lock_free_runs import built

from lightning_ptm import CapacityError, ConfigError
from lightning_ptm.memory.memory_limit import MemoryLimit
from lightning_ptm.runtime.engine import engine
from lightning_ptm.runtime.machine import heap
from lightning_ptm.runtime.machine.heap import SETTING_UP, Freed, Heap

GIB = 1 << 30


class FakeCeiling(MemoryLimit):
    """One that leaves the process alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left: int | None = None
        self.unused_page_bytes = 0

    def put(self, left_bytes: int, *, unused_page_bytes: int = 0) -> None:
        self.left = left_bytes
        self.unused_page_bytes = unused_page_bytes

    def lift(self) -> None:
        self.left = None

    def left_bytes(self) -> int | None:
        return self.left

    def refused(self, error: BaseException) -> bool:
        return self.left is not None


class Library:
    """The C library's part and the machine's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.free_bytes = 8 * GIB
        self.looks = 0
        self.now_s = 0.0
        self.freed_resident_bytes = 0
        for name in ("end_settings", "trim"):
            monkeypatch.setattr(heap, name, lambda name=name: self.done.append(name))
        monkeypatch.setattr(heap, "give_freed_memory_back", self.give_back)
        monkeypatch.setattr(heap, "freed_resident_bytes", lambda unused: self.freed_resident_bytes)
        self.ceiling = FakeCeiling()
        monkeypatch.setattr(heap, "MemoryLimit", lambda: self.ceiling)
        monkeypatch.setattr(heap, "free_swap_bytes", lambda: 0)
        monkeypatch.setattr(heap, "keep_freed_memory", self.keep)
        monkeypatch.setattr(heap, "free_host_bytes", self.free)
        monkeypatch.setattr(heap, "monotonic", lambda: self.now_s)

    def keep(self, *, but_large: bool) -> None:
        self.done.append("keep_all_but_large" if but_large else "keep_freed_memory")

    def give_back(self, *, and_small: bool = False) -> None:
        self.done.append("give_small_back" if and_small else "give_freed_memory_back")

    def free(self) -> int:
        self.looks += 1
        return self.free_bytes

    def since(self) -> list[str]:
        done, self.done = self.done, []
        return done


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    return Library(monkeypatch)


def test_kept_while_there_is_room(library: Library) -> None:
    kept = Heap(Freed.STAYS)
    assert library.since() == ["keep_freed_memory"]
    for free_bytes in (8 * GIB, GIB):
        library.free_bytes = free_bytes
        kept.between_steps()
        assert library.since() == []
        library.now_s += 0.6
    assert library.looks == 3  # and one at the start


def test_looked_for_twice_a_second(library: Library) -> None:
    kept = Heap(Freed.STAYS)
    for _ in range(40):
        kept.between_steps()
        library.now_s += 0.1
    assert 7 <= library.looks <= 10


def test_given_back_from_the_first_step_on_that_finds_little(library: Library) -> None:
    kept = Heap(Freed.STAYS)
    library.since()
    library.free_bytes = GIB - 1
    kept.between_steps()
    assert library.since() == ["give_freed_memory_back", "trim"]
    library.free_bytes = 8 * GIB
    kept.between_steps()
    assert library.since() == ["trim"]


def test_never_kept(library: Library) -> None:
    returned = Heap(Freed.LEAVES)
    returned.between_steps()
    returned.between_steps()
    assert library.since() == ["give_freed_memory_back", "trim", "trim"]


def test_kept_but_for_large_blocks_until_there_is_no_room(library: Library) -> None:
    kept = Heap(Freed.SMALL_STAYS)
    kept.between_steps()
    assert library.since() == ["keep_all_but_large"]
    library.free_bytes, library.now_s = 0, 1.0
    kept.between_steps()
    assert library.since() == ["give_freed_memory_back", "trim"]


@pytest.mark.parametrize("freed", Freed)
def test_at_the_end_it_leaves_in_any_case(library: Library, freed: Freed) -> None:
    ended = Heap(freed)
    library.since()
    ended.steps_end()
    assert library.since() == ["trim"]


@pytest.mark.parametrize("freed", Freed)
def test_the_settings_end_with_the_run(library: Library, freed: Freed) -> None:
    """Else what the process frees later would stay in it for good."""
    ended = Heap(freed)
    library.since()
    ended.close()
    assert library.since() == ["end_settings", "trim"]


def test_a_run_ends_its_settings_and_so_does_one_that_is_not_set_up(
    library: Library, strategy_at, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trainer(strategy_at("ram")).fit(built(), tokens(2).loader())
    assert library.since()[-2:] == ["end_settings", "trim"]

    def full(*_: object, **__: object) -> None:
        raise CapacityError("no room")

    monkeypatch.setattr(engine, "RunPages", full)
    with pytest.raises(CapacityError):
        make_trainer(strategy_at("ram")).fit(built(), tokens(2).loader())
    assert library.since()[-2:] == ["end_settings", "trim"]


MIB = 1 << 20


def test_a_ceiling_is_where_ram_would_end(library: Library) -> None:
    """The ceiling is the free RAM less what pages will take, divided by the ranks that share it, less what is not
    counted."""
    library.free_bytes, pages = GIB, [0]
    watched = Heap(Freed.LEAVES, ranks_here=2, pending_page_bytes=lambda: pages[0])
    assert library.ceiling.left == 512 * MIB - 24 * MIB
    pages[0], library.now_s = 128 * MIB, 1.0
    watched.between_steps()
    assert library.ceiling.left == 384 * MIB - 24 * MIB
    library.free_bytes = 700 * MIB
    watched.within_step()
    assert library.ceiling.left == 360 * MIB  # looked at a moment ago
    library.now_s += 0.2
    watched.within_step()
    assert library.ceiling.left == (350 - 128 - 24) * MIB
    watched.close()
    assert library.ceiling.left is None


@pytest.mark.parametrize("freed", Freed)
def test_a_step_trims_a_heap_whose_freed_blocks_keep_much_ram(library: Library, freed: Freed) -> None:
    library.free_bytes = 2 * GIB
    stepping = Heap(freed)
    library.since()
    for freed_bytes, done in ((127 * MIB, []), (129 * MIB, ["give_small_back", "trim"])):
        library.freed_resident_bytes = freed_bytes
        library.now_s += 0.2
        stepping.within_step()
        assert library.since() == (done if freed is Freed.LEAVES else [])


def test_the_ceiling_knows_the_pages_without_ram(library: Library) -> None:
    library.free_bytes = GIB
    watched = Heap(Freed.LEAVES, pending_page_bytes=lambda: 400 * MIB)
    assert library.ceiling.unused_page_bytes == 400 * MIB
    watched.steps_end()
    assert library.ceiling.unused_page_bytes == 400 * MIB  # they stay without RAM, and take none


def test_at_the_end_pages_take_no_more_and_what_is_free_is_what_the_ceiling_leaves(library: Library) -> None:
    library.free_bytes = GIB
    watched = Heap(Freed.LEAVES, ranks_here=2, pending_page_bytes=lambda: 400 * MIB)
    assert library.ceiling.left == (512 - 400 - 24) * MIB
    assert watched.free_bytes() == 2 * 88 * MIB
    watched.steps_end()
    assert library.ceiling.left == (512 - 24) * MIB
    assert watched.free_bytes() == 2 * 488 * MIB
    library.free_bytes = 100 * MIB  # somebody has taken it
    assert watched.free_bytes() == 100 * MIB


def test_what_pages_will_take_is_not_free_and_counts_once(library: Library) -> None:
    for free_gib in (1, 64):  # with a ceiling and without
        library.free_bytes = free_gib * GIB
        watched = Heap(Freed.LEAVES, pending_page_bytes=lambda: 400 * MIB)
        margin = 0 if free_gib == 64 else 24 * MIB
        assert watched.free_bytes() == free_gib * GIB - 400 * MIB - margin


def test_nothing_keeps_trained_weights_from_the_disk(library: Library) -> None:
    library.free_bytes = GIB
    watched = Heap(Freed.LEAVES)
    watched.weights_are_written()
    watched.within_step()
    assert library.ceiling.left is None and watched.free_bytes() == GIB


def test_there_is_no_ceiling_where_there_is_room_or_old_pages_are_read(library: Library) -> None:
    library.free_bytes = 24 * GIB
    roomy = Heap(Freed.STAYS)
    assert library.ceiling.left is None
    library.free_bytes, library.now_s = 5 * GIB, 1.0
    roomy.between_steps()  # pages have come, or somebody else
    assert library.ceiling.left == 5 * GIB - 5 * GIB // 64
    library.free_bytes, library.now_s = 24 * GIB, 2.0
    roomy.between_steps()
    assert library.ceiling.left is None
    library.free_bytes = GIB
    Heap(Freed.STAYS, follows=True)
    assert library.ceiling.left is None


TORCHS = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 "
    "bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (RuntimeError(TORCHS), "2 MiB at once"),
        (MemoryError(), "more memory"),
        (RuntimeError("std::bad_alloc"), "more memory"),
        (OSError(12, "Cannot allocate memory"), "more memory"),
        (RuntimeError("could not create a memory object"), "more memory"),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("nothing to do with memory"), None),
        (KeyError("x"), None),
        (CapacityError("of pages"), None),
        (ConfigError("of a setting"), None),
    ],
)
@pytest.mark.parametrize("short", [False, True])
def test_what_a_ceiling_refuses_is_said(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, words: str | None, short: bool
) -> None:
    monkeypatch.setattr(heap, "free_host_bytes", lambda: GIB if short else 64 * GIB)
    watched = Heap(Freed.STAYS)
    try:
        with (
            pytest.raises(CapacityError if short and words else type(error)) as caught,
            watched.explain_failures("the backward pass"),
        ):
            raise error
        if short and words:
            assert f"the backward pass asked for {words}" in str(caught.value) and caught.value.__cause__ is error
            assert "lower the batch size" in str(caught.value)
        else:
            assert caught.value is error
    finally:
        watched.close()


def test_a_mapping_that_was_refused_is_said_as_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "free_host_bytes", lambda: GIB)
    watched = Heap(Freed.STAYS)
    try:
        with pytest.raises(CapacityError, match="setting up the run asked for"), watched.explain_failures(SETTING_UP):
            try:
                raise OSError(12, "Cannot allocate memory")
            except OSError as error:
                raise ConfigError("the system cannot map so much") from error
    finally:
        watched.close()


PEAK = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader
import lightning as L
from lightning_ptm import AngelPTMStrategy

class Model(L.LightningModule):
    'Logits of 98 MiB, a gradient of 49, and many small ones.'

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50304, 256)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(8))

    def training_step(self, batch, batch_idx):
        x = self.embedding(batch)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy((x @ self.embedding.weight.T).flatten(0, 1), batch.flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

torch.set_num_threads(1)
strategy = AngelPTMStrategy() if sys.argv[1] == "ours" else "auto"
trainer = L.Trainer(
    accelerator="cpu", devices=1, strategy=strategy, max_steps=6, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(torch.randint(0, 50304, (12, 256)), batch_size=2))
print(int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) // 1024)
"""


def peak_mib(side: str) -> int:
    """Returns the peak memory of a process that trains, from its start to its end."""
    done = subprocess.run([sys.executable, "-c", PEAK, side], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_in_ram_a_process_takes_no_more_than_a_single_devices() -> None:
    """A single device holds 12 bytes a parameter, gradients through the next forward, and activations, as this process
    does."""
    assert peak_mib("ours") <= 1.05 * peak_mib("single")
