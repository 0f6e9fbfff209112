"""What a case is: sides that are compared, and the figures that are read off their turns.

A case is a declaration. `runner.py` runs it, prints its figures and writes them to LOG.md; `tables.py` puts them into pages.

I1: whether a figure meets its bar is decided by `Figure.met` alone; printing, JSON and log only repeat it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from benchmarks.gpt import SHAPES, GPTShape, shape_of_numel
from benchmarks.memory_cap import memory_cap
from benchmarks.namespaces import two_namespaces
from benchmarks.race import Score, Side

SEED = 1234
MIB = 2**20
GIB = 2**30
MASTER_BYTES_PER_PARAMETER = 24
"""That a step with master states on disk moves: 12 read and 12 written, an fp32 parameter and two moments."""

# Freed activations stay mapped. glibc's default gives large ones back at each free, and page faults then cost seconds.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 * GIB)}
# The opposite: what is freed leaves the resident set at once, so that a peak is a peak of live bytes.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}

Scores = Mapping[str, Score]


@dataclass(frozen=True, slots=True)
class Figure:
    """One result. Without an `other`, ours alone. `limit` is the bar: the ratio has to be at least, or at most, so large."""

    name: str
    ours: float
    unit: str
    other: float | None = None
    ratio: float | None = None
    limit: float | None = None
    at_least: bool = True

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.limit is None or self.ratio is None:
            return None
        return self.ratio >= self.limit if self.at_least else self.ratio <= self.limit

    @property
    def bar(self) -> str:
        """The bar and whether it is met, as text."""
        if self.met is None:
            return "-"
        return f"{'>=' if self.at_least else '<='} {self.limit:.3g}, {'met' if self.met else 'missed'}"


@dataclass(frozen=True)
class Setup:
    """What a case makes its sides with.

    Attributes:
        folder: new and empty, on the disk that is measured.
        quick: tiny sizes, which only show that the case runs.
        cores: threads of a side that uses the whole machine.
        settings: of the strategy, in addition to the case's.
        ends: ends the memory control groups and networks of the sides.
    """

    folder: Path
    quick: bool
    cores: int
    settings: Mapping[str, object]
    ends: contextlib.ExitStack

    def shape(self, size: str, *, sequence: int | None = None) -> GPTShape:
        """Returns the GPT of a size, by name, or a tiny one."""
        shape = SHAPES["tiny" if self.quick else size]
        return shape if sequence is None else shape.with_sequence(min(sequence, shape.sequence))

    def shape_of(self, numel: float) -> GPTShape:
        """Returns a GPT with a number of parameters, or a small one."""
        return shape_of_numel(7e7 if self.quick else numel)

    def subfolder(self, name: str) -> str:
        """Returns a new folder in `folder`."""
        (self.folder / name).mkdir()
        return str(self.folder / name)

    def memory_cap(self, cap_bytes: int, name: str) -> str:
        """Returns the folder of a new memory control group."""
        return self.ends.enter_context(memory_cap(cap_bytes, f"_{name}"))

    def two_namespaces(self, rate: str) -> list[dict[str, str]]:
        """Returns two new network namespaces with a link of that rate."""
        return self.ends.enter_context(two_namespaces(rate))

    def ours(
        self,
        options: Mapping[str, object],
        settings: Mapping[str, object] | None = None,
        *,
        name: str = "ours",
        ranks: int = 1,
        threads: int | None = None,
        memory_group: str | None = None,
    ) -> Side:
        """Returns a side of this project's strategy; `settings` are those of AngelPTMStrategy."""
        given = {**(settings or {}), **self.settings}
        tuning = given.get("tuning") or {}
        assert isinstance(tuning, Mapping)
        given["tuning"] = {**tuning, "restore_weights": False}
        options = {"precision": "bf16-mixed", **options, "devices": ranks, "settings": given}
        return Side(name, "trainer", options, ranks=ranks, threads=threads or self.cores, memory_group=memory_group)

    def single_device(self, options: Mapping[str, object]) -> Side:
        """Returns a side of Lightning's own single-device strategy."""
        return Side("single", "trainer", {"precision": "bf16-mixed", **options}, threads=self.cores)

    def compute(self, options: Mapping[str, object], *, threads: int | None = None, recompute: bool = False) -> Side:
        """Returns a side of forward and backward alone, everything in RAM, no optimizer."""
        return Side(
            "compute", "plain", {**options, "update": False, "recompute": recompute}, threads=threads or self.cores
        )

    def disk(self, *, step_bytes: int, file_bytes: int) -> Side:
        """Returns a side of the disk alone: as many bytes read as written, `step_bytes` in all."""
        sizes = {"block_bytes": 4 * MIB, "step_bytes": step_bytes, "file_bytes": file_bytes}
        return Side("disk", "disk", {"folder": str(self.folder), **sizes})


def of_gpt(shape: GPTShape, *, batch: int) -> dict[str, object]:
    """Returns the options that every side's model takes."""
    return {"shape": asdict(shape), "batch": batch, "seed": SEED}


def renamed(side: Side, name: str, **options: object) -> Side:
    """Returns a side under another name, with other options."""
    return replace(side, name=name, options={**side.options, **options})


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison.

    Attributes:
        id: the name by which the command line, LOG.md and the docs know it.
        what: model, where its states are, batch.
        sides: makes the sides.
        figures: reads the figures off; sides may be missing if the command line chose some.
        tokens_per_step: of all ranks together; 0 where a step is no training step.
        repeats, steps, warmup, before, longer: as `Race.run` takes them.
        limit_s: seconds after which no repeat begins, once there are two.
    """

    id: str
    what: str
    sides: Callable[[Setup], Sequence[Side]]
    figures: Callable[[Scores], Sequence[Figure]]
    tokens_per_step: int = 0
    repeats: int = 5
    steps: int = 5
    warmup: int = 2
    before: Mapping[str, int] = field(default_factory=dict)
    longer: Mapping[str, int] = field(default_factory=dict)
    limit_s: float = 300.0


# --- Figures ----------------------------------------------------------------------------------------------------------


def speed(
    scores: Scores, other: str, *, tokens: int, limit: float | None = None, ours: str = "ours", name: str | None = None
) -> list[Figure]:
    """Tokens a second, ours over another side's; nothing if one of them did not run."""
    if not {ours, other} <= scores.keys():
        return []
    mine, theirs = (tokens / scores[side].step_s for side in (ours, other))
    return [Figure(name or f"speed over {other}", mine, "tokens/s", theirs, mine / theirs, limit)]


def step(
    scores: Scores, other: str, *, limit: float | None = None, ours: str = "ours", name: str | None = None
) -> list[Figure]:
    """Seconds of a step, ours over another side's; nothing if one of them did not run."""
    if not {ours, other} <= scores.keys():
        return []
    mine, theirs = (scores[side].step_s for side in (ours, other))
    return [Figure(name or f"step over {other}", mine, "s", theirs, mine / theirs, limit, at_least=False)]


def peak(
    scores: Scores, other: str, *, limit: float | None = None, ours: str = "ours", name: str | None = None
) -> list[Figure]:
    """Peak resident memory of the process, ours over another side's; nothing if one of them did not run."""
    if not {ours, other} <= scores.keys():
        return []
    mine, theirs = (scores[side].peak_rss_bytes / MIB for side in (ours, other))
    return [Figure(name or f"peak memory over {other}", mine, "MiB", theirs, mine / theirs, limit, at_least=False)]


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
