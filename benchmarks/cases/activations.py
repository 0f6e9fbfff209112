"""Cases of what becomes of activations: on disk, recomputed, or kept, on a CPU with every model state in RAM.

Sides, on this project's GPT, 4 x 512 tokens, the loss in slices of LOSS_TOKENS, so that the peak is one of blocks:
  kept        AngelPTMStrategy, activations in RAM
  ours        the same with offload_activations="disk"
  recomputed  the same with recompute="all"
  states      as kept, with 8 tokens: what is in RAM besides activations

All return freed memory to the system, so that a peak is one of live bytes.

Cases of the choice: in a memory limit in which not all units can be kept, what the strategy chooses by unit (side "auto") is
compared with FIXED, twelve choices of `recompute` and `offload_activations` for all units alike, each in a control group of
its own. A fixed choice that the limit refuses (CapacityError) is none of those that are compared. On a CPU,
`offload_activations="host"` is none either: activations are in RAM already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
        side("kept", recompute="none", offload_activations="none"),
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


# --- The choice of a run ------------------------------------------------------------------------------------------------

FIXED = tuple(itertools.product(("none", "all", "every 2nd", "every 3rd", "every 4th", "every 6th"), ("none", "disk")))
"""Values of `recompute` and `offload_activations`."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A model in little memory.

    Attributes:
        what: for people.
        family, model, data: as sides/configured.py takes them.
        limit_bytes: memory of each side's process, all that it takes included.
        tokens: tokens of a step that the model reads.
    """

    what: str
    family: str
    model: Mapping[str, object]
    data: Mapping[str, int]
    limit_bytes: int

    @property
    def tokens(self) -> int:
        return self.data["sequence_length"] * self.data["batch_size"]


JOBS = {
    "25M": _Job(
        "GPT 25M",
        "gpt",
        {"width": 512, "layers": 8, "heads": 8, "sequence_length": 512},
        {"sequence_length": 512, "batch_size": 8},
        1120 * MIB,
    ),
    "t5": _Job(
        "T5 of width 256, 4 + 4 blocks",
        "t5",
        {"width": 256, "layers": 4, "heads": 4},
        {"sequence_length": 128, "batch_size": 80},
        1000 * MIB,
    ),
}


def _choices(job: _Job) -> Callable[[Setup], Sequence[Side]]:
    def make(setup: Setup) -> Sequence[Side]:
        def side(name: str, recompute: str, to: str) -> Side:
            settings: dict[str, object] = {"recompute": recompute, "offload_activations": to}
            options = {
                "family": job.family,
                "model": {**job.model, "layers": 2} if setup.quick else job.model,
                "data": {**job.data, "batch_size": 2} if setup.quick else job.data,
                "settings": {
                    **settings,
                    "disk_path": setup.subfolder(name.replace(" ", "_")),
                    "offload_parameters": "device",
                    "offload_optimizer": "host",
                    "tuning": {"restore_weights": False},
                    **setup.settings,
                },
                "precision": "bf16-mixed",
                "may_not_fit": name != "auto",
            }
            group = setup.memory_cap(job.limit_bytes, f"_{name.replace(' ', '_')}")
            return Side(name, "configured", options, threads=setup.cores, memory_group=group)

        fixed = [side(f"{recompute} {to}", recompute, to) for recompute, to in FIXED]
        return [side("auto", "auto", "auto"), *fixed]

    return make


def _choice_figures(scores: Scores) -> Sequence[Figure]:
    fixed = {name: score for name, score in scores.items() if name != "auto"}
    if "auto" not in scores or not fixed:
        return []
    auto = scores["auto"]
    best = min(fixed, key=lambda name: fixed[name].step_s)
    print(f"the fastest of {len(fixed)} fixed choices that fit: {best}")
    mine = [turn.extra["mean_loss"] for turn in auto.turns]
    equal = sum(mine == [turn.extra["mean_loss"] for turn in score.turns] for score in fixed.values())
    return [
        *step(scores, best, ours="auto", limit=1.03, name="step as chosen over the fastest fixed choice that fits"),
        Figure("fixed choices that fit, of twelve", len(fixed), ""),
        Figure("of these, with the losses of the run that chooses", equal, "", len(fixed), equal / len(fixed), 1.0),
    ]


CASES = (
    *(
        Case(
            id=f"activations_auto-{name}",
            what=f"{job.what}, {job.limit_bytes // MIB} MiB of memory in all, activations as chosen by the run, bf16-mixed",
            sides=_choices(job),
            figures=_choice_figures,
            tokens_per_step=job.tokens,
            repeats=5,
            steps=1,
            warmup=4,  # the run looks, measures and chooses
            limit_s=300,
        )
        for name, job in JOBS.items()
    ),
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
