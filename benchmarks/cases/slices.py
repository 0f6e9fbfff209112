"""Cases of units in slices of the batch: parameters and optimizer states on disk, or all in RAM.

Sides, on the same GPT, 8 samples a step:
  ours         slices=8 on one batch of 8 samples
  accumulated  accumulate_grad_batches=8 on batches of one; in RAM with recompute="all", so that both compute the same, and
               have the activations of one unit for one sample at a time
  recomputed   in RAM alone: recompute="all" on the whole batch. It has the activations of one unit for all samples, so there
               is no bar: kernels compute more samples at a time, in more memory

With `slow_disk`, the disk is slowed down to a rate at which weights take longer to be read than to be used, as on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.case import MIB, Case, Figure, Scores, Setup, of_gpt, peak, step
from benchmarks.gpt import SHAPES, GPTShape
from benchmarks.race import Side

SLICES, SEQUENCE, RAM_SEQUENCE = 8, 64, 512
PARAMETER_BYTES = 2
"""Bytes of a parameter that computes in bf16."""


SLOW_DISK_BYTES_PER_S = 300e6


def _device_bytes(shape: GPTShape) -> int:
    """Returns room for what is no block, its gradients and their sums, and for four blocks: others are read again."""
    rest = shape.numel - shape.layers * shape.block_numel
    return PARAMETER_BYTES * 4 * (rest + shape.block_numel) + 8 * MIB


def _sides(disk_bytes_per_s: float | None) -> Callable[[Setup], Sequence[Side]]:
    return lambda setup: _on_disk(setup, disk_bytes_per_s)


def _on_disk(setup: Setup, disk_bytes_per_s: float | None) -> Sequence[Side]:
    shape = setup.shape("124M", sequence=SEQUENCE)
    slow = {} if disk_bytes_per_s is None else {"disk_bytes_per_s": disk_bytes_per_s}
    settings = {
        "offload_parameters": "disk",
        "offload_optimizer": "disk",
        "device_memory": _device_bytes(shape),
        "page_size": MIB,
    }

    def folder(name: str) -> dict[str, object]:
        return {**settings, "disk_path": setup.subfolder(name)}

    accumulated = {**of_gpt(shape, batch=1), "accumulate": SLICES, **slow}
    return [
        setup.ours({**of_gpt(shape, batch=SLICES), **slow}, {**folder("slices"), "slices": SLICES}),
        setup.ours(accumulated, folder("accumulated"), name="accumulated"),
    ]


def _in_ram(ranks: int) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        shape = setup.shape("25M", sequence=RAM_SEQUENCE)
        whole = of_gpt(shape, batch=SLICES)
        accumulated = {**of_gpt(shape, batch=1), "accumulate": SLICES}
        threads = max(1, setup.cores // ranks)
        return [
            setup.ours(whole, {"slices": SLICES}, ranks=ranks, threads=threads),
            setup.ours(accumulated, {"recompute": "all"}, name="accumulated", ranks=ranks, threads=threads),
            setup.ours(whole, {"recompute": "all"}, name="recomputed", ranks=ranks, threads=threads),
        ]

    return make


def _ram_figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "accumulated", limit=1.03),
        *peak(scores, "accumulated"),
        *step(scores, "recomputed"),
        *peak(scores, "recomputed"),
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
    *(
        Case(
            id=f"{name}-124M",
            what=f"GPT 124M, states and parameters on disk{where}, {SLICES} x {SEQUENCE} tokens a step, bf16-mixed",
            sides=_sides(disk_bytes_per_s),
            figures=_figures,
            tokens_per_step=SLICES * SEQUENCE,
            repeats=repeats,
            steps=1,
            warmup=2,
            limit_s=600,
        )
        for name, where, disk_bytes_per_s, repeats in (
            ("slices", "", None, 5),
            # An accumulated step takes a minute or more.
            ("slices_slow_disk", f" of {SLOW_DISK_BYTES_PER_S / 1e6:.0f} MB/s", SLOW_DISK_BYTES_PER_S, 2),
        )
    ),
    *(
        Case(
            id=f"slices_ram-25M{suffix}",
            what=f"GPT 25M, all in RAM{where}, {SLICES} x {RAM_SEQUENCE} tokens a step of a rank, bf16-mixed",
            sides=_in_ram(ranks),
            figures=_ram_figures,
            tokens_per_step=ranks * SLICES * RAM_SEQUENCE,
            repeats=7,
            steps=1,
            warmup=2,
            limit_s=600,
        )
        for ranks, suffix, where in ((1, "", ""), (2, "-two_ranks", " of two ranks"))
    ),
)
