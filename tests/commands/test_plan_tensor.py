"""`lightning-ptm plan` of runs whose layers ranks divide: what is added up, and what experts have of it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from test_plan_experts import EXPERTS, INNER, WIDTH, moved, planned

from lightning_ptm.commands.search import largest_value
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.estimate import estimate
from lightning_ptm.forecasting.prediction import Prediction, render
from lightning_ptm.models import T5
from lightning_ptm.planning.mesh import Axis, Mesh
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.terms import Link, Operation

SIZES: dict[str, Any] = {"width": WIDTH, "feed_forward_width": INNER, "layers": 4, "heads": 2, "vocab_size": 300}
CUT = {"expert_parallel_size": 1, "tensor_parallel_size": 2}


@pytest.mark.parametrize("units", [["Block", "Expert"], pytest.param(["Block"], marks=pytest.mark.slow)])
def test_what_experts_add_up_is_what_one_feed_forward_does(tmp_path: Path, units: list[str]) -> None:
    """Each token goes to one of them, so their layer adds up as many rows as a feed-forward in its place."""
    experts, _ = planned(tmp_path, {**CUT, "units": units}, model=SIZES | {"experts": EXPERTS})
    dense, _ = planned(tmp_path, {**CUT, "units": ["Block"]}, model=SIZES, class_path="lightning_ptm.models.T5")
    assert moved(experts, Link.TENSOR_EXCHANGE) == pytest.approx(moved(dense, Link.TENSOR_EXCHANGE), rel=0.03)


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "all"])
def test_tokens_and_activations_travel_as_they_do_where_ranks_divide_one_of_them(
    tmp_path: Path, recompute: str
) -> None:
    model = SIZES | {"experts": EXPERTS}
    divided, cut = {"expert_parallel_size": 2, "recompute": recompute}, {**CUT, "recompute": recompute}
    experts, _ = planned(tmp_path, divided, model=model)
    tensor, _ = planned(tmp_path, cut, model=model)
    both, blueprint = planned(tmp_path, cut | divided, model=model)
    assert both.numel == experts.numel
    assert both.mesh == blueprint.holders.mesh == Mesh({Axis.DATA: 2, Axis.EXPERT: 2, Axis.TENSOR: 2})
    assert moved(both, Link.EXCHANGE) == moved(experts, Link.EXCHANGE) > 0
    # But for a row of zeros, which a layer has that calls all of its experts itself.
    assert moved(both, Link.TENSOR_EXCHANGE) == pytest.approx(moved(tensor, Link.TENSOR_EXCHANGE), rel=0.02)
    assert moved(experts, Link.TENSOR_EXCHANGE) == moved(tensor, Link.EXCHANGE) == 0
    assert both.timing is not None
    busy = {use.link: use.busy_s for use in both.timing.links}
    waits = {stall.cause: stall.seconds for stall in both.timing.stalls}
    assert waits[Operation.EXCHANGE] == pytest.approx(busy[Link.EXCHANGE] + busy[Link.TENSOR_EXCHANGE])
    said = render(both)
    assert re.search(r"^  exchange .*, while nothing computes$", said, re.MULTILINE)
    assert re.search(r"^  tensor exchange .*, while nothing computes$", said, re.MULTILINE)


def test_each_sharing_class_gathers_over_rings_of_its_own(tmp_path: Path) -> None:
    """Rings have all 8 ranks, the 4 that share parts, or the 2 that share experts' parts."""
    found, blueprint = planned(tmp_path, {**CUT, "expert_parallel_size": 2}, model=SIZES | {"experts": EXPERTS})
    layout = blueprint.layout
    assert {flat.world_size for flat in layout.flats} == {8, 4, 2}
    assert found.timing is not None
    use = next(use for use in found.timing.links if use.link is Link.COLLECTIVE)
    gathered = {
        ranks: sum(flat.shard_bytes for flat in layout.flats if flat.world_size == ranks) for ranks in (8, 4, 2)
    }
    # Four ranks of a node: one ring of all leaves it, two of those that share parts, four of experts' parts.
    least = sum(
        size * (ranks - 1) * rings / 1e9 for (ranks, size), rings in zip(gathered.items(), (1, 2, 4), strict=True)
    )
    passes = use.bytes / sum(size * (ranks - 1) for ranks, size in gathered.items())
    assert 2 <= passes <= 3 and use.busy_s == pytest.approx(passes * least, rel=0.1)


@pytest.mark.parametrize(
    "settings", [pytest.param({}, marks=pytest.mark.slow), {"lock_free": True, "disk_memory": "64MiB"}]
)
def test_a_machine_whose_ranks_are_slow_to_answer_takes_that_time(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Whether updates go on beside it or not, on cores that compute."""
    cpu: dict[str, Any] = {"device": "cpu", "device_memory": 0, "disk_memory": "1GiB"}
    cpu |= {f"{name}_bytes_per_s": None for name in ("device_memory", "host_to_device", "device_to_host")}
    cpu |= {"disk_read_bytes_per_s": 1e9, "disk_write_bytes_per_s": 1e9, "host_memory": "4GiB"}
    cut = {**CUT, "units": ["Block"], "disk_path": str(tmp_path), **settings}
    dense: dict[str, Any] = {"class_path": "lightning_ptm.models.T5", "nodes": 1}

    def of(**slow: float) -> Prediction:
        return planned(tmp_path, cut, model=SIZES, machine=cpu | slow, **dense)[0]

    free, rounds, late = of(), of(round_s=0.01), of(tensor_exchange_s=0.01)
    assert free.timing is not None and rounds.timing is not None
    exchanges = {use.link: use.collectives for use in free.timing.links}[Link.TENSOR_EXCHANGE]
    assert free.timing.rounds > exchanges // 4 > 0 and free.timing.rounds_s == 0.0
    # What goes on meanwhile (updates, gathers) may hide a little of it.
    assert rounds.seconds - free.seconds == pytest.approx(0.01 * free.timing.rounds, rel=0.1)
    assert late.seconds - free.seconds == pytest.approx(0.01 * exchanges, rel=0.1)
    assert f"{free.timing.rounds} control messages among ranks {0.01 * free.timing.rounds:.4g} s" in render(rounds)
    assert f"in {exchanges} collectives, while nothing computes" in render(free)


def test_sums_pass_behind_the_other_half_of_a_batch(tmp_path: Path) -> None:
    """A step of two halves takes, in each unit, the longer of compute and sums, in twice as many collectives."""

    def of(settings: dict[str, Any], **more: Any) -> Prediction:
        slow = {"tensor_exchange_bytes_per_s": 2e6}
        dense: dict[str, Any] = {"class_path": "lightning_ptm.models.T5", "machine": slow, **more}
        return planned(tmp_path, {**CUT, "units": ["Block"], **settings}, model=SIZES, **dense)[0]

    halves = {"tensor_parallel": {"overlap": "two_batches"}}
    blocking, hiding = of({}), of(halves)
    assert blocking.timing is not None and hiding.timing is not None
    one, two = ({use.link: use for use in each.timing.links}[Link.TENSOR_EXCHANGE] for each in (blocking, hiding))  # type: ignore[union-attr]
    assert (two.bytes, two.collectives) == (one.bytes, 2 * one.collectives)
    assert blocking.seconds is not None and hiding.seconds is not None
    assert blocking.other_overlap_s == pytest.approx(hiding.seconds, rel=0.02)
    assert hiding.other_overlap_s == pytest.approx(blocking.seconds, rel=0.02)
    assert max(hiding.timing.compute_s, two.busy_s) < hiding.seconds < blocking.seconds
    assert "TensorParallel(overlap='two_batches') would pay" in render(blocking)
    assert "TensorParallel(overlap='two_batches') pays" in render(hiding)
    assert re.search(
        r"^  tensor exchange .*, of each half of a batch while the other one computes$", render(hiding), re.M
    )
    assert of({"tensor_parallel": {"sequence_parallel": True}}).other_overlap_s is None
    assert of({}, batch_size=1).other_overlap_s is None


def test_two_halves_do_not_pay_on_the_cpus_of_one_machine(tmp_path: Path) -> None:
    cpu: dict[str, Any] = {"device": "cpu", "device_memory": 0, "host_memory": "4GiB", "tensor_exchange_s": 1e-4}
    cpu |= {f"{name}_bytes_per_s": None for name in ("device_memory", "host_to_device", "device_to_host")}
    dense: dict[str, Any] = {"class_path": "lightning_ptm.models.T5", "machine": cpu, "nodes": 1}
    found, _ = planned(tmp_path, {**CUT, "units": ["Block"]}, model=SIZES, **dense)
    assert found.seconds is not None and found.other_overlap_s is not None
    assert found.other_overlap_s > found.seconds
    assert "TensorParallel(overlap='two_batches') would not pay" in render(found)


def test_the_largest_model_is_of_ranks_that_cut_it(tmp_path: Path) -> None:
    machine = {"host_memory": "8MiB", "device_memory": "4MiB"}
    settings = {**CUT, "units": ["Block"]}
    dense: dict[str, Any] = {"class_path": "lightning_ptm.models.T5", "machine": machine, "batch_size": 1}
    found, blueprint = planned(tmp_path, settings, model=SIZES, largest="layers", **dense)
    assert found.fits and found.mesh.sizes[Axis.TENSOR] == 2 and any(flat.parts == 2 for flat in blueprint.layout.flats)
    layers = found.chosen["layers"]
    assert layers > SIZES["layers"] and planned(tmp_path, settings, model=SIZES | {"layers": layers}, **dense)[0].fits
    with suppress(CapacityError):
        assert not planned(tmp_path, settings, model=SIZES | {"layers": layers + 1}, **dense)[0].fits


@pytest.mark.parametrize("memory", ["48MiB", pytest.param("1MiB", marks=pytest.mark.slow)])
def test_sizes_that_ranks_cannot_cut_are_stepped_over(tmp_path: Path, memory: str) -> None:
    """Where not even the smallest fits, that one is told of."""
    machine = {"host_memory": memory, "device_memory": "4MiB"}
    settings = {"expert_parallel_size": 1, "tensor_parallel_size": 4, "units": ["Block"]}
    dense: dict[str, Any] = {"class_path": "lightning_ptm.models.T5", "machine": machine, "batch_size": 1}
    model = SIZES | {"heads": 4}
    if memory == "1MiB":
        with pytest.raises(CapacityError):
            planned(tmp_path, settings, model=model | {"layers": 64}, largest="feed_forward_width", **dense)
        return
    found, _ = planned(tmp_path, settings, model=model, largest="feed_forward_width", **dense)
    width = found.chosen["feed_forward_width"]
    assert found.fits and width > INNER and width % 4 == 0
    assert planned(tmp_path, settings, model=model | {"feed_forward_width": width}, **dense)[0].fits
    with pytest.raises(CapacityError):
        planned(tmp_path, settings, model=model | {"feed_forward_width": width + 4}, **dense)


@pytest.mark.parametrize("step", [2, 3, 8, 12])
def test_the_search_finds_the_largest_of_those_that_can_be(step: int) -> None:
    for most in range(100):
        asked: list[int] = []

        def fits(value: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(value)
            if value % step:
                raise ConfigError(f"{value} does not divide")
            return value <= most

        assert largest_value(step, fits) == most // step * step
        assert len(asked) == len(set(asked)) <= 14 + 4 * step


def test_a_model_that_can_have_few_values_is_not_asked_for_ever() -> None:
    def fits(value: int) -> bool:
        if value & (value - 1):
            raise ConfigError(f"{value} is no power of two")
        return value < 1 << 20

    with pytest.raises(ConfigError, match="is no power of two"):
        largest_value(1, fits)


@pytest.mark.parametrize("frozen", [True, False])
def test_blocks_with_frozen_weights_that_share_an_input_end_their_backward_with_the_first_of_them(frozen: bool) -> None:
    """A run does not wait for the gradient of an input that another unit took before, if all weights are trained."""
    with torch.device("meta"):
        model = T5(**SIZES)
        model.configure_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (frozen and name.endswith("expand.weight")))
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    units = discover(model, ("Block",))
    works = estimate(model, units, (tokens, tokens), torch.float32)
    names = {unit.index: unit.name for unit in units}
    ends = {names[unit]: names[work.ends_with] for unit, work in enumerate(works) if work.ends_with is not None}
    # An encoder's take the same bias for positions. The first of each ends with its own.
    waiting = [(stack, at) for stack in ("encoder", "decoder") for at in (1, 2, 3)] if frozen else []
    assert ends == {f"{stack}.blocks.{at}": f"{stack}.blocks.0" for stack, at in waiting}
