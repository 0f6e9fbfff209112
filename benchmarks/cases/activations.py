"""Cases of what becomes of activations: on disk, recomputed, or kept, on a CPU with every model state in RAM.

Sides, on the same GPT, 4 x 512 tokens:
  kept        AngelPTMStrategy, activations in RAM
  ours        the same with offload_activations="disk"
  recomputed  the same with recompute="all"
  states      as kept, with 8 tokens: what is in RAM besides activations

All return freed memory to the system, so that a peak is one of live bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import MIB, Case, Figure, Scores, Setup, of_gpt, step
from benchmarks.race import Side

BATCH, SEQUENCE = 4, 512


def _sides(setup: Setup) -> Sequence[Side]:
    shape = setup.shape("124M")
    options = of_gpt(shape if setup.quick else shape.with_sequence(SEQUENCE), batch=BATCH)
    few = of_gpt(shape.with_sequence(8), batch=1)
    shared = {
        "disk_path": str(setup.folder),
        "offload_parameters": "device",
        "offload_optimizer": "host",
        "tuning": {"freed_memory": "return"},
    }
    return [
        setup.ours(options, {**shared, "offload_activations": "disk"}),
        setup.ours(options, shared, name="kept"),
        setup.ours(options, {**shared, "recompute": "all"}, name="recomputed"),
        setup.ours(few, shared, name="states"),
    ]


def _figures(scores: Scores) -> Sequence[Figure]:
    return [
        *step(scores, "kept", limit=1.10),
        *step(scores, "recomputed"),
        *_activations(scores, "kept", limit=0.55),
        *_activations(scores, "recomputed"),
    ]


def _activations(scores: Scores, other: str, limit: float | None = None) -> list[Figure]:
    """Peak memory besides that of model states, ours over another side's."""
    if not {"ours", other, "states"} <= scores.keys():
        return []
    states = scores["states"].peak_rss_bytes
    mine, theirs = ((scores[side].peak_rss_bytes - states) / MIB for side in ("ours", other))
    if theirs <= 0:  # tiny sizes
        return []
    name = f"peak of activations over {other}"
    return [Figure(name, mine, "MiB", theirs, mine / theirs, limit, at_least=False)]


CASES = (
    Case(
        id="activations-124M",
        what="GPT 124M, everything but activations in RAM, bf16-mixed",
        sides=_sides,
        figures=_figures,
        tokens_per_step=BATCH * SEQUENCE,
        repeats=3,
        steps=1,
        warmup=1,
        limit_s=900,
    ),
)
