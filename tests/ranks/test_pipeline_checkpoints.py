"""Checkpoints of any number of data ranks and stages go into any other: full, sharded and async, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.harness import run_ranks
from kit.ranks.pipeline_models import BATCH, StagedGPT
from kit.ranks.tensor_models import LENGTH, VOCABULARY
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2), (1, 4))
"""(data, stages)."""
KINDS = {
    "full": {"state_dict_type": "full"},
    "sharded": {"state_dict_type": "sharded"},
    "async": {"state_dict_type": "sharded", "async_save": True},
}
STEPS = 2


def name_of(layout: tuple[int, int], kind: str) -> str:
    return f"{kind} of data {layout[0]} x stages {layout[1]}.ckpt"


def run(layout: tuple[int, int], disk: Path, kind: str, resumed: Path | None, saved: Path) -> None:
    """Trains, or loads a checkpoint and trains no step, and saves."""
    data, stages = layout
    rank = int(os.environ.setdefault("RANK", "0"))
    torch.manual_seed(0 if resumed is None else 1)
    given: dict[str, Any] = {"checkpoints": KINDS[kind], "page_size": "64KiB", "disk_path": str(disk)}
    given |= {"offload_optimizer": "disk"} if stages % 2 == 0 else {}
    if stages > 1:
        schedule = "interleaved" if layout == (1, 2) else "1f1b"  # whose stages have other blocks
        given |= {"pipeline_parallel_size": stages, "micro_batches": 4, "pipeline_schedule": schedule}
    rows = torch.randint(3, VOCABULARY, (STEPS * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    sampler = DistributedSampler(rows, data, rank % data, shuffle=False)  # type: ignore[arg-type, var-annotated]
    trainer = quiet_trainer(
        strategy_with(**given),
        devices=data * stages,
        precision="bf16-mixed",
        use_distributed_sampler=False,
        max_steps=STEPS,
    )
    loader = DataLoader(rows, BATCH // data, sampler=sampler)  # type: ignore[arg-type]
    trainer.fit(StagedGPT(), loader, ckpt_path=None if resumed is None else str(resumed))
    assert trainer.global_step == STEPS
    trainer.save_checkpoint(saved)


def save_all(layouts: Sequence[tuple[int, int]], disk: Path, saved: Path) -> None:
    """Each kind is saved by a run of its own, of the same numbers."""
    for layout in layouts:
        for kind in KINDS:
            run(layout, disk, kind, None, saved / name_of(layout, kind))


def load_all(layouts: Sequence[tuple[int, int]], disk: Path, saved: Path) -> None:
    for into in layouts:
        for layout in LAYOUTS:
            for kind in KINDS:
                run(into, disk, "full", saved / name_of(layout, kind), saved / f"{into} from {name_of(layout, kind)}")


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """Returns all tensors of weights and optimizer states, by path."""
    found: dict[str, Tensor] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for name, each in value.items():
                walk(f"{path}.{name}", each)
        elif isinstance(value, (list, tuple)):
            for place, each in enumerate(value):
                walk(f"{path}[{place}]", each)

    loaded = torch.load(checkpoint, weights_only=False)
    for name in ("state_dict", "optimizer_states"):
        walk(name, loaded[name])
    return found


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_states_go_from_any_layout_into_any_other(disk: Path, tmp_path: Path) -> None:
    by_ranks: dict[int, list[tuple[int, int]]] = {}
    for data, stages in LAYOUTS:
        by_ranks.setdefault(data * stages, []).append((data, stages))
    for ranks, layouts in by_ranks.items():
        run_ranks(save_all, ranks, layouts, disk, tmp_path, limit_s=600)
    for ranks, layouts in by_ranks.items():
        run_ranks(load_all, ranks, layouts, disk, tmp_path, limit_s=900)
    for layout in LAYOUTS:
        expected = tensors_of(tmp_path / name_of(layout, "full"))
        assert sum(name.startswith("optimizer_states") for name in expected) > 2 * len(list(StagedGPT().parameters()))
        for into in LAYOUTS:
            for kind in KINDS:
                found = tensors_of(tmp_path / f"{into} from {name_of(layout, kind)}")
                assert found.keys() == expected.keys()
                different = [name for name, value in expected.items() if not torch.equal(found[name], value)]
                assert not different, (layout, kind, into, different[:3])
