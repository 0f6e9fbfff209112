"""`lightning-ptm plan` of runs whose ranks divide experts: what one rank holds, computes, sends and waits for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_ptm.cli import main
from lightning_ptm.commands.plan import forecast
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.prediction import Prediction, render
from lightning_ptm.models.gpt import GPT
from lightning_ptm.models.moe import Expert
from lightning_ptm.planning.plan import Plan
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.engine.predicted_memory import predicted_memory
from lightning_ptm.terms import Kind, Link, Operation, Phase

WIDTH, INNER, EXPERTS, BATCH, LENGTH = 64, 256, 8, 4, 32
EXPERT_NUMEL = 2 * WIDTH * INNER
RATES = ("device_memory", "host_memory", "host_to_device", "device_to_host", "intra_node", "inter_node")
MACHINE = {
    "device": "cuda",
    "ranks_per_node": 4,
    "device_memory": "64MiB",
    "host_memory": "1GiB",
    "disk_memory": 0,
    "cpu_cores": 4,
    "compute_flops_per_s": {"bfloat16": 1e12},
    "compute_efficiency": 1,
    **{f"{name}_bytes_per_s": 1e9 for name in RATES},
    "disk_read_bytes_per_s": None,
    "disk_write_bytes_per_s": None,
}


KEPT = {"recompute": "none", "offload_activations": "none"}


def planned(
    folder: Path,
    strategy: dict[str, Any] | None = None,
    nodes: int = 2,
    model: dict[str, Any] | None = None,
    machine: dict[str, Any] | None = None,
    class_path: str = "lightning_ptm.models.T5MoE",
    **options: Any,
) -> tuple[Prediction, Blueprint]:
    """On nodes of four devices, each with 64 MiB and a quarter of 1 GiB of RAM."""
    settings = {"page_size": "64KiB", "units": ["Block", "Expert"], "expert_parallel_size": 4, **KEPT} | (
        strategy or {}
    )
    sizes = {
        "width": WIDTH,
        "feed_forward_width": INNER,
        "experts": EXPERTS,
        "layers": 2,
        "heads": 2,
        "vocab_size": 300,
    }
    data = {"path": str(folder / "text.txt"), "sequence_length": LENGTH, "batch_size": BATCH}
    document = {
        "trainer": {
            "precision": "bf16-mixed",
            "max_steps": 1,
            "strategy": {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": settings},
        },
        "model": {"class_path": class_path, "init_args": (sizes if model is None else model) | {"meta": True}},
        "data": {"class_path": "lightning_ptm.data.SpanCorruption", "init_args": data},
    }
    text = folder / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    (folder / "config.yaml").write_text(yaml.safe_dump(document))
    (folder / "machine.yaml").write_text(yaml.safe_dump(MACHINE | (machine or {})))
    return forecast(folder / "config.yaml", str(folder / "machine.yaml"), nodes, **options)


def moved(found: Prediction, link: Link) -> int:
    assert found.timing is not None
    return next(use.bytes for use in found.timing.links if use.link is link)


def test_a_rank_holds_its_part_of_the_experts_and_its_share_of_the_rest(tmp_path: Path) -> None:
    whole, _ = planned(tmp_path, {"expert_parallel_size": 1})
    found, blueprint = planned(tmp_path)
    assert found.numel == whole.numel and found.ranks == 8
    held = [unit for unit in blueprint.by_need if unit not in blueprint.layout.remote_flats]
    assert len(held) == 2 * EXPERTS // 4
    # Two ranks hold each of them, and half of its bytes.
    of_experts = len(held) * EXPERT_NUMEL * 2 // 2
    assert sum(flat.shard_bytes for unit in held for flat in blueprint.layout.flats_of(unit)) == of_experts
    assert sum(found.homes["parameter"].values()) == pytest.approx(sum(whole.homes["parameter"].values()), rel=0.05)
    # Instead of every expert, a rank gathers and reduces its own, with one other.
    undivided = 2 * EXPERTS * EXPERT_NUMEL * 2 * 7 / 8
    divided = len(held) * EXPERT_NUMEL * 2 / 2
    less = moved(whole, Link.COLLECTIVE) - moved(found, Link.COLLECTIVE)
    assert less == pytest.approx(2 * (undivided - divided), rel=0.05)


@pytest.mark.parametrize(("recompute", "exchanges"), [("none", 4), ("all", 6)])
def test_tokens_go_there_and_back_in_forward_and_backward(tmp_path: Path, recompute: str, exchanges: int) -> None:
    found, _ = planned(tmp_path, {"recompute": recompute})
    assert found.timing is not None
    # Of the tokens of encoder and decoder three quarters leave a rank. 5 bytes of 32 are taken out, in 2 spans.
    tokens = BATCH * (LENGTH - 5 + 2 + 1 + 5 + 2 + 2)
    sent = exchanges * tokens * 3 // 4 * WIDTH * 2
    assert moved(found, Link.EXCHANGE) == pytest.approx(sent, rel=0.02)
    stalls = {stall.cause: stall.seconds for stall in found.timing.stalls}
    assert stalls[Operation.EXCHANGE] == pytest.approx(sent / 1e9, rel=0.02)
    assert found.timing.seconds == pytest.approx(found.timing.compute_s + sum(stalls.values()))
    assert "while nothing computes" in render(found) and "for exchange" in render(found)


def test_a_group_on_two_nodes_waits_for_the_network(tmp_path: Path) -> None:
    inside, _ = planned(tmp_path)
    across, _ = planned(tmp_path, {"expert_parallel_size": 8})
    assert inside.timing is not None and across.timing is not None
    busy = [{use.link: use.busy_s for use in found.timing.links}[Link.EXCHANGE] for found in (inside, across)]
    # A byte to each other rank: 3 at 1 GB/s, or 4 from each of 4 ranks through the node's 1 GB/s.
    assert busy[1] / busy[0] == pytest.approx((4 * 4 / 8) / (3 / 4), rel=0.02)


def test_experts_compute_the_tokens_of_their_group(tmp_path: Path) -> None:
    """So work is the same in all, on whole batches; and the activations are those of the rows that come."""
    whole, _ = planned(tmp_path, {"expert_parallel_size": 1}, batch_size=32)
    found, _ = planned(tmp_path, batch_size=32)
    assert found.flops == pytest.approx(whole.flops, rel=0.01)


def tasks_of(plan: Plan, unit: int) -> list[Operation]:
    return [task.operation for task in plan.tasks if task.unit == unit and task.kind is not Kind.PARAMETER]


def replayed(found: Prediction, blueprint: Blueprint) -> Plan:
    return predicted_memory(blueprint, found.plan, blueprint.trace).plan


def test_experts_are_fetched_when_tokens_come_and_kept_while_there_is_room(tmp_path: Path) -> None:
    away = {"offload_parameters": "host", "offload_optimizer": "host", "device_memory": "32MiB"}
    found, blueprint = planned(tmp_path, away | {"expert_parallel_size": 8})
    assert all(tick.unit not in blueprint.by_need for tick in blueprint.planned(blueprint.trace).ticks)
    order = [Operation.FETCH, Operation.COMPUTE, Operation.COMPUTE]
    end = [Operation.RELEASE, Operation.OFFLOAD, Operation.UPDATE]
    held = [unit for unit in blueprint.by_need if unit not in blueprint.layout.remote_flats]
    plan = replayed(found, blueprint)
    assert plan.tick_count == len(blueprint.trace.ticks)
    for unit in held:
        assert sorted(tasks_of(plan, unit), key=str) == sorted(order + end, key=str)
    # What the run makes of a device that holds few: fetched again for the backward.
    narrow, blueprint = planned(tmp_path, away | {"expert_parallel_size": 2, "device_memory": "1MiB"}, nodes=1)
    plan = replayed(narrow, blueprint)
    again = [
        tasks_of(plan, unit).count(Operation.GATHER)
        for unit in blueprint.by_need
        if unit not in blueprint.layout.remote_flats
    ]
    assert 2 in again
    assert max(narrow.page_ticks) <= 1 << 20
    backward = [tick.phase for tick in blueprint.trace.ticks].index(Phase.BACKWARD)
    assert any(task.operation is Operation.RELEASE and task.trigger < backward for task in plan.tasks)


def test_the_largest_batch_and_model_that_fit(tmp_path: Path) -> None:
    found, _ = planned(tmp_path, batch_size="auto")
    assert found.fits and found.batch_size > BATCH
    assert not planned(tmp_path, batch_size=found.batch_size + 2)[0].fits
    small = {"host_memory": "40MiB", "device_memory": "4MiB"}
    most = planned(tmp_path, machine=small, largest="experts")[0]
    assert most.fits and most.chosen["experts"] > EXPERTS
    model = {"width": WIDTH, "feed_forward_width": INNER, "layers": 2, "heads": 2, "vocab_size": 300}
    assert not planned(tmp_path, machine=small, model=model | {"experts": most.chosen["experts"] + 8})[0].fits
    with pytest.raises(CapacityError):  # not even the states
        planned(tmp_path, machine=small, model=model | {"experts": most.chosen["experts"] + 32})


def test_the_command_tells_of_the_exchange(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path)
    paths = [str(tmp_path / "config.yaml"), "--hardware", str(tmp_path / "machine.yaml")]
    plot = tmp_path / "plan.png"
    main(["plan", *paths, "--json", "--plot", str(plot), "--timeline", str(tmp_path / "step.json")])
    told = json.loads(capsys.readouterr().out)
    assert told["links"]["exchange"]["bytes"] > 0 and told["stalls_s"]["exchange"] > 0
    assert plot.stat().st_size > 0
    names = [event["name"] for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"]]
    assert any(name.startswith("exchange decoder.blocks.1.") for name in names)


class OwnLayer(nn.Module):
    """Whose routing nobody knows."""

    expert_group = None

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Expert(64, 64, gated=False, dropout=0.0) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[0](x)


class WithOwnLayer(GPT):
    def configure_model(self) -> None:
        super().configure_model()
        with torch.device("meta"):
            self.more = OwnLayer()


def uneven(folder: Path) -> None:
    planned(folder, {"expert_parallel_size": 3})


def too_few(folder: Path) -> None:
    planned(folder, {"expert_parallel_size": 8}, model={"width": 64, "experts": 4, "layers": 2, "heads": 2})


def foreign(folder: Path) -> None:
    model = {"width": 64, "layers": 2, "heads": 2, "sequence_length": 32}
    planned(folder, {"units": "auto"}, model=model, class_path=f"{__name__}.WithOwnLayer")


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (uneven, "expert_parallel_size=3 does not divide the number of ranks, 8"),
        (too_few, "has 4 experts and expert_parallel_size=8"),
        (foreign, r"more \(OwnLayer\) divides its experts over ranks, .*plan with expert_parallel_size=1"),
    ],
)
def test_what_cannot_be_planned_is_refused(tmp_path: Path, plan: Callable[[Path], None], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(tmp_path)
