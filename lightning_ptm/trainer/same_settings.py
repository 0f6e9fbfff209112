"""Comparison of the settings that determine which collectives ranks call during set-up: if they differ, ranks would hang.

Owns nothing. Layouts are compared later (runtime/deciding/planner.py); settings that may differ (budgets, folders) are not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.config import Settings
from lightning_ptm.errors import RankError
from lightning_ptm.planning.mesh import Axis


def decisive(settings: Settings, precision: str) -> list[str]:
    """The settings that must be equal on all ranks, in words, one text per setting."""
    chooses = settings.parallel == "auto"  # and then with the settings of rank 0 for all ranks
    return [
        f"precision={precision!r}",
        f"parallel={settings.parallel!r}",
        *(f"{axis.setting}={getattr(settings, axis.setting)}" for axis in Axis if axis.setting),
        f"TensorParallel(overlap={settings.tensor_parallel.overlap!r})",
        f"context_parallel={settings.context_parallel!r}",
        f"micro_batches={settings.micro_batches}",
        f"pipeline_schedule={settings.pipeline_schedule!r}",
        f"pipeline_blocks={settings.pipeline_blocks!r}",
        "page_size='auto'" if settings.page_size == "auto" else "a page_size",
        f"matmul_precision={settings.tuning.matmul_precision!r}",
        "no weights" if settings.weights is None else "weights from files",
        f"async_save={settings.checkpoints.async_save}",
        f"recompute={settings.recompute!r}" if chooses else "a recompute",
        f"offload_activations={settings.offload_activations!r}" if chooses else "an offload_activations",
    ]


def refuse_other_settings(settings_of_ranks: Sequence[Sequence[str]]) -> None:
    """Compares the settings of all ranks.

    Args:
        settings_of_ranks: the result of `decisive` of each rank.

    Raises:
        RankError: a rank's settings differ from those of rank 0; on all ranks.
    """
    for rank, theirs in enumerate(settings_of_ranks):
        for ours, other in zip(settings_of_ranks[0], theirs, strict=True):
            if ours != other:
                raise RankError(
                    f"rank {rank} has {other}, where rank 0 has {ours}; they would wait for each other forever, so nothing "
                    f"was started; use the same settings and precision on all ranks"
                )
