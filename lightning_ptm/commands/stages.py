"""Prediction of a pipeline, from predictions of one rank of each of its stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from lightning_ptm.forecasting.pipeline import PipelineForecast, StageForecast, StageSeconds, replayed
from lightning_ptm.forecasting.prediction import Prediction


@dataclasses.dataclass(frozen=True, slots=True)
class StageAnswer:
    """Prediction of one stage.

    Attributes:
        prediction: that of one of its ranks, if it never waited for another stage.
        blocks: names of its units, in order.
        graphs: as in `StageForecast`.
        seconds: those of a micro-batch; None: the run does not fit.
        hidden_bytes: hidden states of a micro-batch that a rank sends to the next stage, which sends as many gradients back.
    """

    prediction: Prediction
    blocks: tuple[str, ...]
    graphs: int
    seconds: StageSeconds | None
    hidden_bytes: int

    def row(self) -> StageForecast:
        """The bytes of the stage, without seconds."""
        device = self.prediction.tiers["device"]
        return StageForecast(
            (self.blocks[0], self.blocks[-1], len(self.blocks)),
            device.page_bytes,
            device.activation_bytes,
            device.taken_bytes,
            self.graphs,
        )


def _sent_bytes(found: Sequence[StageAnswer], chunks: int) -> list[int]:
    """Returns the bytes that each stage sends for a micro-batch: the output of each of its runs of blocks but the model's
    last one, and the gradients of the hidden states that it has received."""
    last = len(found) - 1
    return [
        answer.hidden_bytes * (chunks - (stage == last)) + found[stage - 1].hidden_bytes * (chunks - (stage == 0))
        for stage, answer in enumerate(found)
    ]


def together(
    found: Sequence[StageAnswer], schedule: str, micro_batches: int, accumulate: int, chunks: int, *, shared_cores: bool
) -> Prediction:
    """Returns the prediction of a pipeline: bytes are those of the stage that takes most of the device, and links and waits
    those of the stage that is busiest.

    Args:
        found: by stage.
        accumulate: batches in a step.
        chunks: runs of blocks of each stage.
        shared_cores: whether updates run on the cores that compute.
    """
    each = [answer.prediction for answer in found]
    fullest = max(each, key=lambda one: one.tiers["device"].taken_bytes)
    rows = [answer.row() for answer in found]
    facts: dict[str, Any] = {name: getattr(fullest, name) for name in ("tiers", "homes", "pages", "optimizers")}
    # Pictures show the stage of rank 0, whose blueprint and activities they are given.
    facts |= {name: getattr(each[-1], name) for name in ("plan", "page_ticks", "activation_ticks")}
    written = max(each, key=lambda one: sum(one.disk_written_bytes))
    seconds = [answer.seconds for answer in found if answer.seconds is not None]
    if len(seconds) < len(found):
        short = next(stage for stage, one in enumerate(each) if not one.fits)
        return dataclasses.replace(
            each[short],
            **facts,
            reason=f"stage {short} of {len(found)}: {each[short].reason}",
            timing=None,
            seconds=None,
            pipeline=PipelineForecast(schedule, micro_batches, tuple(rows)),
        )
    replay, step_s = replayed(schedule, seconds, micro_batches, accumulate, chunks, shared_cores=shared_cores)
    busiest = max(range(len(found)), key=lambda stage: each[stage].seconds or 0.0)
    step_s = max(step_s, each[busiest].seconds or 0.0)
    rows = [
        dataclasses.replace(
            row,
            forward_s=of_stage.cost.forward_s,
            backward_s=of_stage.cost.backward_s,
            busy_s=busy_s * accumulate,
            update_s=of_stage.update_s,
            idle_s=(replay.step_s - busy_s) * accumulate,
            sent_bytes=sent_bytes * micro_batches * accumulate,
            send_s=send_s * accumulate,
            exposed_s=exposed_s * accumulate,
        )
        for row, sent_bytes, of_stage, busy_s, send_s, exposed_s in zip(
            rows,
            _sent_bytes(found, chunks),
            seconds,
            replay.busy_s,
            replay.send_s,
            replay.exposed_s,
            strict=True,
        )
    ]
    pipeline = PipelineForecast(
        schedule,
        micro_batches,
        tuple(rows),
        replay.bubble,
        replay.hidden_s * accumulate,
        sum(replay.exposed_s) * accumulate,
    )
    return dataclasses.replace(
        each[busiest],
        **facts,
        seconds=step_s,
        stages_wait_s=step_s - (each[busiest].seconds or 0.0),
        binds=f"stage {busiest}: {each[busiest].binds} without waits for other stages",
        disk_written_bytes=written.disk_written_bytes,
        disk_life=written.disk_life,
        pipeline=pipeline,
    )
