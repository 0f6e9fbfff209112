"""The first day on a GPU: `python benchmarks/gpu.py`, ten lines, one table.

  tests                 the tests with the marker `gpu`
  placements            a short main job with states on the device, in RAM and on disk: the same losses, bit for bit where the
                        CPU updates; the device's own kernels for updates round differently
  in memory             GPT 1.7B, everything on the device: tokens/s over a plain PyTorch loop, and over FSDP2
  masters in RAM        the same model, updates on the CPU: its step over that with everything on the device
  all in RAM            parameters are fetched, too: the same ratio
  masters on disk       synchronous and lock-free: the same ratio, without a demand
  states in RAM         GPT 13B, or what the RAM holds: step of DeepSpeed's ZeRO-3 with its optimizer in RAM over ours
  largest               the largest model of GPT3-13B's width that `plan` says fits: one step of it, and how long was planned

A model that this machine cannot hold is made smaller, and its line says so; a line that fails says why, and the others go on.
`--quick` takes tiny sizes: shows that the script works, measures nothing. DeepSpeed is left out unless it is installed
(`python -m benchmarks install-deepspeed`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import yaml

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # run as a file
    sys.path.insert(0, str(ROOT))

from benchmarks import log  # noqa: E402
from benchmarks.case import GIB, Case, Figure, Setup, cores, of_gpt  # noqa: E402
from benchmarks.cases import CASES  # noqa: E402
from benchmarks.environments import deepspeed_environment, installed_deepspeed  # noqa: E402
from benchmarks.gpt import SHAPES, GPTShape, shape_of_numel  # noqa: E402
from benchmarks.race import Race, Score, Side, SkipCase  # noqa: E402
from benchmarks.runner import Machine, row, show_figures, show_table, write_raw  # noqa: E402

IN_MEMORY_NUMEL = 1.7e9
IN_MEMORY_BYTES = 24
"""Of the device, for each parameter: 16 of states, and activations."""
IN_RAM_NUMEL = 13e9
IN_RAM_BYTES = 24
"""Of RAM, for each parameter: 16 of ours; DeepSpeed's first copy in fp32 is beside its states for a moment."""
ROUNDING = 1e-2
"""By how much losses of a short run may differ where updates are computed on the device."""
AT_LEAST = {"plain": 0.98, "fsdp2": 1.0, "deepspeed": 1.0}
"""Our speed over others'."""
AT_MOST = {"masters in RAM": 1.10, "all in RAM": 1.10}
"""Our step over that with everything on the device, where links and the CPU's update are quicker than compute."""


@dataclass
class Table:
    """What was found so far."""

    figures: list[Figure] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    """What is no ratio."""

    def failed(self, name: str, error: Exception) -> None:
        """A line that has no number."""
        traceback.print_exception(error)
        self.lines.append((name, f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"))


@dataclass(frozen=True)
class Memory:
    """What sizes are chosen by."""

    device_bytes: int
    host_bytes: int

    @classmethod
    def here(cls) -> Memory:
        return cls(
            torch.cuda.mem_get_info()[1],
            int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024,
        )


def in_memory_shape(args: argparse.Namespace, memory: Memory) -> GPTShape:
    """1.7B, or what the device holds."""
    if args.quick:
        return SHAPES["tiny"]
    wanted = args.numel or IN_MEMORY_NUMEL
    return shape_of_numel(min(wanted, memory.device_bytes / IN_MEMORY_BYTES), width=2048, sequence=1024)


def in_ram_shape(args: argparse.Namespace, memory: Memory) -> GPTShape:
    """13B, or what the RAM holds."""
    if args.quick:
        return SHAPES["tiny"]
    return shape_of_numel(min(args.numel or IN_RAM_NUMEL, memory.host_bytes / IN_RAM_BYTES), width=5120, sequence=1024)


def on_device(side: Side) -> Side:
    """The side, on this rank's GPU."""
    return replace(side, options={**side.options, "device": "cuda"})


def placed(name: str, options: Mapping[str, object], setup: Setup, settings: Mapping[str, object]) -> Side:
    """Returns our side with states in other tiers."""
    return on_device(setup.ours(options, settings, name=name))


def setup_of(args: argparse.Namespace, folder: Path) -> Setup:
    """Returns what sides are made with."""
    return Setup(folder, args.quick, cores(), {}, contextlib.ExitStack())


# --- The lines ------------------------------------------------------------------------------------------------------


def tests(args: argparse.Namespace, memory: Memory, folder: Path, table: Table) -> None:
    """The tests with the marker `gpu`."""
    which = ["tests/memory/test_backend.py"] if args.quick else ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *which]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", answer.stdout, re.MULTILINE)
    last = (answer.stdout.strip().splitlines() or [answer.stderr[-500:]])[-1]
    table.lines += [("tests", last), *(("", line) for line in failed)]


def placements(args: argparse.Namespace, memory: Memory, folder: Path, table: Table) -> None:
    """The main job, wherever states live."""
    strategy = "--trainer.strategy.init_args"
    homes = {
        "device": [],
        "RAM": [f"{strategy}.offload_parameters=host", f"{strategy}.offload_optimizer=host"],
        "disk": [
            f"{strategy}.offload_parameters=disk",
            f"{strategy}.offload_optimizer=disk",
            f"{strategy}.disk_path={folder}",
        ],
    }
    found = {}
    for name, settings in homes.items():
        command = [sys.executable, "main.py", "fit", "--config", "gpt.yaml", "--trainer.accelerator=cuda"]
        command += ["--trainer.devices=1", f"--trainer.max_steps={4 if args.quick else 50}", *settings]
        command += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=2", f"{strategy}.page_size=256KiB"]
        command += ["--trainer.enable_progress_bar=false", f"--trainer.logger.init_args.save_dir={folder / name}"]
        if args.quick:
            command += ["--model.width=64", "--model.layers=2", "--model.heads=2", "--data.sequence_length=32"]
            command += ["--model.sequence_length=32", "--data.batch_size=2"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        losses = re.findall(r"^(?:training|validation) loss.*", answer.stdout, re.MULTILINE)
        if answer.returncode or not losses:
            raise RuntimeError(f"with states on {name}: {(answer.stderr or answer.stdout)[-1500:]}")
        found[name] = losses
    if found["disk"] != found["RAM"] or not _nearly(found["device"], found["RAM"]):
        raise RuntimeError(f"losses differ: {found}")
    exact = "to the last bit" if found["device"] == found["RAM"] else "on the device but for rounding"
    table.lines.append(("placements", f"states on {', '.join(found)}: the same losses, {exact}"))


def _nearly(lines: list[str], others: list[str]) -> bool:
    """Whether the losses that a run printed are another's but for rounding."""
    numbers = [[float(word) for line in each for word in re.findall(r"\d+\.\d+", line)] for each in (lines, others)]
    return len(numbers[0]) == len(numbers[1]) and all(
        math.isclose(a, b, rel_tol=ROUNDING) for a, b in zip(*numbers, strict=True)
    )


def in_memory(args: argparse.Namespace, memory: Memory, folder: Path, table: Table) -> None:
    """Everything on the device against others, and against our own other homes."""
    shape = in_memory_shape(args, memory)
    options, setup = of_gpt(shape, batch=args.batch), setup_of(args, folder)
    disk = {"disk_path": str(folder), "offload_optimizer": "disk"}
    sides = [
        placed("ours", options, setup, {"offload_parameters": "device", "offload_optimizer": "device"}),
        on_device(Side("plain", "plain", options, threads=setup.cores)),
        on_device(
            Side(
                "fsdp2",
                "fsdp2",
                {**options, "reduce_dtype": "bfloat16", "reshard_after_forward": False},
                threads=setup.cores,
            )
        ),
        placed("masters in RAM", options, setup, {"offload_parameters": "device", "offload_optimizer": "host"}),
        placed("all in RAM", options, setup, {"offload_parameters": "host", "offload_optimizer": "host"}),
        placed("masters on disk", options, setup, {**disk, "offload_parameters": "device"}),
        placed("lock-free", options, setup, {**disk, "lock_free": {"max_staleness": 16}}),
    ]
    name = f"GPT {shape.numel:,}"
    scores: dict[str, Score] = {}
    # By twos: a device does not hold seven such models at once.
    first, *others = [
        side for side in sides if side.name == "ours" or not args.sides or side.name in args.sides.split(",")
    ]
    for other in others:
        try:
            with Race([first, other]) as race:
                pair = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        except Exception as error:  # the other pairs are worth having
            table.failed(f"{name}, {other.name}", error)
            continue
        for side, score in pair.items():
            print(f"{side}: {score.step_s:.4f} s a step, {args.batch * shape.sequence / score.step_s:,.0f} tokens/s")
        scores |= {f"{name}, {other.name}, {side}": score for side, score in pair.items()}
        mine, theirs = pair["ours"].step_s, pair[other.name].step_s
        ratio = theirs / mine
        found = f"peak of the device {_peak(pair[other.name])}, ours {_peak(pair['ours'])}"
        if other.module != "trainer":
            what = f"{name} on the device: speed over {other.name}"
            table.figures.append(Figure(what, mine, "s", theirs, ratio, AT_LEAST[other.name]))
        elif other.name in AT_MOST:
            what = f"{name}, {other.name}: step over all on the device"
            table.figures.append(Figure(what, theirs, "s", mine, ratio, AT_MOST[other.name], at_least=False))
        else:
            found = f"{theirs:.3f} s a step, {ratio:.2f} x all on the device; {found}"
        table.lines.append((f"{name}, {other.name}", found))
    table.scores |= scores


def in_ram(args: argparse.Namespace, memory: Memory, folder: Path, table: Table) -> None:
    """States in RAM, against DeepSpeed."""
    shape = in_ram_shape(args, memory)
    options, setup = {**of_gpt(shape, batch=args.batch), "recompute": True}, setup_of(args, folder)
    homes = {"offload_parameters": "host", "offload_optimizer": "host", "recompute": "all"}
    sides = [placed("ours", {**options, "meta": True}, setup, homes)]
    try:
        python, own = installed_deepspeed(on_disk=False), deepspeed_environment("cuda")
        theirs = Side("deepspeed", "deepspeed_zero3", {**options, "folder": None}, 1, setup.cores, python, own)
        sides.append(on_device(theirs))
    except SkipCase as reason:
        table.lines.append(("deepspeed", f"SKIPPED: {reason}"))
    scores: dict[str, Score] = {}
    for side in sides:  # one after the other: RAM does not hold both
        with Race([side]) as race:
            scores |= race.run(repeats=args.repeats, steps=args.steps, warmup=1)
    name = f"GPT {shape.numel:,}, states in RAM"
    mine = scores["ours"].step_s
    table.lines.append((name, f"{mine:.3f} s a step, peak of the device {_peak(scores['ours'])}"))
    if "deepspeed" in scores:
        theirs_s = scores["deepspeed"].step_s
        ratio = theirs_s / mine
        table.figures.append(Figure(f"{name}: speed over DeepSpeed", mine, "s", theirs_s, ratio, AT_LEAST["deepspeed"]))
    table.scores |= {f"{name}, {side}": score for side, score in scores.items()}


def largest(args: argparse.Namespace, memory: Memory, folder: Path, table: Table) -> None:
    """The largest model that fits, by the plan and in a run."""
    settings: dict[str, Any] = {"disk_path": str(folder), "recompute": "all"}
    if args.quick:
        settings |= {"device_memory": "24MiB", "host_memory": "64MiB", "disk_memory": "64MiB", "page_size": "64KiB"}
    config = "gpt.yaml" if args.quick else "gpt3_13b.yaml"
    command = [sys.executable, "main.py", "plan", config, "--largest", "layers", "--json", "true"]
    command += ["--batch_size", "1", "--strategy", json.dumps(settings)]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise RuntimeError(answer.stderr[-1500:])
    planned = json.loads(answer.stdout[answer.stdout.index("{") :])
    model = _model(config) | {"layers": planned["chosen"]["layers"], "meta": True}
    options = {
        "model": model,
        "data": {"sequence_length": model["sequence_length"], "batch_size": 1},
        "precision": "bf16-mixed",
        "settings": {**settings, "tuning": {"restore_weights": False}},
    }
    side = Side("largest", "configured", options, threads=cores())
    with Race([on_device(side)], timeout_s=4 * 3600) as race:
        score = race.run(repeats=1, steps=1, warmup=1)["largest"]
    table.lines.append(
        (
            "largest",
            f"{model['layers']} layers of width {model['width']}, {planned['parameters']:,} parameters: "
            f"{score.step_s:.2f} s a step, planned {planned['seconds_per_step'] or 0:.2f}; peak of the device "
            f"{_peak(score)}, resident {score.peak_rss_bytes / GIB:.1f} GiB",
        )
    )
    table.scores["largest"] = score


def _model(config: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / config).read_text())["model"]["init_args"]
    return found


def _peak(score: Score) -> str:
    peaks = [turn.extra["device_peak_bytes"] for turn in score.turns if "device_peak_bytes" in turn.extra]
    return f"{max(peaks) / GIB:.2f} GiB" if peaks else "not told"


LINES: dict[str, Callable[[argparse.Namespace, Memory, Path, Table], None]] = {
    "tests": tests,
    "placements": placements,
    "in_memory": in_memory,
    "in_ram": in_ram,
    "largest": largest,
}


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="tiny sizes: shows that the script works, measures nothing")
    made.add_argument("--lines", default=",".join(LINES), help=f"by comma, of {', '.join(LINES)}")
    made.add_argument("--sides", default="", help="by comma, what in_memory compares with; all by default")
    made.add_argument(
        "--numel", type=float, default=0, help="parameters of in_memory and in_ram, at most; 1.7e9 and 13e9 by default"
    )
    made.add_argument("--disk-path", type=Path, default=ROOT.parent, help="folder on the disk to measure")
    made.add_argument("--batch", type=int, default=4, help="samples a step")
    made.add_argument("--repeats", type=int, default=7, help="turns of each side")
    made.add_argument("--steps", type=int, default=5, help="training steps of one turn")
    made.add_argument("--warmup", type=int, default=3, help="steps of each side before the first turn")
    made.add_argument("--json", type=Path, help="also write everything measured to this file")
    made.add_argument("--log", action="store_true", help="also write the figures to LOG.md")
    return made


def main() -> None:
    """Runs each line in turn, prints the table, and writes what the command line asked for."""
    args = parser().parse_args()
    if args.quick:
        args.repeats, args.steps, args.warmup = 2, 2, 1
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: torch.cuda.is_available() says so; the other benchmarks need none")
    memory, table, here, load = Memory.here(), Table(), Machine.here(), os.getloadavg()[0]
    print(f"{torch.cuda.get_device_name()}, {memory.device_bytes / GIB:.0f} GiB, RAM {memory.host_bytes / GIB:.0f} GiB")
    with tempfile.TemporaryDirectory(prefix="lightning_ptm_benchmark_", dir=args.disk_path) as name:
        for line in args.lines.split(","):
            print(f"--- {line}", flush=True)
            try:
                LINES[line](args, memory, Path(name), table)
            except Exception as error:  # the other lines are worth having
                table.failed(line, error)
    show_table(("line", "found"), table.lines)
    show_figures(table.figures)
    record = {
        "device": torch.cuda.get_device_name(),
        "machine": asdict(here),
        "lines": table.lines,
        "figures": [asdict(figure) for figure in table.figures],
        "sides": {name: asdict(score) for name, score in table.scores.items()},
    }
    print(f"raw results: {write_raw('gpu', record, args.json)}")
    if args.log and not args.quick:
        beside = f"{torch.cuda.get_device_name()}; load {load:.2f} at the start, {os.getloadavg()[0]:.2f} at the end"
        log.put([row(_case(args), figure, here, beside) for figure in table.figures], list(CASES))
    if any(found.startswith("FAILED") for _, found in table.lines):
        raise SystemExit(1)


def _case(args: argparse.Namespace) -> Case:
    return Case("gpu", "", lambda setup: (), lambda scores: (), 0 if args.quick else args.batch * 1024)


if __name__ == "__main__":
    main()
