"""Cases with model states on disk, updates synchronous.

Sides:
  ours            AngelPTMStrategy
  disk            O_DIRECT alone, as many bytes read as written, as this disk is fastest (sides/disk.py)
  compute         forward and backward of the bf16 model alone, in RAM, no optimizer (sides/plain.py)
  deepspeed       ZeRO-3, optimizer on NVMe, one sub-group, as DeepSpeed comes (sides/deepspeed_zero3.py)
  deepspeed-pipe  the same in sub-groups of 20M parameters, with reads, update and writes overlapped
  bf16, int8      ours with this `optimizer_state_dtype`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.case import (
    GIB,
    MASTER_BYTES_PER_PARAMETER,
    MIB,
    RETURN_FREED_MEMORY,
    Case,
    Figure,
    Scores,
    Setup,
    of_gpt,
)
from benchmarks.environments import deepspeed_environment, installed_deepspeed
from benchmarks.gpt import SHAPES, shape_of_numel
from benchmarks.race import Score, Side, Turn

IN_RAM_BUT_MASTERS = {"offload_parameters": "device", "offload_optimizer": "disk"}
"""On a CPU the device tier is RAM."""


def page_speed(turn: Turn) -> float:
    """Bytes a second at which pages moved while any was being read or written."""
    moved: float = turn.extra["read_page_bytes"] + turn.extra["written_page_bytes"]
    return moved / turn.extra["disk_busy_s"]


# --- Master states on disk, so few tokens that the disk dominates ------------------------------------------------------


def _masters(setup: Setup) -> Sequence[Side]:
    shape = setup.shape("124M", sequence=32)
    options, moved = of_gpt(shape, batch=1), MASTER_BYTES_PER_PARAMETER * shape.numel
    return [
        setup.ours(options, {"disk_path": str(setup.folder), **IN_RAM_BUT_MASTERS}),
        setup.disk(step_bytes=moved, file_bytes=moved // 2),
        setup.compute(options),
    ]


def _masters_figures(scores: Scores) -> Sequence[Figure]:
    if not {"ours", "disk", "compute"} <= scores.keys():
        return []
    mine, disk = scores["ours"], scores["disk"]
    floor_s = max(scores["compute"].step_s, disk.step_s)
    disk_speed = disk.traffic_bytes / disk.step_s / 1e9
    speeds = sorted(page_speed(turn) for turn in mine.turns)
    speed = speeds[len(speeds) // 2] / 1e9
    return [
        Figure("step over max(compute, disk)", mine.step_s, "s", floor_s, mine.step_s / floor_s, 1.25, at_least=False),
        Figure("page bandwidth over the disk's", speed, "GB/s", disk_speed, speed / disk_speed, 0.85),
    ]


# --- DeepSpeed ---------------------------------------------------------------------------------------------------------


def _deepspeed(setup: Setup) -> Sequence[Side]:
    # DeepSpeed keeps tensors below 1 MB in RAM: the tiny model would not touch the disk.
    shape = SHAPES["25M" if setup.quick else "124M"]
    options = of_gpt(shape, batch=2)
    python, environment = installed_deepspeed(on_disk=True), deepspeed_environment("cpu")
    sides = [setup.ours(options, {"disk_path": str(setup.folder), **IN_RAM_BUT_MASTERS})]
    for name in ("deepspeed", "deepspeed-pipe"):
        theirs = {**options, "folder": setup.subfolder(name), "pipeline": name == "deepspeed-pipe"}
        sides.append(Side(name, "deepspeed_zero3", theirs, 1, setup.cores, python, environment))
    return sides


def _deepspeed_figures(scores: Scores) -> Sequence[Figure]:
    theirs = [scores[name] for name in ("deepspeed", "deepspeed-pipe") if name in scores]
    if not theirs or "ours" not in scores:
        return []
    fastest = min(theirs, key=lambda score: score.step_s)
    mine_s, other_s = scores["ours"].step_s, fastest.step_s
    print(f"the faster DeepSpeed is {fastest.side}")
    return [Figure("speed over DeepSpeed", mine_s, "s", other_s, other_s / mine_s, 1.889)]


# --- A memory limit ----------------------------------------------------------------------------------------------------

CAP_BYTES = 4 * GIB
STEP_LIMIT = 2.5


def _scale(numel: float, *, alone: bool) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        shape = setup.shape_of(numel)
        options = of_gpt(shape, batch=1)
        settings = {"disk_path": str(setup.folder), "recompute": "all"}
        homes = {"offload_parameters": "disk", "offload_optimizer": "disk"}
        group = setup.memory_cap(CAP_BYTES, "ours")
        sides = [setup.ours({**options, "meta": True}, settings | homes, memory_group=group)]
        if not alone:
            moved = 64 * MIB if setup.quick else 2 * GIB
            sides += [setup.disk(step_bytes=moved, file_bytes=moved), setup.compute(options, recompute=True)]
        return sides

    return make


def _scale_figures(scores: Scores) -> Sequence[Figure]:
    if "ours" not in scores:
        return []
    mine = scores["ours"]
    found = [Figure("step", mine.step_s, "s"), Figure("peak memory", mine.peak_rss_bytes / GIB, "GiB")]
    if {"disk", "compute"} <= scores.keys():
        disk = scores["disk"]
        floor_s = max(scores["compute"].step_s, mine.traffic_bytes / (disk.traffic_bytes / disk.step_s))
        ratio = mine.step_s / floor_s
        found.append(
            Figure(
                "step over max(compute, its disk traffic)", mine.step_s, "s", floor_s, ratio, STEP_LIMIT, at_least=False
            )
        )
    return found


# --- Peak memory -------------------------------------------------------------------------------------------------------

ALLOWANCE_BYTES = 600 * 10**6
MODEL_BYTES_PER_PARAMETER = 4
"""A 16-bit parameter and its gradient."""
GRADIENT_BYTES_PER_PARAMETER = 2


def _memory(setup: Setup) -> Sequence[Side]:
    options = of_gpt(setup.shape("124M"), batch=2)
    settings = {"disk_path": str(setup.folder), **IN_RAM_BUT_MASTERS, "tuning": {"freed_memory": "return"}}
    alone = setup.compute(options)
    return [
        setup.ours({**options, "meta": True}, settings),  # on the meta device, so that building the model is no peak
        Side(alone.name, alone.module, alone.options, threads=alone.threads, environment=RETURN_FREED_MEMORY),
    ]


def _memory_figures(scores: Scores) -> Sequence[Figure]:
    if not {"ours", "compute"} <= scores.keys():
        return []
    numel = SHAPES["124M"].numel
    allowed = MODEL_BYTES_PER_PARAMETER * numel + _activation_bytes(scores["compute"], numel) + ALLOWANCE_BYTES
    peak_bytes = scores["ours"].peak_rss_bytes
    name = "peak memory over 4 bytes a parameter, activations and 600 MB"
    return [Figure(name, peak_bytes / MIB, "MiB", allowed / MIB, peak_bytes / allowed, 1.0, at_least=False)]


def _activation_bytes(alone: Score, numel: int) -> float:
    idle_bytes: float = alone.turns[0].extra["idle_rss_bytes"]
    return alone.peak_rss_bytes - idle_bytes - GRADIENT_BYTES_PER_PARAMETER * numel


# --- Smaller optimizer states --------------------------------------------------------------------------------------------


def _state_dtype(disk_bytes_per_s: float | None) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        options = {**of_gpt(setup.shape_of(1.2e9), batch=1), "meta": True}
        if disk_bytes_per_s is not None:
            options["disk_bytes_per_s"] = disk_bytes_per_s
        settings = {"disk_path": str(setup.folder), "recompute": "all", **IN_RAM_BUT_MASTERS}
        return [
            setup.ours(
                options,
                settings | {"optimizer_state_dtype": dtype},
                name=dtype,
                memory_group=setup.memory_cap(CAP_BYTES, dtype),
            )
            for dtype in ("auto", "bf16", "int8")
        ]

    return make


def _state_dtype_figures(bars: bool) -> Callable[[Scores], Sequence[Figure]]:
    def read(scores: Scores) -> Sequence[Figure]:
        found = []
        for dtype, limit in (("bf16", 1.3), ("int8", 1.6)):
            if {dtype, "auto"} <= scores.keys():
                mine_s, exact_s = scores[dtype].step_s, scores["auto"].step_s
                name = f"{dtype}: speed over fp32 states"
                found.append(Figure(name, mine_s, "s", exact_s, exact_s / mine_s, limit if bars else None))
        return found

    return read


NUMEL_3B, NUMEL_1B = (shape_of_numel(numel).numel for numel in (3.0e9, 1.2e9))

CASES = (
    Case(
        id="disk_masters-124M",
        what="GPT 124M, masters on disk",
        sides=_masters,
        figures=_masters_figures,
        tokens_per_step=32,
    ),
    Case(
        id="deepspeed-124M",
        what="GPT 124M, masters on disk",
        sides=_deepspeed,
        figures=_deepspeed_figures,
        tokens_per_step=512,
        repeats=3,
        steps=2,
        warmup=1,
        limit_s=60.0,
    ),
    Case(
        id="scale-3.0B",
        what=f"GPT of {NUMEL_3B / 1e9:.1f} billion parameters, everything on disk, 4 GiB of memory in all",
        sides=_scale(3.0e9, alone=True),
        figures=_scale_figures,
        tokens_per_step=256,
        repeats=1,
        steps=1,
        warmup=1,
    ),
    Case(
        id="scale-1.2B",
        what=f"GPT of {NUMEL_1B / 1e9:.1f} billion parameters, everything on disk, 4 GiB of memory in all",
        sides=_scale(1.2e9, alone=False),
        figures=_scale_figures,
        tokens_per_step=256,
        repeats=2,
        steps=1,
        warmup=1,
    ),
    Case(
        id="memory-124M",
        what='GPT 124M, masters on disk, Tuning(freed_memory="return")',
        sides=_memory,
        figures=_memory_figures,
        tokens_per_step=512,
        repeats=3,
        steps=4,
    ),
    *(
        Case(
            id=f"state_dtype-1.2B{name}",
            what=f"GPT of {NUMEL_1B / 1e9:.1f} billion parameters, masters on {disk}, 4 GiB of memory in all",
            sides=_state_dtype(rate),
            figures=_state_dtype_figures(rate is not None),
            tokens_per_step=256,
            repeats=2,
            steps=1,
            warmup=1,
            limit_s=600.0,
        )
        for name, disk, rate in (("", "the machine's own disk", None), ("-500MB", "a disk of 500 MB/s", 500e6))
    ),
)
