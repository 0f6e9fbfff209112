"""`lightning-ptm plan` against reality: seconds of a step as planned from a probe of this machine, and as measured.

In each repeat a probe, then a turn of every run: GPT 25M and 124M, everything in RAM, masters on disk, lock-free updates
(at most 16 steps late); and in RAM and with masters on disk on two ranks that divide layers and the threads, planned from a
probe that is launched on two ranks. The plan is made from the medians of the probes' numbers; it knows nothing of the runs.
Ratio: the longer of the two times over the shorter. Also the peak of pages, planned over measured, for which one step is
enough.

Takes about nine minutes. What a number of the prediction comes from is said in `lightning_ptm/forecasting/counting.py` (what
is counted), `probe.py` (rates) and `lightning_ptm/forecasting/clock.py` (what waits for what).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from common import (
    ROOT,
    Bar,
    argument_parser,
    disk_folder,
    publish,
    quicken,
    show_scores,
    show_table,
    side_environment,
)
from race import Race, Score, Side

LIMIT = 1.2
LEAD_STEPS = 16
"""Of lock-free sides, before each turn: what waits for an update while others have their turns is soon applied, and the plan
is of a step among many."""
LONGER = 5
"""How many times as many steps their turns have: a pass over the master states goes on for several."""
SEQUENCE = 256
MODELS: dict[str, tuple[dict[str, int | bool], int]] = {
    "tiny": ({"vocab_size": 256, "width": 64, "layers": 2, "heads": 2}, 2),
    "25M": ({"vocab_size": 256, "width": 512, "layers": 8, "heads": 8}, 4),
    "124M": ({"vocab_size": 50304, "width": 768, "layers": 12, "heads": 12, "tie_head": True}, 1),
}
"""Arguments of the model, and samples of a step."""


def runs(size: str, args: argparse.Namespace, folder: Path) -> dict[str, Side]:
    """The settings of one model, by name."""
    disk = {"disk_path": str(folder), "disk_memory": "8GiB", "page_size": f"{args.page_size}MiB"}
    on_disk = {**disk, "offload_optimizer": "disk"}
    divided = {"tensor_parallel_size": 2}
    settings: dict[str, dict[str, object]] = {
        "in RAM": {},
        "masters on disk": on_disk,
        "lock-free": {**disk, "lock_free": {"max_staleness": 16}},
        "tensor 2 in RAM": divided,
        "tensor 2 masters on disk": {**on_disk, **divided},
    }
    model, batch = MODELS[size]
    found = {}
    for name, given in settings.items():
        options = {
            "model": {**model, "sequence_length": SEQUENCE},
            "data": {"sequence_length": SEQUENCE, "batch_size": batch},
            "precision": "bf16-mixed",
            "settings": {**given, **dict(args.set), "tuning": {"restore_weights": False}},
        }
        title, ranks = f"{size} {name}", 2 if "tensor_parallel_size" in given else 1
        options["devices"] = ranks
        threads = max(1, args.threads // ranks)
        found[title] = Side(
            title, "configured", options, ranks=ranks, threads=threads, environment=side_environment(args)
        )
    return found


def probed(args: argparse.Namespace, folder: Path, ranks: int) -> dict[str, Any]:
    """One probe of this machine by so many ranks, with the threads of the runs."""
    launch = ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "main.py"), "probe", "--disk", str(folder)]
    command += ["--quick"] if args.quick else []
    threads = str(max(1, args.threads // ranks))
    environment = {**os.environ, **side_environment(args), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    found: dict[str, Any] = yaml.safe_load(answer.stdout)
    return found


def _is_lock_free(side: Side) -> bool:
    settings = side.options["settings"]
    return isinstance(settings, Mapping) and bool(settings.get("lock_free"))


def middle(values: Sequence[Any]) -> Any:
    """Medians of numbers, of each entry where they are tables."""
    if isinstance(values[0], Mapping):
        return {key: middle([value[key] for value in values]) for key in values[0]}
    if values[0] is None or values[0] in ("cpu", "cuda"):
        return values[0]
    found = median(map(float, values))  # 3e+10 is a text to YAML 1.1
    return int(found) if isinstance(values[0], int) else found


def predictions(sides: Mapping[str, Side], machines: Mapping[int, Path], folder: Path) -> dict[str, Any]:
    """What the plan says of each run, on the machine as so many ranks have found it."""
    from lightning_ptm.commands.plan import forecast

    found = {}
    for title, side in sides.items():
        config = folder / "config.yaml"
        strategy = {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": side.options["settings"]}
        document = {
            "trainer": {"precision": side.options["precision"], "strategy": strategy, "max_steps": 100_000},
            "model": {
                "class_path": "lightning_ptm.models.GPT",
                "init_args": {**side.options["model"], "meta": True},  # type: ignore[dict-item]
            },
            "data": {"class_path": "lightning_ptm.data.TextBytes", "init_args": side.options["data"]},
        }
        config.write_text(yaml.safe_dump(document))
        found[title] = forecast(config, str(machines[side.ranks]))[0]
    return found


def bars(scores: Mapping[str, Score], planned: Mapping[str, Any]) -> list[Bar]:
    """The longer of planned and measured over the shorter."""
    found = []
    for title, score in scores.items():
        plan_s, real_s = planned[title].seconds, score.step_s
        ratio = max(plan_s, real_s) / min(plan_s, real_s)
        found.append(Bar(f"{title}, planned and measured step", plan_s, real_s, "s", ratio, LIMIT, at_least=False))
    return found


def show(scores: Mapping[str, Score], planned: Mapping[str, Any]) -> None:
    """What each prediction is made of."""
    rows = []
    for title, score in scores.items():
        plan = planned[title]
        links = {use.link.value: use.busy_s for use in plan.timing.links}
        names = ("update_device", "disk_read", "disk_write", "collective", "tensor_exchange")
        cells = (plan.timing.compute_s, *(links[name] for name in names), plan.timing.rounds_s)
        rows.append(
            (
                title,
                *(f"{cell:.3f}" for cell in cells),
                f"{plan.seconds:.3f}",
                f"{score.step_s:.3f}",
                f"{plan.seconds / score.step_s:.2f}",
            )
        )
    parts = ("compute", "update", "disk read", "disk write", "gathers", "exchanges", "rounds")
    show_table(("run", *parts, "planned", "measured", "ratio"), rows)


def main() -> None:
    """Probe, run, plan, print, and write what the command line asked for."""
    parser = argument_parser(__doc__, disk=True)
    parser.add_argument("--sizes", default="25M,124M", help=f"of {', '.join(MODELS)}, by comma")
    parser.set_defaults(repeats=4, steps=8, warmup=4)
    args = quicken(parser.parse_args())
    sizes = ["tiny"] if args.quick else args.sizes.split(",")
    with disk_folder(args.disk_path) as folder:
        sides = {title: side for size in sizes for title, side in runs(size, args, folder).items()}
        if args.sides:
            sides = {title: side for title, side in sides.items() if title in args.sides.split(",")}
        turns: dict[str, list[Any]] = {title: [] for title in sides}
        probes: dict[int, list[Any]] = {side.ranks: [] for side in sides.values()}
        lead = {
            title: args.warmup if args.quick else LEAD_STEPS for title, side in sides.items() if _is_lock_free(side)
        }
        longer = {} if args.quick else dict.fromkeys(lead, LONGER)
        with Race(list(sides.values())) as race:
            for repeat in range(args.repeats):
                for ranks, known in probes.items():
                    known.append(probed(args, folder, ranks))
                found = race.run(
                    repeats=1, steps=args.steps, warmup=0 if repeat else args.warmup, before=lead, longer=longer
                )
                for title, score in found.items():
                    turns[title] += score.turns
        scores = {title: Score(title, tuple(taken)) for title, taken in turns.items()}
        machines = {ranks: folder / f"machine-{ranks}.yaml" for ranks in probes}
        for ranks, machine in machines.items():
            machine.write_text(yaml.safe_dump(middle(probes[ranks])))
            print(machine.read_text())
        planned = predictions(sides, machines, folder)
    show_scores(scores, tokens_per_step=SEQUENCE)
    show(scores, planned)
    publish("predictions.py", args, bars(scores, planned), scores)


if __name__ == "__main__":
    main()
