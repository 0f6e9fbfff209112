"""Case of `lightning-ptm plan --parallel auto`: whether predictions order runs as measurements do.

Sides: probes of 1, 2 and 4 ranks, whose medians the plans are made from, and runs of small GPTs on as many ranks, which
divide layers, sequences, stages or data, recompute, or have states on disk. Figures are Spearman's rank correlation of
predicted and measured seconds of a step, and for each job (a model, ranks and samples of a step) the measured step of the
run that is the fastest by plan, beside that of the fastest.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

from benchmarks.case import Case, Figure, Scores, Setup
from benchmarks.cases import planner
from benchmarks.race import Side

LIMIT, CHOICE_LIMIT = 0.9, 1.1
SEQUENCE = 256
PROBES = {ranks: f"probe of {ranks} rank{'s' * (ranks > 1)}" for ranks in (1, 2, 4)}
ON_DISK, AGAIN = {"offload_optimizer": "disk"}, {"recompute": "all"}
TENSOR, CONTEXT, STAGE = "tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size"

JOBS: tuple[tuple[int, int, int, Sequence[Mapping[str, object]]], ...] = (
    (1, 128, 2, ({},)),
    (1, 256, 4, ({}, AGAIN, ON_DISK)),
    (1, 512, 2, ({}, AGAIN)),
    (2, 128, 8, ({}, {TENSOR: 2})),
    (2, 256, 4, ({}, {TENSOR: 2}, {CONTEXT: 2}, {STAGE: 2, "micro_batches": 2})),
    (2, 512, 2, ({}, {TENSOR: 2})),
    (4, 256, 8, ({}, {TENSOR: 2}, {CONTEXT: 2}, {TENSOR: 2, CONTEXT: 2})),
)
"""Ranks, width, samples of a step over all ranks, and the settings that are compared."""


def jobs_of_runs(folder: Path, *, quick: bool) -> list[dict[str, dict[str, Any]]]:
    """Returns the options of sides/configured.py, by job and run."""
    found = []
    for ranks, width, samples, settings in JOBS:
        runs = {}
        for given in settings:
            shared = math.prod(int(str(given.get(name, 1))) for name in (TENSOR, CONTEXT, STAGE))
            words = " ".join(f"{name}={value}" for name, value in given.items())
            name = f"{ranks} rank{'s' * (ranks > 1)} width {width} samples {samples} {words}".rstrip()
            model = {"vocab_size": 256, "width": 64 if quick else width, "layers": 2 if quick else 4, "heads": 4}
            runs[name] = {
                "model": {**model, "sequence_length": SEQUENCE},
                "data": {"sequence_length": SEQUENCE, "batch_size": samples * shared // ranks},
                "precision": "32-true",
                "settings": {
                    "disk_path": str(folder),
                    "disk_memory": "2GiB",
                    **given,
                    "tuning": {"restore_weights": False},
                },
                "devices": ranks,
            }
        found.append(runs)
    return found


def options_of_runs(folder: Path, *, quick: bool) -> dict[str, dict[str, Any]]:
    """Returns the options of sides/configured.py, by run."""
    return {name: options for runs in jobs_of_runs(folder, quick=quick) for name, options in runs.items()}


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
    found: list[Figure] = []
    choices: list[Figure] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for runs in jobs_of_runs(folder, quick=False):
            planned_s: dict[str, float] = {}
            for run, options in runs.items():
                probe = PROBES[options["devices"]]
                if {run, probe} <= scores.keys():
                    planned_s[run] = planner.planned_s(options, scores[probe], folder)
                    found.append(Figure(f"{run}: planned and measured step", planned_s[run], "s", scores[run].step_s))
            if 1 < len(planned_s) == len(runs):
                chosen = scores[min(planned_s, key=planned_s.__getitem__)].step_s
                best = min(scores[run].step_s for run in runs)
                title = f"{next(iter(runs))}: the fastest by plan and by measurement, of {len(runs)}"
                choices.append(Figure(title, chosen, "s", best, chosen / best, CHOICE_LIMIT, at_least=False))
    if len(found) == len(options_of_runs(Path(), quick=False)) and len({figure.other for figure in found}) > 1:
        value = rank_correlation([figure.ours for figure in found], [figure.other or 0.0 for figure in found])
        choices.append(Figure("rank correlation of planned and measured steps", value, "", 1.0, value, LIMIT))
    return found + choices


CASES = (
    Case(
        id="ranking",
        what="18 runs of small GPTs on 1, 2 and 4 ranks, in the order of their steps, and the choice among those of a job",
        sides=_sides,
        figures=_figures,
        repeats=3,
        steps=4,
        warmup=17,  # divided steps compute batches 0, 1, 2, 4, 8 and 16 again, to compare their losses
        limit_s=500.0,
    ),
)
