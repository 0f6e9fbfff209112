"""The first day on a GPU: ten lines, one table.

  tests                 the tests with the marker `gpu`
  placements            a short main job with states on the device, in RAM and on disk: the same losses, to the last bit
  in memory             GPT 1.7B, everything on the device: tokens/s over a plain PyTorch loop, and over FSDP2
  masters in RAM        the same model, updates on the CPU: its step over that with everything on the device
  all in RAM            parameters are fetched, too: the same ratio
  masters on disk       synchronous and lock-free: the same ratio, without a demand
  states in RAM         GPT 13B, or what the RAM holds: step of DeepSpeed's ZeRO-3 with its optimizer in RAM over ours
  largest               the largest model of GPT3-13B's width that `plan` says fits: one step of it, and how long was planned

A model that this machine cannot hold is made smaller, and its line says so; a line that fails says why, and the others go on.
`--quick` takes tiny sizes: shows that the script works, measures nothing. DeepSpeed gets an environment of its own, see
deepspeed_nvme.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from common import (
    GIB,
    ROOT,
    Bar,
    SkipBenchmark,
    argument_parser,
    base_options,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
    show_table,
    side_environment,
)
from deepspeed_nvme import ENVIRONMENT, deepspeed_python
from gpt import SHAPES, GPTShape, shape_of_numel
from race import Race, Score, Side

IN_MEMORY_NUMEL = 1.7e9
IN_MEMORY_BYTES = 24
"""Of the device, for each parameter: 16 of states, and activations."""
IN_RAM_NUMEL = 13e9
IN_RAM_BYTES = 24
"""Of RAM, for each parameter: 16 of ours; DeepSpeed's first copy in fp32 is beside its states for a moment."""
AT_LEAST = {"plain": 0.98, "fsdp2": 1.0, "deepspeed": 1.0}
"""Our speed over others'."""
AT_MOST = {"masters in RAM": 1.10, "all in RAM": 1.10}
"""Our step over that with everything on the device, where links and the CPU's update are quicker than compute."""


@dataclass
class Table:
    """What was found so far."""

    bars: list[Bar] = field(default_factory=list)
    scores: dict[str, Score] = field(default_factory=dict)
    lines: list[tuple[str, str]] = field(default_factory=list)
    """What is no ratio."""

    def failed(self, name: str, error: Exception) -> None:
        """A line that has no number."""
        traceback.print_exception(error)
        self.lines.append((name, f"FAILED: {type(error).__name__}: {str(error).strip().splitlines()[-1]}"))


@dataclass(frozen=True)
class Machine:
    """What sizes are chosen by."""

    device_bytes: int
    host_bytes: int

    @classmethod
    def here(cls) -> Machine:
        return cls(
            torch.cuda.mem_get_info()[1],
            int(Path("/proc/meminfo").read_text().split("MemAvailable:")[1].split()[0]) * 1024,
        )


def in_memory_shape(args: argparse.Namespace, machine: Machine) -> GPTShape:
    """1.7B, or what the device holds."""
    if args.quick:
        return SHAPES["tiny"]
    return shape_of_numel(min(IN_MEMORY_NUMEL, machine.device_bytes / IN_MEMORY_BYTES), width=2048, sequence=1024)


def in_ram_shape(args: argparse.Namespace, machine: Machine) -> GPTShape:
    """13B, or what the RAM holds."""
    if args.quick:
        return SHAPES["tiny"]
    return shape_of_numel(min(IN_RAM_NUMEL, machine.host_bytes / IN_RAM_BYTES), width=5120, sequence=1024)


def on_device(side: Side) -> Side:
    """The side, on this rank's GPU."""
    return replace(side, options={**side.options, "device": "cuda"})


def placed(name: str, options: Mapping[str, object], args: argparse.Namespace, settings: Mapping[str, object]) -> Side:
    """Ours with other homes."""
    return replace(on_device(ours(options, args, settings)), name=name)


# --- The lines ------------------------------------------------------------------------------------------------------


def tests(args: argparse.Namespace, machine: Machine, folder: Path, table: Table) -> None:
    """The tests with the marker `gpu`."""
    which = ["tests/memory/test_backend.py"] if args.quick else ["tests"]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *which]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = re.findall(r"^(?:FAILED|ERROR) .*", answer.stdout, re.MULTILINE)
    last = (answer.stdout.strip().splitlines() or [answer.stderr[-500:]])[-1]
    table.lines += [("tests", last), *(("", line) for line in failed)]


def placements(args: argparse.Namespace, machine: Machine, folder: Path, table: Table) -> None:
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
        command += ["--trainer.val_check_interval=2", "--trainer.limit_val_batches=1", f"{strategy}.page_size=256KiB"]
        command += ["--trainer.enable_progress_bar=false", f"--trainer.logger.init_args.save_dir={folder / name}"]
        if args.quick:
            command += ["--model.width=64", "--model.layers=2", "--model.heads=2", "--data.sequence_length=32"]
            command += ["--model.sequence_length=32", "--data.batch_size=2"]
        answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        losses = re.findall(r"^(?:training|validation) loss.*", answer.stdout, re.MULTILINE)
        if answer.returncode or not losses:
            raise RuntimeError(f"with states on {name}: {(answer.stderr or answer.stdout)[-1500:]}")
        found[name] = losses
    equal = all(losses == found["device"] for losses in found.values())
    told = "the same losses, to the last bit" if equal else f"losses DIFFER: {found}"
    table.lines.append(("placements", f"states on {', '.join(found)}: {told}"))


def in_memory(args: argparse.Namespace, machine: Machine, folder: Path, table: Table) -> None:
    """Everything on the device against others, and against our own other homes."""
    shape = in_memory_shape(args, machine)
    options = base_options(shape, batch=args.batch)
    environment = side_environment(args)
    disk = {"disk_path": str(folder), "offload_optimizer": "disk"}
    sides = [
        placed("ours", options, args, {"offload_parameters": "device", "offload_optimizer": "device"}),
        on_device(Side("plain", "plain", options, threads=args.threads, environment=environment)),
        on_device(
            Side(
                "fsdp2",
                "fsdp2",
                {**options, "reduce_dtype": "bfloat16", "reshard_after_forward": False},
                threads=args.threads,
                environment=environment,
            )
        ),
        placed("masters in RAM", options, args, {"offload_parameters": "device", "offload_optimizer": "host"}),
        placed("all in RAM", options, args, {"offload_parameters": "host", "offload_optimizer": "host"}),
        placed("masters on disk", options, args, {**disk, "offload_parameters": "device"}),
        placed("lock-free", options, args, {**disk, "lock_free": {"max_staleness": 16}}),
    ]
    name = f"GPT {shape.numel:,}"
    scores: dict[str, Score] = {}
    # By twos: a device does not hold seven such models at once.
    first, *others = sides
    for other in others:
        try:
            with Race([first, other]) as race:
                pair = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
        except Exception as error:  # the other pairs are worth having
            table.failed(f"{name}, {other.name}", error)
            continue
        show_scores(pair, tokens_per_step=args.batch * shape.sequence)
        scores |= {f"{name}, {other.name}, {side}": score for side, score in pair.items()}
        mine, theirs = pair["ours"].step_s, pair[other.name].step_s
        ratio = theirs / mine
        found = f"peak of the device {_peak(pair[other.name])}, ours {_peak(pair['ours'])}"
        if other.module != "trainer":
            what = f"{name} on the device: speed over {other.name}"
            table.bars.append(Bar(what, mine, theirs, "s", ratio, AT_LEAST[other.name], at_least=True))
        elif other.name in AT_MOST:
            what = f"{name}, {other.name}: step over all on the device"
            table.bars.append(Bar(what, theirs, mine, "s", ratio, AT_MOST[other.name], at_least=False))
        else:
            found = f"{theirs:.3f} s a step, {ratio:.2f} x all on the device; {found}"
        table.lines.append((f"{name}, {other.name}", found))
    table.scores |= scores


def in_ram(args: argparse.Namespace, machine: Machine, folder: Path, table: Table) -> None:
    """States in RAM, against DeepSpeed."""
    shape = in_ram_shape(args, machine)
    options = {**base_options(shape, batch=args.batch), "recompute": True}
    homes = {"offload_parameters": "host", "offload_optimizer": "host", "recompute": "all"}
    sides = [placed("ours", {**options, "meta": True}, args, homes)]
    try:
        python = deepspeed_python(args.environment, args.deepspeed, on_disk=False)
        own = {
            **side_environment(args),
            "DS_ACCELERATOR": "cuda",
            "TORCH_EXTENSIONS_DIR": str(args.environment / "extensions"),
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }
        theirs = Side("deepspeed", "deepspeed_zero3", {**options, "folder": None}, 1, args.threads, python, own)
        sides.append(on_device(theirs))
    except SkipBenchmark as reason:
        table.lines.append(("deepspeed", f"SKIPPED: {reason}"))
    scores = {}
    for side in sides:  # one after the other: RAM does not hold both
        with Race([side]) as race:
            scores |= race.run(repeats=args.repeats, steps=args.steps, warmup=1)
    name = f"GPT {shape.numel:,}, states in RAM"
    mine = scores["ours"].step_s
    table.lines.append((name, f"{mine:.3f} s a step, peak of the device {_peak(scores['ours'])}"))
    if "deepspeed" in scores:
        theirs_s = scores["deepspeed"].step_s
        limit = AT_LEAST["deepspeed"]
        bar = Bar(f"{name}: speed over DeepSpeed", mine, theirs_s, "s", theirs_s / mine, limit, at_least=True)
        table.bars.append(bar)
    table.scores |= {f"{name}, {side}": score for side, score in scores.items()}


def largest(args: argparse.Namespace, machine: Machine, folder: Path, table: Table) -> None:
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
    side = Side("largest", "configured", options, threads=args.threads, environment=side_environment(args))
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
    import yaml

    found: dict[str, Any] = yaml.safe_load((ROOT / "configs" / config).read_text())["model"]["init_args"]
    return found


def _peak(score: Score) -> str:
    peaks = [turn.extra["device_peak_bytes"] for turn in score.turns if "device_peak_bytes" in turn.extra]
    return f"{max(peaks) / GIB:.2f} GiB" if peaks else "not told"


LINES: dict[str, Callable[[argparse.Namespace, Machine, Path, Table], None]] = {
    "tests": tests,
    "placements": placements,
    "in_memory": in_memory,
    "in_ram": in_ram,
    "largest": largest,
}


def main() -> None:
    """Each line in turn; print the table, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--lines", default=",".join(LINES), help=f"by comma, of {', '.join(LINES)}")
    parser.add_argument("--batch", type=int, default=4, help="samples a step")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where DeepSpeed is or gets installed")
    parser.add_argument("--deepspeed", default="deepspeed", help="what pip installs, e.g. deepspeed==0.19.8")
    args = quicken(parser.parse_args())
    args.environment = args.environment.absolute()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device is here: torch.cuda.is_available() says so; the other benchmarks need none")
    machine, table = Machine.here(), Table()
    print(
        f"{torch.cuda.get_device_name()}, {machine.device_bytes / GIB:.0f} GiB, RAM {machine.host_bytes / GIB:.0f} GiB"
    )
    with disk_folder(args.disk_path) as folder:
        for name in args.lines.split(","):
            print(f"--- {name}", flush=True)
            try:
                LINES[name](args, machine, folder, table)
            except Exception as error:  # the other lines are worth having
                table.failed(name, error)
    show_table(("line", "found"), table.lines)
    publish("gpu.py", args, table.bars, table.scores)
    if any(found.startswith("FAILED") for _, found in table.lines):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
