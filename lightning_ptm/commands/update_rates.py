"""Rates of optimizer updates on this machine, measured with the updater itself: with all states in RAM, with disk transfers,
and in a thread concurrent with compute, with and without weight prediction (lock-free mode).

Owns, while it measures, pages in RAM and, for each path, an unnamed file. The optimizer is fused AdamW: 28 bytes per element
in one pass (a 16-bit gradient and three fp32 numbers are read, three fp32 numbers and a 16-bit copy are written).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec, build_layout
from lightning_ptm.terms import Tier
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.gradient_source import ParameterGradients
from lightning_ptm.update.shadow import GroupValues, ShadowOptimizer, snapshot
from lightning_ptm.update.state_encoding import ENCODINGS, Encoder, Encoding
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.update_job import JobHandle, UpdateJob
from lightning_ptm.update.updater import Updater
from lightning_ptm.update.weight_prediction import WeightPrediction

_ELEMENT_BYTES = 28
_PAGE_BYTES = 4 << 20
_STAGING_CHUNKS = 12
_FLATS = 4


@dataclass(frozen=True, slots=True)
class UpdateRates:
    """Rates of updates. Bytes are those of one pass of AdamW, 28 per element.

    Attributes:
        ram_bytes_per_s: with all states in RAM.
        disk_bytes_per_s: of the arithmetic alone while disk reads and writes go on; None without a disk.
        stream_bytes_per_s: of those reads and writes together, while there are any; None without a disk.
        chunk_s: seconds of the caller's thread per chunk, apart from arithmetic and waiting.
        beside_bytes_per_s: in a thread of its own, while the cores compute.
        beside_loss: seconds by which compute slows down per second of such arithmetic. Compute's cores work in lockstep, and
            what accompanies the arithmetic (transfers, the interpreter's lock) counts, too.
        learn_numel_per_s: elements per second of what weight prediction adds to the update.
        prediction_numel_per_s: elements per second to which a prediction is added.
        states_numel_per_s: by value of `optimizer_state_dtype`, elements of states decoded and encoded again per second.
    """

    ram_bytes_per_s: float
    disk_bytes_per_s: float | None
    stream_bytes_per_s: float | None
    chunk_s: float
    beside_bytes_per_s: float
    beside_loss: float
    learn_numel_per_s: float
    prediction_numel_per_s: float
    states_numel_per_s: Mapping[str, float]


def update_rates(
    paths: Sequence[Path], numel: int, seconds: float, cores: int, compute: Callable[[], object]
) -> UpdateRates:
    """Measures all rates of updates.

    Args:
        paths: folders of the disk tier; may be empty.
        numel: elements updated in one pass; more than a cache holds.
        seconds: approximate duration of each measurement.
        cores: number of cores for updates that run concurrently with compute.
        compute: the concurrent computation.
    """
    with _Bench((), numel) as bench:
        ram = bench.arithmetic_bytes_per_s(seconds)
        add = bench.prediction_numel_per_s(seconds)
    states = {}
    for word, encoding in ENCODINGS.items():
        with _Bench((), numel, encoding) as bench:
            states[word] = bench.states_numel_per_s(seconds)
    disk: float | None
    stream: float | None
    with _Bench(paths, numel) as bench:
        disk = bench.arithmetic_bytes_per_s(seconds)
        stream, chunk_s = bench.disk_bytes_per_s(), bench.chunk_s()
        plain, _ = bench.beside(seconds, cores, compute, predicts=False)
        learning, loss = bench.beside(seconds, cores, compute, predicts=True)
    learn_s = max(_ELEMENT_BYTES / learning - _ELEMENT_BYTES / plain, 1e-12)
    if not paths:
        disk = stream = None
    return UpdateRates(ram, disk, stream, chunk_s, plain, loss, 1.0 / learn_s, add, states)


class _Bench:
    """A few flats with master states on the paths' disks or, without paths, in RAM; optimizer states optionally encoded."""

    def __init__(self, paths: Sequence[Path], numel: int, encoding: type[Encoding] | None = None) -> None:
        each = numel // _FLATS
        units = [
            UnitSpec(f"unit {index}", (ParameterSpec(f"weight {index}", (each,), "bfloat16", 2, True, 0),))
            for index in range(_FLATS)
        ]
        layout = build_layout(units, page_size=_PAGE_BYTES, world_size=1)
        tier = Tier.DISK if paths else Tier.DEVICE
        states_bytes = (_FLATS * 3 * (4 * each // _PAGE_BYTES + 2)) * _PAGE_BYTES
        ram = _FLATS * 2 * (2 * each // _PAGE_BYTES + 2) * _PAGE_BYTES + 6 * _STAGING_CHUNKS * _PAGE_BYTES
        self._ends = ExitStack()
        self._beside_s: list[float] = []
        with ExitStack() as undo:
            self._allocator = undo.enter_context(
                Allocator(
                    page_size=_PAGE_BYTES,
                    backend=CpuBackend(),
                    sizes={Tier.DEVICE: ram + (0 if paths else states_bytes), Tier.DISK: states_bytes if paths else 0},
                    disk_paths=list(paths),
                )
            )
            optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(4))], lr=1e-6, fused=True)
            traits = probe(optimizer, dtype=torch.float32)
            self._traits = traits.encoded({slot.name: encoding for slot in traits.slots})
            self._shadow = ShadowOptimizer(optimizer, self._traits)
            self._hyper: GroupValues = snapshot(optimizer, self._traits)
            self.updater = Updater(self._allocator, staging=_STAGING_CHUNKS)
            undo.callback(self.updater.close)
            self._numel = each * _FLATS
            self._flats = []
            for flat in layout.flats:
                states = FlatStates.allocate(self._allocator, flat, 0, self._traits, tier, master_dtype=torch.float32)
                if not paths and states.master is not None:
                    states.master.tensor().normal_()
                target = self._allocator.allocate("target", flat.shard_numel, torch.bfloat16, Tier.DEVICE)
                self._flats.append((states, torch.randn(each).bfloat16(), target))
            self._pass()  # the first pass creates the moments
            self._ends = undo.pop_all()

    def __enter__(self) -> _Bench:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ends.close()

    def arithmetic_bytes_per_s(self, seconds: float) -> float:
        """Rate of passes in the caller's thread."""
        return self._rate(self._pass, seconds)

    def disk_bytes_per_s(self) -> float:
        """Rate of the disk transfers so far, reads and writes together."""
        found = self._allocator.disk_stats()
        return found.bytes / max(found.busy_s, 1e-9)

    def chunk_s(self) -> float:
        """Returns `UpdateRates.chunk_s`, measured by the passes of `arithmetic_bytes_per_s` before."""
        return max(median(self._beside_s), 1e-9)

    def beside(
        self, seconds: float, cores: int, compute: Callable[[], object], *, predicts: bool
    ) -> tuple[float, float]:
        """Measures `UpdateRates.beside_bytes_per_s` and `beside_loss`: updates in a thread while `compute` runs."""
        alone = _per_s(compute, seconds)
        self.updater.run_in_thread(cores)
        try:
            began, before_s, count = perf_counter(), self.updater.stats.arithmetic_s, 0
            passes = 0
            while perf_counter() - began < seconds or passes < 2:
                handles = self._submit(predicts=predicts)
                passes += 1
                while not all(handle.done() for handle in handles):
                    compute()
                    count += 1
            self.updater.drain()
            took_s = perf_counter() - began
            arithmetic_s = self.updater.stats.arithmetic_s - before_s
        finally:
            self.updater.stop()
        lost_s = max(took_s - count / alone, 0.0)
        rate = _ELEMENT_BYTES * self._numel * passes / max(arithmetic_s, 1e-9)
        return rate, max(lost_s / max(arithmetic_s, 1e-9), 0.01)

    def prediction_numel_per_s(self, seconds: float) -> float:
        """Elements per second to which a prediction is added, by the cores that compute."""
        states, gradient, target = self._flats[0]
        learned = WeightPrediction(states, self._hyper)
        self.updater.finish(self.updater.submit(self._job(states, gradient, target, learned)))
        source = ParameterGradients([gradient])
        job = self._job(states, gradient, target, None)
        return gradient.numel() * _per_s(lambda: learned.add_(target.tensor(), source, job.transform), seconds)

    def states_numel_per_s(self, seconds: float) -> float:
        """Elements of encoded states decoded and encoded again per second, chunk by chunk as in an update."""
        states, encoder = self._flats[0][0], Encoder()
        numel, room = states.flat.shard_numel, torch.empty(_PAGE_BYTES // 4)

        def code() -> None:
            for name, encoding in states.encodings.items():
                stored = states.slots[name].tensor()
                for start in range(0, numel, encoding.chunk_numel):
                    values = room.narrow(0, 0, min(encoding.chunk_numel, numel - start))
                    chunk = stored.narrow(0, *encoding.stretch(start, values.numel()))
                    encoder.decode(encoding, chunk, values)
                    encoder.encode_step(encoding, values, chunk, states, name, start, self._hyper.number)

        return len(states.encodings) * numel * _per_s(code, seconds)

    def _rate(self, work: Callable[[], None], seconds: float) -> float:
        found: list[float] = []
        began = perf_counter()
        while perf_counter() - began < seconds or len(found) < 3:
            before, started = replace(self.updater.stats), perf_counter()
            work()
            took_s, after = perf_counter() - started, self.updater.stats
            arithmetic_s = after.arithmetic_s - before.arithmetic_s
            found.append(arithmetic_s)
            waited_s = after.read_stall_s - before.read_stall_s + after.write_stall_s - before.write_stall_s
            self._beside_s.append((took_s - arithmetic_s - waited_s) / max(1, after.chunks - before.chunks))
        return _ELEMENT_BYTES * self._numel / max(median(found), 1e-9)

    def _pass(self) -> None:
        for handle in self._submit(predicts=False):
            self.updater.finish(handle)
        self.updater.drain()

    def _submit(self, *, predicts: bool) -> list[JobHandle]:
        return [
            self.updater.submit(
                self._job(states, gradient, target, WeightPrediction(states, self._hyper) if predicts else None)
            )
            for states, gradient, target in self._flats
        ]

    def _job(
        self, states: FlatStates, gradient: Tensor, target: PagedTensor, prediction: WeightPrediction | None
    ) -> UpdateJob:
        return UpdateJob(
            states,
            self._shadow,
            ParameterGradients([gradient]),
            target,
            self._hyper,
            fresh_target=prediction is not None,
            prediction=prediction,
        )


def _per_s(work: Callable[[], object], seconds: float) -> float:
    """Median calls per second."""
    work()
    found: list[float] = []
    began = perf_counter()
    while perf_counter() - began < seconds or len(found) < 3:
        started = perf_counter()
        work()
        found.append(perf_counter() - started)
    return 1.0 / max(median(found), 1e-9)
