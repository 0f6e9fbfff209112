"""Cases of what becomes of activations: on disk, recomputed, or kept, on a CPU with every model state in RAM.

Sides, on this project's GPT, 4 x 512 tokens, the loss in slices of LOSS_TOKENS, so that the peak is one of blocks:
  kept        AngelPTMStrategy, activations in RAM
  ours        the same with offload_activations="disk"
  recomputed  the same with recompute="all"
  states      as kept, with 8 tokens: what is in RAM besides activations

All return freed memory to the system, so that a peak is one of live bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.case import MIB, Case, Figure, Scores, Setup, step
from benchmarks.race import Side

BATCH, SEQUENCE, LOSS_TOKENS = 4, 512, 256


def _sides(setup: Setup) -> Sequence[Side]:
    shape = setup.shape("124M")
    shared = {
        "disk_path": str(setup.folder),
        "offload_parameters": "device",
        "offload_optimizer": "host",
        "tuning": {"freed_memory": "return", "restore_weights": False},
    }

    def side(name: str, *, sequence: int = SEQUENCE, batch: int = BATCH, **settings: object) -> Side:
        length = shape.sequence if setup.quick else sequence
        sizes = {"width": shape.width, "layers": shape.layers, "heads": shape.heads, "vocab_size": shape.vocabulary}
        options = {
            "model": {**sizes, "sequence_length": length, "tie_head": True, "loss_tokens": LOSS_TOKENS},
            "data": {"sequence_length": length, "batch_size": batch},
            "settings": {**shared, **settings, **setup.settings},
            "precision": "bf16-mixed",
        }
        return Side(name, "configured", options, threads=setup.cores)

    return [
        side("ours", offload_activations="disk"),
        side("kept"),
        side("recomputed", recompute="all"),
        side("states", sequence=8, batch=1),
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
    ratio = mine / theirs if min(mine, theirs) > 0 else None  # tiny sizes
    return [Figure(f"peak of activations over {other}", mine, "MiB", theirs, ratio, limit, at_least=False)]


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
