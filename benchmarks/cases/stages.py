"""Cases of pipeline stages, one thread each. A turn lasts as long as its slowest rank.

Sides of `stages_bubble`: schedules over blocks that sleep (sides/stages.py), so that four stages fit on two cores. The bubble
is the part of a step in which a stage is not in a block; its bar is that of the schedule with nothing but blocks. Seconds as
planned are those of the replay that `lightning-ptm plan` uses, with the blocks' seconds. Both take the seconds that blocks
were found to sleep, which are some more than asked for.

Sides of `stages_torch`, the same GPT with the same global batch in fp32:
  ours         AngelPTMStrategy(pipeline_parallel_size=2, pipeline_schedule="1f1b")
  torch        torch's PipelineStage and Schedule1F1B (sides/torch_stages.py)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.case import Case, Figure, Scores, Setup, of_gpt, step
from benchmarks.race import Side

BLOCK_S = 0.2
"""Seconds of a block's forward; a backward takes twice as long."""
STAGES, MICRO_BATCHES, BATCH = 2, 4, 8
SEQUENCE = 512


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Stages, micro-batches and blocks of a side."""

    schedule: str
    stages: int
    micro_batches: int
    blocks: int

    @property
    def runs(self) -> int:
        """Runs of blocks of a stage."""
        from lightning_ptm.planning.schedules import SEVERAL_CHUNKS

        return 2 if self.schedule in SEVERAL_CHUNKS else 1

    def planned_s(self, busy_s: float) -> float:
        """Returns the seconds of a step by the replay of a plan.

        Args:
            busy_s: seconds of a step in which each stage computes.
        """
        from lightning_ptm.planning.schedules import actions
        from lightning_ptm.planning.stages import StageCost, replay

        orders = [
            actions(self.schedule, self.stages, stage, self.micro_batches, self.runs) for stage in range(self.stages)
        ]
        forward_s = busy_s / 3 / self.micro_batches / self.runs
        return replay(orders, [StageCost(forward_s, 2 * forward_s)] * (self.stages * self.runs)).step_s

    @property
    def bubble(self) -> float:
        """Share of a step in which a stage waits, of the schedule alone: (p - 1) / (v m + p - 1), v runs of blocks."""
        waits = self.stages - 1
        return waits / (self.runs * self.micro_batches + waits)


PIPELINES = {
    "1f1b on 2": Pipeline("1f1b", 2, 4, 2),
    "1f1b on 4": Pipeline("1f1b", 4, 8, 4),
    "interleaved on 4": Pipeline("interleaved", 4, 8, 8),
}


def _bubble(setup: Setup) -> Sequence[Side]:
    found = []
    for name, each in PIPELINES.items():
        settings = {
            "pipeline_parallel_size": each.stages,
            "micro_batches": each.micro_batches,
            "pipeline_schedule": each.schedule,
        }
        block_s = BLOCK_S / 10 if setup.quick else BLOCK_S
        options = {"blocks": each.blocks, "block_s": block_s, "batch": each.micro_batches, "settings": settings}
        found.append(Side(name, "stages", options, each.stages, threads=1))
    return found


def _bubble_figures(scores: Scores) -> Sequence[Figure]:
    found = []
    for name, each in PIPELINES.items():
        if name not in scores:
            continue
        real_s, busy_s = scores[name].step_s, scores[name].extra("slept_s")
        planned_s, bubble = each.planned_s(busy_s), 1 - busy_s / real_s
        found += [
            Figure(f"{name}: bubble over the schedule's", bubble, "", each.bubble, bubble / each.bubble, 1.1, False),
            Figure(f"{name}: step over the planned one", real_s, "s", planned_s, real_s / planned_s, 1.2, False),
        ]
    return found


def _torch(setup: Setup) -> Sequence[Side]:
    options = of_gpt(setup.shape("25M", sequence=SEQUENCE), batch=BATCH)
    settings = {"pipeline_parallel_size": STAGES, "micro_batches": MICRO_BATCHES, "pipeline_schedule": "1f1b"}
    return [
        setup.ours({**options, "precision": "32-true"}, settings, ranks=STAGES, threads=1),
        Side("torch", "torch_stages", {**options, "micro_batches": MICRO_BATCHES}, STAGES, threads=1),
    ]


def _torch_figures(scores: Scores) -> Sequence[Figure]:
    return step(scores, "torch", limit=1.03, name="step over that of torch's stages")


CASES = (
    Case(
        id="stages_bubble",
        what=f"2 and 4 pipeline stages, blocks of {BLOCK_S} s forward and {2 * BLOCK_S} s backward (sleeping)",
        sides=_bubble,
        figures=_bubble_figures,
        repeats=2,
        steps=3,
        warmup=9,  # stages compute batches 0, 1, 2, 4, 8 and 16 again, to compare their losses
    ),
    Case(
        id="stages_torch",
        what=f"GPT 25M on two pipeline stages, everything in RAM, {MICRO_BATCHES} micro-batches, fp32",
        sides=_torch,
        figures=_torch_figures,
        tokens_per_step=BATCH * SEQUENCE,
        repeats=4,
        steps=3,
        warmup=17,
    ),
)
