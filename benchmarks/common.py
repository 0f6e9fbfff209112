"""What every benchmark shares outside the race itself: command line, bars, table, JSON and the log's line.

I1: a ratio is above a bar or below it by `Bar.met` alone; printing, JSON and log only repeat that.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import yaml
from gpt import GPTShape
from race import Score, Side, speed_ratios

ROOT = Path(__file__).resolve().parents[1]
LOG = Path(__file__).with_name("LOG.md")
SEED = 1234
MIB = 2**20
GIB = 2**30
MASTER_BYTES_PER_PARAMETER = 24  # 12 read and 12 written: fp32 parameter and two moments

# Keeps freed activations mapped, for all sides alike: glibc's defaults give large ones back at each free, and page
# faults then cost every side the same seconds, which hides differences between them.
KEEP_FREED_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(64 * GIB)}
# The opposite: what is freed leaves the resident set at once, so that a peak is a peak of live bytes.
RETURN_FREED_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(64 * 1024), "MALLOC_TRIM_THRESHOLD_": "0"}


class SkipBenchmark(Exception):
    """The machine cannot run this benchmark; the message says why."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One number to reach: `value` at least (or at most) `limit`, with both sides of the ratio in their unit."""

    what: str
    ours: float
    other: float
    unit: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def demand(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.limit:.3f}"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and with what a number was measured."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    torch: str
    commit: str
    date: str

    @property
    def title(self) -> str:
        return f"{self.processor}, {self.cores} cores, {self.memory_gib:.0f} GiB"


def this_machine() -> Machine:
    """What LOG.md and JSON say about where a number comes from."""
    return Machine(
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB,
        system=platform.platform(),
        torch=torch.__version__,
        commit=_commit(),
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or "uncommitted"


# --- Command line ---------------------------------------------------------------------------------------------------


def argument_parser(description: str | None, *, disk: bool = False) -> argparse.ArgumentParser:
    """The options that all benchmarks have; a script adds its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes: shows that the script works, measures nothing"
    )
    parser.add_argument("--json", type=Path, help="also write everything measured to this file")
    parser.add_argument("--log", action="store_true", help=f"also append the ratios to {LOG.name}")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each side")
    parser.add_argument("--steps", type=int, default=5, help="training steps of one turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps of each side before the first turn")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="intra-op threads of a side")
    parser.add_argument("--sides", help="run only these sides, by comma; ratios that need others are left out")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="NAME=VALUE", help="a setting of the strategy"
    )
    parser.add_argument("--wait-policy", choices=("passive", "active"), help="OMP_WAIT_POLICY of every side")
    parser.add_argument("--keep-freed-memory", action="store_true", help="glibc keeps freed memory, on every side")
    if disk:
        parser.add_argument(
            "--disk-path", type=Path, help="folder on the disk to measure (default: beside the checkout)"
        )
        parser.add_argument("--page-size", type=int, default=4, help="MiB of a page and of a disk transfer")
    return parser


def _setting(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, yaml.safe_load(value)


def quicken(args: argparse.Namespace) -> argparse.Namespace:
    """`args`, with few repeats of few steps when `--quick` was given."""
    if args.quick:
        args.repeats, args.steps, args.warmup = 2, 2, 1
    return args


def chosen(sides: Sequence[Side], args: argparse.Namespace) -> list[Side]:
    """The sides that `--sides` names, or all."""
    names = [name.strip() for name in args.sides.split(",")] if args.sides else [side.name for side in sides]
    unknown = set(names) - {side.name for side in sides}
    if unknown:
        raise SystemExit(f"no side is called {', '.join(sorted(unknown))}; there are {[side.name for side in sides]}")
    return [side for side in sides if side.name in names]


def side_environment(args: argparse.Namespace) -> dict[str, str]:
    """Environment variables that every side gets."""
    environment = dict(KEEP_FREED_MEMORY) if args.keep_freed_memory else {}
    if args.wait_policy:
        environment["OMP_WAIT_POLICY"] = args.wait_policy
    return environment


@contextlib.contextmanager
def disk_folder(path: Path | None) -> Iterator[Path]:
    """A new folder, removed at the end, in `path` or beside the checkout (never in /tmp: that is often memory)."""
    with tempfile.TemporaryDirectory(prefix="lightning_ptm_benchmark_", dir=path or ROOT.parent) as folder:
        yield Path(folder)


def ours(
    options: Mapping[str, object],
    args: argparse.Namespace,
    settings: Mapping[str, object] | None = None,
    *,
    devices: int = 1,
    memory_group: str | None = None,
) -> Side:
    """The side of this project's strategy: `settings` and then `--set` are the arguments of AngelPTMStrategy."""
    arguments = {**(settings or {}), **dict(args.set)}
    arguments["tuning"] = {**(arguments.get("tuning") or {}), "restore_weights": False}
    return Side(
        "ours",
        "trainer",
        {**options, "precision": "bf16-mixed", "devices": devices, "settings": arguments},
        ranks=devices,
        threads=args.threads,
        environment=side_environment(args),
        memory_group=memory_group,
    )


def base_options(shape: GPTShape, *, batch: int) -> dict[str, object]:
    """The options that every side's module takes."""
    return {"shape": asdict(shape), "batch": batch, "seed": SEED}


# --- Results --------------------------------------------------------------------------------------------------------


def show_scores(scores: Mapping[str, Score], *, tokens_per_step: int) -> None:
    """Print one row for each side."""
    head = ("side", "s/step", "spread", "tokens/s", "peak RSS", "disk/step", "loss")
    rows = [
        (
            name,
            f"{score.step_s:.4f}",
            f"{score.spread:.0%}",
            f"{tokens_per_step / score.step_s:,.0f}",
            f"{score.peak_rss_bytes / MIB:,.0f} MiB",
            f"{score.traffic_bytes / MIB:,.0f} MiB",
            f"{score.loss:.4f}",
        )
        for name, score in scores.items()
    ]
    show_table(head, rows)


def speed_bars(what: str, scores: Mapping[str, Score], limits: Mapping[str, float], tokens_per_step: int) -> list[Bar]:
    """One bar for each side in `limits` that took part with ours: tokens/s over that side's, at least its limit."""
    bars = []
    for other, limit in limits.items():
        if "ours" not in scores or other not in scores:
            continue
        pairs = speed_ratios(scores["ours"], scores[other])
        print(f"{what}, ours over {other} in each repeat: {' '.join(f'{ratio:.3f}' for ratio in pairs)}")
        mine, theirs = (tokens_per_step / scores[name].step_s for name in ("ours", other))
        bars.append(Bar(f"{what}, speed over {other}", mine, theirs, "tokens/s", mine / theirs, limit, at_least=True))
    return bars


def show_bars(bars: Sequence[Bar]) -> None:
    """Print one row for each bar."""
    if not bars:
        print("no ratio: it needs ours and another side")
        return
    head = ("bar", "ours", "other", "ratio", "demand", "")
    rows = [
        (
            bar.what,
            f"{bar.ours:,.4g} {bar.unit}",
            f"{bar.other:,.4g} {bar.unit}",
            f"{bar.value:.3f}",
            bar.demand,
            "met" if bar.met else "MISSED",
        )
        for bar in bars
    ]
    show_table(head, rows)


def show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, the first column to the left and the others to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    print()
    for number, row in enumerate([head, *rows]):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        print("  ".join(cells).rstrip())
        if number == 0:
            print("  ".join("-" * width for width in widths))
    print(flush=True)


def publish(script: str, args: argparse.Namespace, bars: Sequence[Bar], scores: Mapping[str, Score]) -> None:
    """Print the bars; write JSON and log as the command line asked. A quick run's numbers never reach the log."""
    show_bars(bars)
    machine = this_machine()
    if args.json:
        record = {
            "script": script,
            "arguments": {name: str(value) for name, value in vars(args).items()},
            "machine": asdict(machine),
            "bars": [{**asdict(bar), "met": bar.met} for bar in bars],
            "sides": {name: asdict(score) for name, score in scores.items()},
        }
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    if args.log and not args.quick:
        with LOG.open("a") as log:
            log.writelines(log_line(script, bar, machine) + "\n" for bar in bars)


def log_line(script: str, bar: Bar, machine: Machine) -> str:
    """The row of LOG.md for one bar."""
    cells = (
        machine.date,
        machine.title,
        machine.commit,
        script,
        bar.what,
        f"{bar.ours:.4g} {bar.unit}",
        f"{bar.other:.4g} {bar.unit}",
        f"{bar.value:.3f}",
        f"{bar.demand}, {'met' if bar.met else 'missed'}",
    )
    return f"| {' | '.join(cells)} |"
