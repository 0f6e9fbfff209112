"""Case of `lightning-ptm plan --parallel auto`: whether predictions order runs as measurements do.

Sides: probes of 1, 2 and 4 ranks, whose medians the plans are made from, and sixteen runs of small GPTs on as many ranks,
which divide layers, sequences or data, recompute, or have states on disk. The figure is Spearman's rank correlation of
predicted and measured seconds of a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

from benchmarks.case import Case, Figure, Scores, Setup
from benchmarks.cases import planner
from benchmarks.race import Side

LIMIT = 0.9
SEQUENCE = 256
PROBES = {ranks: f"probe of {ranks} rank{'s' * (ranks > 1)}" for ranks in (1, 2, 4)}
ON_DISK, AGAIN = {"offload_optimizer": "disk"}, {"recompute": "all"}
TENSOR, CONTEXT = "tensor_parallel_size", "context_parallel_size"

RUNS: tuple[tuple[int, int, int, Mapping[str, object]], ...] = (
    (1, 128, 2, {}),
    (1, 256, 2, {}),
    (1, 256, 8, {}),
    (1, 256, 4, AGAIN),
    (1, 256, 2, ON_DISK),
    (1, 512, 2, {}),
    (2, 128, 4, {}),
    (2, 256, 6, {}),
    (2, 256, 4, {TENSOR: 2}),
    (2, 256, 4, {CONTEXT: 2}),
    (2, 512, 2, {TENSOR: 2}),
    (2, 256, 2, ON_DISK),
    (4, 128, 1, {}),
    (4, 256, 2, {TENSOR: 2}),
    (4, 256, 4, {CONTEXT: 2}),
    (4, 256, 4, {TENSOR: 2, CONTEXT: 2}),
)
"""Ranks, width, samples of a rank, settings."""


def options_of_runs(folder: Path, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Returns the options of sides/configured.py, by run."""
    found = {}
    for ranks, width, batch, given in RUNS:
        words = " ".join(f"{name}={value}" for name, value in given.items())
        name = f"{ranks} rank{'s' * (ranks > 1)}, width {width}, batch {batch} {words}".rstrip()
        settings = {"disk_path": str(folder), "disk_memory": "2GiB", **given, "tuning": {"restore_weights": False}}
        model = {"vocab_size": 256, "width": 64 if quick else width, "layers": 2 if quick else 4, "heads": 4}
        found[name] = {
            "model": {**model, "sequence_length": SEQUENCE},
            "data": {"sequence_length": SEQUENCE, "batch_size": batch},
            "precision": "32-true",
            "settings": settings,
            "devices": ranks,
        }
    return found


def _sides(setup: Setup) -> Sequence[Side]:
    sides = []
    for ranks, name in PROBES.items():
        probed = {"folder": str(setup.folder), "ranks": ranks, "quick": setup.quick}
        sides.append(Side(name, "probe", probed, threads=max(1, setup.cores // ranks)))
    for name, options in options_of_runs(setup.folder, quick=setup.quick).items():
        ranks = int(options["devices"])
        sides.append(Side(name, "configured", options, ranks, threads=max(1, setup.cores // ranks)))
    return sides


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation of distinct numbers."""
    return correlation(*([sorted(values).index(value) for value in values] for values in (first, second)))


def _figures(scores: Scores) -> Sequence[Figure]:
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for run, options in options_of_runs(folder, quick=False).items():
            probe = PROBES[options["devices"]]
            if {run, probe} <= scores.keys():
                planned_s = planner.planned_s(options, scores[probe], folder)
                found.append(Figure(f"{run}: planned and measured step", planned_s, "s", scores[run].step_s))
    if len(found) == len(RUNS) and len({figure.other for figure in found}) > 1:
        value = rank_correlation([figure.ours for figure in found], [figure.other or 0.0 for figure in found])
        found.append(Figure("rank correlation of planned and measured steps", value, "", 1.0, value, LIMIT))
    return found


CASES = (
    Case(
        id="ranking",
        what=f"{len(RUNS)} runs of small GPTs on 1, 2 and 4 ranks, in the order of their steps",
        sides=_sides,
        figures=_figures,
        repeats=3,
        steps=4,
        warmup=4,
        limit_s=600.0,
    ),
)
