"""Against DeepSpeed: GPT of 124M, masters on disk, synchronous, batch 2 x 256, bf16, one rank, CPU.

Sides, in turns:
  ours            AngelPTMStrategy, masters on disk, compute parameters in RAM
  deepspeed       ZeRO-3, optimizer on NVMe, one sub-group, as DeepSpeed comes (sides/deepspeed_zero3.py)
  deepspeed-pipe  the same in sub-groups of 20M parameters, reads, update and writes overlapped
  plain           the plain PyTorch loop with everything in RAM, for scale
Ratio: step time of the faster DeepSpeed over that of ours.

DeepSpeed gets a virtual environment of its own, in --environment, made at the first run (minutes: its operators are
compiled here). It needs a C++ compiler and libaio's headers (`apt-get install libaio-dev`); without them, or without a
package index, the benchmark is skipped with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from common import (
    Bar,
    SkipBenchmark,
    argument_parser,
    base_options,
    chosen,
    disk_folder,
    ours,
    publish,
    quicken,
    show_scores,
    side_environment,
)
from gpt import SHAPES
from race import Race, Score, Side

DEEPSPEED_MARGIN = 1.889
ENVIRONMENT = Path(__file__).with_name(".deepspeed")
DEEPSPEED_SIDES = ("deepspeed", "deepspeed-pipe")
COMPILES = "#include <libaio.h>\nint main() { return io_setup(0, nullptr); }\n"


def deepspeed_python(folder: Path, version: str, *, on_disk: bool = True) -> str:
    """The interpreter of DeepSpeed's environment in `folder`, made if it is not there yet.

    Args:
        on_disk: its operators for disks are needed, too.

    Raises:
        SkipBenchmark: a compiler, libaio or a package is not to be had.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise SkipBenchmark("DeepSpeed compiles its operators and there is no g++ here")
    attempt = [compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    if on_disk and subprocess.run(attempt, input=COMPILES, text=True, capture_output=True, check=False).returncode:
        raise SkipBenchmark("DeepSpeed's NVMe offload needs libaio's headers: apt-get install libaio-dev")
    python = folder / "bin" / "python"
    if not (python.exists() and _imports(python, "deepspeed")):
        print(f"installing {version} in {folder}", flush=True)
        torch_version = torch.__version__.partition("+")[0]
        commands = [
            [sys.executable, "-m", "venv", str(folder)],
            [str(python), "-m", "pip", "install", "--quiet", f"torch=={torch_version}", "setuptools", "ninja", version],
        ]
        for command in commands:
            answer = subprocess.run(command, capture_output=True, text=True, check=False)
            if answer.returncode:
                last = (answer.stderr.strip().splitlines() or ["no message"])[-1]
                raise SkipBenchmark(f"DeepSpeed cannot be installed here: {last}")
    return str(python)


def _imports(python: Path, package: str) -> bool:
    return subprocess.run([str(python), "-c", f"import {package}"], capture_output=True, check=False).returncode == 0


def sides(size: str, args: argparse.Namespace, python: str, folder: Path) -> list[Side]:
    """The contestants, with what each is asked to train."""
    options = base_options(SHAPES[size], batch=args.batch)
    environment = side_environment(args)
    settings = {"page_size": f"{args.page_size}MiB", "disk_path": str(folder)}
    homes = {"offload_parameters": "device", "offload_optimizer": "disk"}
    racing = [ours(options, args, settings | homes)]
    own_environment = {
        **environment,
        "DS_ACCELERATOR": "cpu",
        "TORCH_EXTENSIONS_DIR": str(args.environment / "extensions"),  # compiled once
        "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
    }
    for name in DEEPSPEED_SIDES:
        subfolder = folder / name
        subfolder.mkdir()
        theirs = {**options, "folder": str(subfolder), "pipeline": name == "deepspeed-pipe"}
        racing.append(Side(name, "deepspeed_zero3", theirs, 1, args.threads, python, own_environment))
    return [*racing, Side("plain", "plain", options, threads=args.threads, environment=environment)]


def bars(size: str, scores: dict[str, Score]) -> list[Bar]:
    """The bar against the faster DeepSpeed; prints how DeepSpeed stands to the plain loop."""
    theirs = [scores[name] for name in DEEPSPEED_SIDES if name in scores]
    if not theirs:
        return []
    fastest = min(theirs, key=lambda score: score.step_s)
    if plain := scores.get("plain"):
        print(f"{fastest.side} takes {fastest.step_s / plain.step_s:.2f} x the plain in-memory loop's step")
    if "ours" not in scores:
        return []
    seconds = scores["ours"].step_s, fastest.step_s
    ratio = seconds[1] / seconds[0]
    return [
        Bar(f"{size} masters on disk, speed over {fastest.side}", *seconds, "s", ratio, DEEPSPEED_MARGIN, at_least=True)
    ]


def main() -> None:
    """Race, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--size", default="124M", choices=tuple(SHAPES))
    parser.add_argument("--batch", type=int, default=2, help="samples a step")
    parser.add_argument("--environment", type=Path, default=ENVIRONMENT, help="where DeepSpeed is or gets installed")
    parser.add_argument("--deepspeed", default="deepspeed", help="what pip installs, e.g. deepspeed==0.19.8")
    args = quicken(parser.parse_args())
    args.environment = args.environment.absolute()
    size = (
        "25M" if args.quick else args.size
    )  # DeepSpeed keeps tensors below 1 MB in RAM: tiny would not touch the disk
    try:
        python = deepspeed_python(args.environment, args.deepspeed)
    except SkipBenchmark as reason:
        print(f"SKIPPED: {reason}")
        return
    print(f"GPT {size}, {SHAPES[size].numel:,} parameters, batch {args.batch} x {SHAPES[size].sequence}")
    with disk_folder(args.disk_path) as folder, Race(chosen(sides(size, args, python, folder), args)) as race:
        scores = race.run(repeats=args.repeats, steps=args.steps, warmup=args.warmup)
    show_scores(scores, tokens_per_step=args.batch * SHAPES[size].sequence)
    publish("deepspeed_nvme.py", args, bars(size, scores), scores)


if __name__ == "__main__":
    main()
