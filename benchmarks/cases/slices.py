"""Cases of units in slices of the batch, with parameters and optimizer states on disk.

Sides, on the same GPT, 8 samples a step:
  ours         slices=8 on one batch of 8 samples
  accumulated  accumulate_grad_batches=8 on batches of one
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import MIB, Case, Figure, Scores, Setup, of_gpt, step
from benchmarks.gpt import SHAPES, GPTShape
from benchmarks.race import Side

SLICES, SEQUENCE = 8, 64
PARAMETER_BYTES = 2
"""Bytes of a parameter that computes in bf16."""


def _device_bytes(shape: GPTShape) -> int:
    """Returns room for what is no block, its gradients and their sums, and for four blocks: others are read again."""
    rest = shape.numel - shape.layers * shape.block_numel
    return PARAMETER_BYTES * 4 * (rest + shape.block_numel) + 8 * MIB


def _sides(setup: Setup) -> Sequence[Side]:
    shape = setup.shape("124M", sequence=SEQUENCE)
    settings = {
        "offload_parameters": "disk",
        "offload_optimizer": "disk",
        "device_memory": _device_bytes(shape),
        "page_size": MIB,
    }

    def folder(name: str) -> dict[str, object]:
        return {**settings, "disk_path": setup.subfolder(name)}

    return [
        setup.ours(of_gpt(shape, batch=SLICES), {**folder("slices"), "slices": SLICES}),
        setup.ours({**of_gpt(shape, batch=1), "accumulate": SLICES}, folder("accumulated"), name="accumulated"),
    ]


def _figures(scores: Scores) -> Sequence[Figure]:
    found = step(scores, "accumulated", limit=1 / 1.5)
    if found:
        size = PARAMETER_BYTES * SHAPES["124M"].with_sequence(SEQUENCE).numel
        mine, theirs = (_of_step(scores, side, "parameter_read_bytes") for side in ("ours", "accumulated"))
        name = "bytes of parameters read from disk in a step over their size"
        found.append(Figure(name, mine / MIB, "MiB", size / MIB, mine / size, 2.1, at_least=False))
        found.append(Figure(f"{name}, accumulated", theirs / MIB, "MiB", size / MIB, theirs / size))
        mine, theirs = (_of_step(scores, side, "written_page_bytes") for side in ("ours", "accumulated"))
        found.append(Figure("bytes written in a step over accumulated", mine / MIB, "MiB", theirs / MIB, mine / theirs))
    return found


def _of_step(scores: Scores, side: str, number: str) -> float:
    """Returns a number of the last turn, for one step."""
    turn = scores[side].turns[-1]
    value: float = turn.extra[number]
    return value / turn.steps


CASES = (
    Case(
        id="slices-124M",
        what=f"GPT 124M, states and parameters on disk, {SLICES} x {SEQUENCE} tokens a step, bf16-mixed",
        sides=_sides,
        figures=_figures,
        tokens_per_step=SLICES * SEQUENCE,
        repeats=5,
        steps=1,
        warmup=2,
        limit_s=600,
    ),
)
