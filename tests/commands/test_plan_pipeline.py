"""`lightning-ptm plan` of pipelines: bytes and seconds of stages, the bubble, and what a run would refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from torch import Tensor, nn

from lightning_ptm import plan
from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.terms import Link

WIDTH, LENGTH, BATCH = 128, 32, 16
RATES = ("device_memory", "host_memory", "host_to_device", "device_to_host", "intra_node", "inter_node")


class Layer(nn.Module):
    def __init__(self, inner: int = 4 * WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden + self.down(torch.relu(self.up(hidden)))
        return out


class Stack(L.LightningModule):
    """Equal blocks, and almost nothing else."""

    def __init__(self, layers: int = 8, head: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, head, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Skipping(Stack):
    def forward(self, hidden: Tensor) -> Tensor:
        first = self.layers[0](hidden)
        out = first
        for layer in self.layers[1:]:
            out = layer(out)
        return self.head(out + first)  # type: ignore[no-any-return]


def machine(folder: Path, **changes: Any) -> str:
    """A node of four devices on which only compute takes time."""
    fields = {
        "device": "cuda",
        "ranks_per_node": 4,
        "device_memory": "64MiB",
        "host_memory": "1GiB",
        "disk_memory": 0,
        "cpu_cores": 4,
        "compute_flops_per_s": {"float32": 1e9},
        "compute_efficiency": 1,
        **{f"{name}_bytes_per_s": 1e15 for name in RATES},
        "disk_read_bytes_per_s": None,
        "disk_write_bytes_per_s": None,
    }
    path = folder / "machine.yaml"
    path.write_text(yaml.safe_dump(fields | changes))
    return str(path)


def planned(
    folder: Path, stages: int = 4, micro_batches: int = 8, module: nn.Module | None = None, **options: Any
) -> Prediction:
    rates = {name: options.pop(name) for name in list(options) if name.endswith(("_bytes_per_s", "_memory_of_device"))}
    if stages > 1:
        options |= {"pipeline_parallel_size": stages, "micro_batches": micro_batches}
    settings = {"page_size": "64KiB", "units": ["Layer"], "recompute": "none", "offload_activations": "none"} | options
    with torch.device("meta"):
        module = Stack() if module is None else module
    return plan(module, (options.pop("batch", BATCH), LENGTH, WIDTH), machine(folder, **rates), 4, **settings)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (4, 16)])
def test_the_bubble_of_equal_stages_is_that_of_the_formula(
    tmp_path: Path, schedule: str, stages: int, micro_batches: int
) -> None:
    found = planned(tmp_path, stages, micro_batches, pipeline_schedule=schedule)
    assert found.pipeline is not None and found.seconds is not None and found.timing is not None
    assert found.pipeline.bubble == pytest.approx((stages - 1) / (micro_batches + stages - 1), rel=0.02)
    assert found.seconds == pytest.approx(
        found.timing.compute_s * (micro_batches + stages - 1) / micro_batches, rel=0.02
    )
    assert found.waits_s + found.timing.compute_s == pytest.approx(found.seconds, rel=1e-3)
    one = planned(tmp_path, 1)
    assert one.timing is not None
    assert found.timing.compute_s == pytest.approx(one.timing.compute_s / stages, rel=0.02)
    assert found.flops == pytest.approx(one.flops / stages, rel=0.02)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8)])
def test_two_runs_of_blocks_on_each_stage_halve_the_waits(tmp_path: Path, stages: int, micro_batches: int) -> None:
    whole, found = (
        planned(tmp_path, stages, micro_batches, pipeline_schedule=schedule) for schedule in ("1f1b", "interleaved")
    )
    assert found.stages_wait_s == pytest.approx(whole.stages_wait_s / 2, rel=0.02)
    assert found.pipeline is not None and whole.pipeline is not None
    hidden = BATCH // micro_batches * LENGTH * WIDTH * 4 * micro_batches
    # Each stage sends hidden states and gradients twice, but for the two ends of the model.
    ends = [3 if stage in (0, stages - 1) else 4 for stage in range(stages)]
    assert [stage.sent_bytes for stage in found.pipeline.stages] == [each * hidden for each in ends]
    one, several = (each.pipeline.stages[0].activation_bytes for each in (whole, found) if each.pipeline is not None)
    assert one < several < one * (1.05 + (stages - 1) / (2 * stages))


def test_breadth_first_plans_one_pass_over_pages_on_disk(tmp_path: Path) -> None:
    options = {"disk_memory": "4GiB", "disk_read_bytes_per_s": 1e8, "disk_write_bytes_per_s": 1e8}
    settings = {"offload_parameters": "disk", "disk_path": str(tmp_path), "device_memory": "3584KiB"}
    read = {}
    for schedule in ("gpipe", "breadth_first"):
        found = planned(tmp_path, 2, 8, pipeline_schedule=schedule, **options, **settings)
        assert found.timing is not None, found.reason
        read[schedule] = next(use.bytes for use in found.timing.links if use.link is Link.DISK_READ)
    assert read["breadth_first"] < 0.5 * read["gpipe"]


def test_a_rank_has_its_share_of_equal_blocks(tmp_path: Path) -> None:
    whole, found = planned(tmp_path, 1), planned(tmp_path, 4)
    # Four ranks share all blocks, or each has a quarter of them: as many bytes.
    assert sum(found.homes["parameter"].values()) == pytest.approx(sum(whole.homes["parameter"].values()), rel=0.1)
    assert found.pipeline is not None
    assert [stage.blocks for stage in found.pipeline.stages] == [
        (f"layers.{first}", f"layers.{first + 1}", 2) for first in (0, 2, 4, 6)
    ]
    # No block is sharded: each stage has one rank. So the root alone is gathered and reduced, once a step.
    counts = set()
    for micro_batches in (4, 8):
        timing = planned(tmp_path, 4, micro_batches).timing
        assert timing is not None
        counts.add(next(use.collectives for use in timing.links if use.link is Link.COLLECTIVE))
    assert counts == {2}


def test_stages_keep_activations_of_as_many_micro_batches_as_their_schedule_says(tmp_path: Path) -> None:
    in_turn, all_first = (planned(tmp_path, pipeline_schedule=schedule).pipeline for schedule in ("1f1b", "gpipe"))
    assert in_turn is not None and all_first is not None
    assert [stage.graphs for stage in in_turn.stages] == [4, 3, 2, 1]
    assert [stage.graphs for stage in all_first.stages] == [8] * 4
    one = in_turn.stages[1].activation_bytes - in_turn.stages[2].activation_bytes
    assert in_turn.stages[0].activation_bytes - in_turn.stages[1].activation_bytes == one > 0
    assert all_first.stages[0].activation_bytes == in_turn.stages[0].activation_bytes + 4 * one


def test_hidden_states_are_sent_and_waited_for(tmp_path: Path) -> None:
    rate = 1e6
    free, found = planned(tmp_path), planned(tmp_path, intra_node_bytes_per_s=rate)
    assert free.seconds is not None and found.seconds is not None
    assert free.pipeline is not None and found.pipeline is not None
    hidden = BATCH // 8 * LENGTH * WIDTH * 4
    assert [stage.sent_bytes for stage in found.pipeline.stages] == [8 * hidden * count for count in (1, 2, 2, 1)]
    assert sum(stage.send_s for stage in found.pipeline.stages) == pytest.approx(6 * 8 * hidden / rate)
    assert found.pipeline.hidden_s + found.pipeline.exposed_s == pytest.approx(6 * 8 * hidden / rate)
    # At least on the way through all stages and back.
    assert found.seconds > free.seconds + 6 * hidden / rate


def test_ranks_of_a_node_share_the_network_between_stages(tmp_path: Path) -> None:
    """Two nodes of four ranks have one stage each, whose ranks send hidden states at the same time."""
    found = planned(tmp_path, 2, nodes=2, inter_node_bytes_per_s=1e6)
    assert found.pipeline is not None
    hidden = BATCH // 8 * LENGTH * WIDTH * 4
    assert found.pipeline.stages[0].send_s == pytest.approx(8 * hidden * 4 / 1e6)


def test_the_last_stage_computes_the_head(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Stack(head=4096)
    found = planned(tmp_path, module=module)
    assert found.pipeline is not None
    first, *_, last = found.pipeline.stages
    # A layer has 8 x width^2 weights, the head 32 x width^2: as much as four layers.
    assert last.forward_s == pytest.approx(first.forward_s * (2 + 4) / 2, rel=0.02)
    assert "stage 3" in found.binds


class Squares(Stack):
    """Autograd saves what the head returns."""

    def training_step(self, batch: Tensor) -> Tensor:
        return self(batch).square().mean()


def test_early_stages_have_room_for_the_head_in_the_check_of_stages(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Squares(head=4096)
    found = planned(tmp_path, module=module)
    assert found.pipeline is not None
    of_head = BATCH // 8 * LENGTH * 4096 * 4
    assert all(stage.activation_bytes >= of_head for stage in found.pipeline.stages)
    assert found.pipeline.stages[2].activation_bytes == pytest.approx(of_head, rel=0.1)


def numbers_of(found: Prediction) -> list[int]:
    assert found.pipeline is not None
    return [stage.blocks[2] for stage in found.pipeline.stages]


def test_a_block_twice_as_wide_counts_twice(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Stack(layers=5)
        module.layers[-1] = Layer(8 * WIDTH)
    found = planned(tmp_path, 2, 4, module)
    as_many = planned(tmp_path, 2, 4, module, pipeline_blocks=[2, 3])
    assert numbers_of(found) == [3, 2] and numbers_of(as_many) == [2, 3]
    assert found.pipeline is not None and as_many.pipeline is not None
    assert [stage.forward_s for stage in found.pipeline.stages] == pytest.approx(
        [found.pipeline.stages[0].forward_s] * 2, rel=0.02
    )
    assert as_many.pipeline.stages[1].forward_s == pytest.approx(4 / 3 * found.pipeline.stages[1].forward_s, rel=0.02)
    assert found.seconds is not None and as_many.seconds is not None and found.seconds < 0.9 * as_many.seconds
    assert not found.pipeline.faster_blocks
    assert as_many.pipeline.faster_blocks == (3, 2)
    assert "pipeline_blocks=[3, 2] divides blocks by their planned seconds" in str(as_many)


def test_a_division_by_planned_seconds_counts_the_head(tmp_path: Path) -> None:
    with torch.device("meta"):
        module = Stack(head=4096)  # as many operations as four of the eight layers
    found = planned(tmp_path, 2, 4, module)
    assert found.pipeline is not None and numbers_of(found) == [4, 4]
    assert found.pipeline.faster_blocks == (6, 2)
    faster = planned(tmp_path, 2, 4, module, pipeline_blocks=list(found.pipeline.faster_blocks))
    assert faster.seconds is not None and found.seconds is not None and faster.seconds < 0.85 * found.seconds


def test_tables_and_json_show_stages(tmp_path: Path) -> None:
    found = planned(tmp_path)
    text = str(found)
    assert "1f1b with 8 micro-batches: stages wait for each other 27.3% of their time" in text
    assert "layers.0 to layers.1 (2)" in text
    said = found.to_dict()
    assert said["pipeline"]["stages"][3]["graphs"] == 1
    assert said["stages_wait_s"] == found.stages_wait_s > 0


def test_the_largest_batch_fits_all_stages(tmp_path: Path) -> None:
    found = planned(tmp_path, 2, 4, batch_size="auto")
    assert found.fits and found.batch_size % 4 == 0 and found.batch_size == found.largest_batch
    more = planned(tmp_path, 2, 4, batch_size=found.batch_size + 4)
    assert not more.fits and more.reason.startswith("stage 0 of 2: activations")


def test_what_a_run_would_refuse_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="micro_batches=8 does not divide a batch of 12 samples into equal parts"):
        planned(tmp_path, batch_size=12)
    with torch.device("meta"):
        module = Skipping()
    with pytest.raises(
        ConfigError, match=r"was called on the output of layers\.0, which another pipeline stage computes"
    ):
        planned(tmp_path, module=module)
    module.automatic_optimization = False
    with pytest.raises(ConfigError, match="uses manual optimization"):
        planned(tmp_path, module=module)
    with pytest.raises(ConfigError, match=r"pipeline_blocks=\[2, 5\] has 7 blocks, and the model has 8 \(layers.0 to"):
        planned(tmp_path, 2, pipeline_blocks=[2, 5])
    with pytest.raises(ConfigError, match=r"interleaved.* gives each of 8 stages two runs of blocks, and .* 8 blocks"):
        planned(tmp_path, 8, 16, nodes=2, pipeline_schedule="interleaved")
    with pytest.raises(ConfigError, match="micro_batches=5 through 2 stages in 2 rounds"):
        planned(tmp_path, 2, 5, pipeline_schedule="interleaved", batch_size=20)
    with pytest.raises(ConfigError, match="8 blocks for 16 pipeline stages"):
        planned(tmp_path, 16, 16, nodes=4)
