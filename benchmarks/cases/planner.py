"""Cases of `lightning-ptm plan`: seconds of a step as planned from a probe of this machine, and as measured.

Sides: `probe` and `probe of 2 ranks`, whose medians the plan is made from (it knows nothing of the runs), and this
project's GPT with everything in RAM, with masters on disk, with lock-free updates (at most 16 steps late), and in RAM
and with masters on disk on two ranks that divide layers and the threads. The ratio is that of the longer time to the
shorter one.

Where the numbers of a prediction come from: `lightning_ptm/forecasting/counting.py` (what is counted), `lightning-ptm probe`
(rates), and `lightning_ptm/forecasting/clock.py` (what waits for what).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from benchmarks.case import Case, Figure, Scores, Setup
from benchmarks.race import Score, Side

LIMIT = 1.2
LEAD_STEPS = 16
"""Steps of lock-free sides before each turn: updates that waited during other sides' turns are soon applied."""
LONGER = 5
"""How many times as many steps their turns have: a pass over the master states goes on for several."""
SEQUENCE = 256
MODELS: Mapping[str, tuple[Mapping[str, int | bool], int]] = {
    "tiny": ({"vocab_size": 256, "width": 64, "layers": 2, "heads": 2}, 2),
    "25M": ({"vocab_size": 256, "width": 512, "layers": 8, "heads": 8}, 4),
    "124M": ({"vocab_size": 50304, "width": 768, "layers": 12, "heads": 12, "tie_head": True}, 1),
}
"""Arguments of the model, and samples of a step."""
RUNS = ("in RAM", "masters on disk", "lock-free", "tensor 2 in RAM", "tensor 2 masters on disk")


def options_of_runs(size: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Returns the options of sides/configured.py, by run."""
    disk: dict[str, object] = {"disk_path": str(folder), "disk_memory": "8GiB"}
    on_disk: dict[str, object] = {**disk, "offload_optimizer": "disk"}
    divided: dict[str, object] = {"tensor_parallel_size": 2}
    settings: Sequence[dict[str, object]] = (
        {},
        on_disk,
        {**disk, "lock_free": {"max_staleness": 16}},
        divided,
        {**on_disk, **divided},
    )
    model, batch = MODELS[size]
    return {
        name: {
            "model": {**model, "sequence_length": SEQUENCE},
            "data": {"sequence_length": SEQUENCE, "batch_size": batch},
            "precision": "bf16-mixed",
            "settings": {**given, "tuning": {"restore_weights": False}},
            "devices": 2 if "tensor_parallel_size" in given else 1,
        }
        for name, given in zip(RUNS, settings, strict=True)
    }


def _sides(size: str) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        sides = []
        for ranks in (1, 2):
            probed = {"folder": str(setup.folder), "ranks": ranks, "quick": setup.quick}
            sides.append(Side(PROBES[ranks], "probe", probed, threads=max(1, setup.cores // ranks)))
        for name, options in options_of_runs("tiny" if setup.quick else size, setup.folder).items():
            ranks = int(options["devices"])
            sides.append(Side(name, "configured", options, ranks, threads=max(1, setup.cores // ranks)))
        return sides

    return make


PROBES = {1: "probe", 2: "probe of 2 ranks"}


def _middle(values: Sequence[Any]) -> Any:
    """Medians of numbers, of each entry where they are tables."""
    if isinstance(values[0], Mapping):
        return {key: _middle([value[key] for value in values]) for key in values[0]}
    if values[0] is None or values[0] in ("cpu", "cuda"):
        return values[0]
    found = median(map(float, values))  # 3e+10 is a text to YAML 1.1
    return int(found) if isinstance(values[0], int) else found


def planned_s(options: Mapping[str, Any], probe: Score, folder: Path) -> float:
    """Seconds of a step as planned from the medians of the probes."""
    from lightning_ptm.commands.plan import forecast

    hardware, config = folder / "hardware.yaml", folder / "config.yaml"
    hardware.write_text(yaml.safe_dump(_middle([turn.extra["hardware"] for turn in probe.turns])))
    strategy = {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": options["settings"]}
    document = {
        "trainer": {"precision": options["precision"], "strategy": strategy, "max_steps": 100_000},
        "model": {"class_path": "lightning_ptm.models.GPT", "init_args": {**options["model"], "meta": True}},
        "data": {"class_path": "lightning_ptm.data.TextBytes", "init_args": options["data"]},
    }
    config.write_text(yaml.safe_dump(document))
    return forecast(config, str(hardware))[0].seconds


def _figures(size: str) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        found = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for run, options in options_of_runs(size, folder).items():
                probe = PROBES[options["devices"]]
                if not {run, probe} <= scores.keys():
                    continue
                plan_s, real_s = planned_s(options, scores[probe], folder), scores[run].step_s
                ratio = max(plan_s, real_s) / min(plan_s, real_s)
                found.append(
                    Figure(f"{run}: planned and measured step", plan_s, "s", real_s, ratio, LIMIT, at_least=False)
                )
        return found

    return read


CASES = tuple(
    Case(
        id=f"planner-{size}",
        what=f"GPT {size}, seconds of a step as planned",
        sides=_sides(size),
        figures=_figures(size),
        tokens_per_step=batch * SEQUENCE,
        repeats=4,
        steps=8,
        warmup=4,
        before={"lock-free": LEAD_STEPS},
        longer={"lock-free": LONGER},
        limit_s=600.0,
    )
    for size, (_, batch) in MODELS.items()
    if size != "tiny"
)
