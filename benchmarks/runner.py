"""Runs cases: sides take turns in new processes, medians become figures, and figures a table, a file and rows of LOG.md.

I1: figures of quick runs, of some sides only, or with other settings are never written to LOG.md.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks import log
from benchmarks.case import GIB, MIB, Case, Figure, Scores, Setup, cores
from benchmarks.cases import CASES
from benchmarks.environments import of_commit
from benchmarks.race import TIMEOUT_S, Race, Side, SideError, SkipCase

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
VERSION_LIMIT = 1.03


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line asks for.

    Attributes:
        quick: tiny sizes and one short repeat.
        repeats: in place of each case's own.
        disk: folder on the disk to measure; by default beside the checkout (never /tmp, which is often memory).
        settings: of the strategy.
        sides: the only ones to run; all if empty.
        log: whether LOG.md is written.
    """

    quick: bool = False
    repeats: int | None = None
    disk: Path = ROOT.parent
    settings: Mapping[str, object] | None = None
    sides: Sequence[str] = ()
    log: bool = True

    @property
    def counts(self) -> bool:
        """Whether figures are those of the case as it is declared."""
        return self.log and not (self.quick or self.settings or self.sides)


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a figure was measured."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    torch: str
    commit: str
    date: str

    @classmethod
    def here(cls) -> Machine:
        """Returns this machine, now."""
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return cls(
            processor=(names or [platform.machine()])[0],
            cores=cores(),
            memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
            system=platform.platform(),
            torch=torch.__version__,
            commit=_commit(),
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
        )

    @property
    def title(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB"


def _commit() -> str:
    """The checkout's commit; with -dirty if it has changes other than those that measuring makes."""
    commit = _git("rev-parse", "--short=10", "HEAD") or "unknown"
    ours = [f":!{path}" for path in ("benchmarks/LOG.md", "README.md", "docs/measured.md")]
    return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *ours) else commit


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def run(cases: Sequence[Case], wanted: Wanted) -> bool:
    """Runs cases one after the other; returns whether all ran. Prints each one's table as soon as it is there."""
    began_s = time.perf_counter()
    failed = []
    for number, case in enumerate(cases, 1):
        print(f"[{number} of {len(cases)}, {time.perf_counter() - began_s:.0f} s] {case.id}: {case.what}", flush=True)
        try:
            run_case(case, wanted)
        except SkipCase as reason:
            print(f"SKIPPED {case.id}: {reason}\n", flush=True)
        except SideError as error:  # the other cases are worth having
            print(f"FAILED {case.id}: {error}\n", flush=True)
            failed.append(case.id)
    print(f"{len(cases)} cases in {time.perf_counter() - began_s:.0f} s{f'; failed: {failed}' if failed else ''}")
    return not failed


def run_case(case: Case, wanted: Wanted) -> Sequence[Figure]:
    """Runs one case; returns its figures.

    Raises:
        SkipCase: this machine cannot run it.
        SideError: a side failed.
    """
    machine, load = Machine.here(), os.getloadavg()[0]
    scores = _measured(case, wanted)
    beside = f"load {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end with the case's own"
    figures = case.figures(scores)
    _show_sides(case, scores)
    show_figures(figures)
    _write(case, wanted, machine, scores, figures, beside)
    return figures


def _measured(case: Case, wanted: Wanted) -> Scores:
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="lightning_ptm_benchmark_", dir=wanted.disk))
        setup = Setup(Path(folder), wanted.quick, cores(), wanted.settings or {}, ends)
        sides = list(case.sides(setup))
        if wanted.sides:
            names = [side.name for side in sides]
            if unknown := set(wanted.sides) - set(names):
                raise SystemExit(f"{case.id} has no side {', '.join(sorted(unknown))}; it has {', '.join(names)}")
            sides = [side for side in sides if side.name in wanted.sides]
        race = ends.enter_context(Race(sides, timeout_s=max(TIMEOUT_S, case.limit_s)))  # a turn may have one step
        if wanted.quick:
            before = {name: 1 for name in case.before if name in {side.name for side in sides}}
            return race.run(repeats=1, steps=min(case.steps, 2), warmup=min(case.warmup, 1), before=before)
        return race.run(
            repeats=wanted.repeats or case.repeats,
            steps=case.steps,
            warmup=case.warmup,
            before=case.before,
            longer=case.longer,
            limit_s=case.limit_s,
        )


def against(case: Case, commit: str) -> Case:
    """Returns a case in which our side of `case` is compared with the same side of another commit."""
    python = of_commit(commit)

    def sides(setup: Setup) -> Sequence[Side]:
        mine = next(side for side in case.sides(setup) if side.name == "ours")
        return [mine, replace(mine, name="before", python=python)]

    def figures(scores: Scores) -> Sequence[Figure]:
        if not {"ours", "before"} <= scores.keys():
            return []
        ours, before = scores["ours"], scores["before"]
        pairs = (
            ("step", "s", ours.step_s, before.step_s),
            ("peak memory", "MiB", ours.peak_rss_bytes / MIB, before.peak_rss_bytes / MIB),
        )
        return [
            Figure(f"{what} over {commit}", mine, unit, theirs, mine / theirs, VERSION_LIMIT, at_least=False)
            for what, unit, mine, theirs in pairs
        ]

    def both(steps: Mapping[str, int]) -> dict[str, int]:
        return dict.fromkeys(("ours", "before"), steps["ours"]) if "ours" in steps else {}

    return replace(case, sides=sides, figures=figures, before=both(case.before), longer=both(case.longer), repeats=7)


# --- Results -----------------------------------------------------------------------------------------------------------


def _show_sides(case: Case, scores: Scores) -> None:
    head = ("side", "s a step", "spread", "CPU s", "tokens/s", "peak RSS", "disk a step", "loss")
    rows = [
        (
            name,
            f"{score.step_s:.4f}",
            f"{score.spread:.0%}",
            f"{score.step_cpu_s:.4f}",
            f"{case.tokens_per_step / score.step_s:,.0f}" if case.tokens_per_step else "-",
            f"{score.peak_rss_bytes / MIB:,.0f} MiB",
            f"{score.traffic_bytes / MIB:,.0f} MiB",
            f"{score.loss:.4f}",
        )
        for name, score in scores.items()
    ]
    show_table(head, rows)


def _amount(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:.4g} {unit}".strip()


def show_figures(figures: Sequence[Figure]) -> None:
    """Prints one row for each figure."""
    if not figures:
        print("no figure: the sides that it needs did not run\n")
        return
    rows = [
        (
            each.name,
            _amount(each.ours, each.unit),
            _amount(each.other, each.unit),
            _amount(each.ratio, ""),
            each.bar,
        )
        for each in figures
    ]
    show_table(("figure", "ours", "other", "ratio", "bar"), rows)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for number, row in enumerate([head, *rows]):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print(flush=True)


def write_raw(name: str, record: Mapping[str, object], path: Path | None = None) -> Path:
    """Writes everything measured to a file, by default of the folder that git ignores; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = path or RESULTS / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _write(
    case: Case, wanted: Wanted, machine: Machine, scores: Scores, figures: Sequence[Figure], beside: str
) -> None:
    record = {
        "case": case.id,
        "what": case.what,
        "tokens_per_step": case.tokens_per_step,
        "quick": wanted.quick,
        "settings": wanted.settings or {},
        "machine": asdict(machine),
        "beside": beside,
        "figures": [{**asdict(figure), "met": figure.met} for figure in figures],
        "sides": {name: asdict(score) for name, score in scores.items()},
    }
    print(f"raw results: {write_raw(case.id, record).relative_to(ROOT)}\n", flush=True)
    if wanted.counts:
        log.put([row(case, figure, machine, beside) for figure in figures], list(CASES))


def row(case: Case, figure: Figure, machine: Machine, beside: str) -> log.Row:
    """Returns the row of LOG.md for a figure."""
    return log.Row(
        case=case.id,
        figure=figure.name,
        ours=_amount(figure.ours, figure.unit),
        other=_amount(figure.other, figure.unit),
        ratio="-" if figure.ratio is None else f"{figure.ratio:.3f}",
        bar=figure.bar,
        tokens=str(case.tokens_per_step or "-"),
        machine=machine.title,
        commit=machine.commit,
        date=machine.date,
        beside=beside,
    )
