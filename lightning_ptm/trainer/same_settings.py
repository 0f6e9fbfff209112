"""Settings by which ranks decide what they do together while a run is set up: if they differ, they would wait for each other
before anything else is compared.

Owns nothing. What is laid out is compared later (runtime/deciding/planner.py), and what may differ (budgets, folders) is not.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning_ptm.config import Settings
from lightning_ptm.errors import RankError


def decisive(settings: Settings, precision: str) -> list[str]:
    """In words, one a setting."""
    return [
        f"precision={precision!r}",
        f"tensor_parallel_size={settings.tensor_parallel_size}",
        f"expert_parallel_size={settings.expert_parallel_size}",
        "page_size='auto'" if settings.page_size == "auto" else "a page_size",
        f"matmul_precision={settings.tuning.matmul_precision!r}",
        "no weights" if settings.weights is None else "weights from files",
        f"async_save={settings.checkpoints.async_save}",
    ]


def refuse_other_settings(told: Sequence[Sequence[str]]) -> None:
    """
    Args:
        told: what is decisive, by rank.

    Raises:
        RankError: some rank has not what the first has; on all of them.
    """
    for rank, theirs in enumerate(told):
        for ours, other in zip(told[0], theirs, strict=True):
            if ours != other:
                raise RankError(
                    f"rank {rank} has {other}, where rank 0 has {ours}; they would wait for each other for ever, so nothing "
                    f"is done; use the same settings and precision on all ranks"
                )
