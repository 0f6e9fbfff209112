"""`lightning-ptm plan`: it decides as the run does, counts as models do, and needs little itself."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import yaml
from kit.fits import quiet_trainer
from PIL import Image

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.cli import main
from lightning_ptm.commands.picture import ACTIVATIONS, HELD, HOMES, OPERATIONS
from lightning_ptm.commands.plan import forecast
from lightning_ptm.commands.search import largest_value
from lightning_ptm.commands.timeline import write_timeline
from lightning_ptm.data import TextBytes
from lightning_ptm.drawing import OVER
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.forecasting.counting import UnitWork
from lightning_ptm.forecasting.estimate import activation_bytes, estimate, offloaded_bytes
from lightning_ptm.forecasting.hardware import find
from lightning_ptm.forecasting.prediction import render
from lightning_ptm.forecasting.rates import Activity
from lightning_ptm.models import GPT, T5, T5MoE
from lightning_ptm.models.base import LanguageModel
from lightning_ptm.planning.trace import Tick, Trace
from lightning_ptm.runtime.deciding.blueprint import Blueprint
from lightning_ptm.runtime.deciding.planner import make_plan
from lightning_ptm.runtime.units.discovery import discover
from lightning_ptm.terms import Link, Mode, Operation, Phase

ROOT = Path(__file__).parents[2]
MODEL = {"width": 64, "layers": 3, "heads": 2, "sequence_length": 16}
ALL_TIERS = {"device_memory": "2MiB", "offload_parameters": "host", "offload_optimizer": "disk"}


def cpu_file(folder: Path, **values: Any) -> str:
    """A hardware file of one rank on a CPU with a disk."""
    fields = {
        "device": "cpu",
        "ranks_per_node": 1,
        "device_memory": 0,
        "host_memory": "64GiB",
        "disk_memory": "1TiB",
        "cpu_cores": os.cpu_count(),
        "compute_flops_per_s": {"bfloat16": 1e11, "float32": 1e11},
        "compute_efficiency": 1,
        "device_memory_bytes_per_s": None,
        "host_memory_bytes_per_s": 1e10,
        "host_to_device_bytes_per_s": None,
        "device_to_host_bytes_per_s": None,
        "disk_read_bytes_per_s": 2e9,
        "disk_write_bytes_per_s": 1e9,
        "intra_node_bytes_per_s": None,
        "inter_node_bytes_per_s": None,
    }
    path = folder / "cpu.yaml"
    path.write_text(yaml.safe_dump(fields | values))
    return str(path)


def config(folder: Path, settings: dict[str, Any], **trainer: Any) -> Path:
    path = folder / "config.yaml"
    strategy = {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": settings}
    text = folder / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    document = {
        "trainer": {"precision": "bf16-mixed", "strategy": strategy, "max_steps": 1} | trainer,
        "model": {"class_path": "lightning_ptm.models.GPT", "init_args": MODEL | {"meta": True}},
        "data": {
            "class_path": "lightning_ptm.data.TextBytes",
            "init_args": {"path": str(text), "sequence_length": 16, "batch_size": 2},
        },
    }
    path.write_text(yaml.safe_dump(document))
    return path


class Seen(L.Callback):
    blueprint: Blueprint

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.blueprint = trainer.strategy.engine.blueprint  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("settings", "trainer"),
    [
        ({}, {"gradient_clip_val": 1.0}),
        ({"offload_optimizer": "disk"}, {}),
        (ALL_TIERS, {"accumulate_grad_batches": 2}),
        (ALL_TIERS, {"precision": "32-true"}),
        ({"lock_free": {"max_staleness": 1}}, {}),
    ],
)
def test_the_plan_is_the_one_that_runs(tmp_path: Path, settings: dict[str, Any], trainer: dict[str, Any]) -> None:
    settings = settings | {
        "page_size": "64KiB",
        "host_memory": "64MiB",
        "disk_memory": "256MiB",
        "disk_path": str(tmp_path),
    }
    path = config(tmp_path, settings, **trainer)
    _, planned = forecast(path, cpu_file(tmp_path))
    seen = Seen()
    run = quiet_trainer(
        AngelPTMStrategy(**settings),
        max_steps=1,
        callbacks=[seen],
        limit_val_batches=0,
        **{"precision": "bf16-mixed", **trainer},
    )
    run.fit(GPT(**MODEL), datamodule=TextBytes(str(tmp_path / "text.txt"), sequence_length=16, batch_size=2))
    real = seen.blueprint
    for name in (
        "layout",
        "placement",
        "budget",
        "pool_bytes",
        "staging_chunks",
        "lock_free",
        "master_bytes_per_element",
        "routes",
        "gradient_room_bytes",
        "trace",
    ):
        assert getattr(planned, name) == getattr(real, name), name
    plans = [make_plan(blueprint, Mode.TRAIN, blueprint.trace) for blueprint in (planned, real)]
    assert plans[0] == plans[1]


def counted(model: L.LightningModule, length: int, samples: int) -> tuple[UnitWork, ...]:
    tokens = torch.empty(samples, length, dtype=torch.long, device="meta")
    return estimate(model, discover(model, "auto"), (tokens, tokens), torch.float32)


def on_meta(model: L.LightningModule) -> L.LightningModule:
    model.configure_model()
    return model


def test_operations_are_those_of_the_formula() -> None:
    model = GPT(**MODEL, meta=True)
    works = counted(on_meta(model), 16, 4)
    assert 3 * sum(work.flops for work in works) == model.flops_per_token * 16 * 4
    assert works[1] == works[2] == works[3]  # but for what they share


def kept_bytes(model: LanguageModel, *tokens: torch.Tensor) -> int:
    """Returns the bytes that autograd keeps of a forward on the CPU."""
    model.configure_model()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}
    held: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held.append(tensor)
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.loss(tokens)  # type: ignore[arg-type]
    return sum(kept.values())


def test_what_is_kept_is_what_autograd_keeps() -> None:
    """Fused attention keeps a number for each row more than is counted."""
    tokens = torch.zeros(4, 16, dtype=torch.long)
    works = counted(on_meta(GPT(**MODEL, meta=True)), 16, 4)
    assert sum(work.saved_bytes for work in works) == pytest.approx(kept_bytes(GPT(**MODEL), tokens, tokens), rel=0.05)
    assert works[2].input_bytes == 4 * 16 * 64 * 4


DENSE: dict[str, Any] = {"width": 128, "layers": 2, "heads": 2, "feed_forward_width": 64}
MANY = DENSE | {"experts": 128, "jitter": 0.0, "capacity_factor": 8.0}


@pytest.mark.parametrize("changes", [{}, {"choices": 2, "jitter": 0.1}, {"experts": 4, "capacity_factor": 0.5}])
def test_what_a_router_keeps_and_what_finds_no_room_counts(changes: dict[str, Any]) -> None:
    """Compares what layers with experts keep in addition to dense ones: attention with a bias keeps more on the CPU
    than is counted."""
    torch.manual_seed(0)
    tokens = torch.randint(1, 300, (8, 64))
    sizes = MANY | changes
    of_mixed, of_dense = (
        sum(work.saved_bytes for work in counted(on_meta(model), 64, 8))
        for model in (T5MoE(**sizes, meta=True), T5(**DENSE, meta=True))
    )
    kept = kept_bytes(T5MoE(**sizes), tokens, tokens) - kept_bytes(T5(**DENSE), tokens, tokens)
    assert of_mixed - of_dense == pytest.approx(kept, rel=0.1)


@pytest.mark.parametrize(("factor", "rows"), [(1.25, 16), (1.0, 16), (0.5, 8)])
def test_an_expert_computes_no_more_than_its_capacity(factor: float, rows: int) -> None:
    model = on_meta(T5MoE(**MANY | {"width": 32, "experts": 4, "capacity_factor": factor}, meta=True))
    units = discover(model, ["Block", "Expert"])
    tokens = torch.empty(4, 16, dtype=torch.long, device="meta")
    works = estimate(model, units, (tokens, tokens), torch.float32)
    expert = next(work for unit, work in zip(units, works, strict=True) if type(unit.module).__name__ == "Expert")
    assert expert.flops == 4 * rows * 32 * 64


def test_experts_share_the_tokens_evenly() -> None:
    model = on_meta(T5MoE(width=32, layers=2, heads=2, feed_forward_width=64, experts=4, meta=True))
    units = discover(model, ["Block", "Expert"])
    tokens = torch.empty(4, 16, dtype=torch.long, device="meta")
    works = estimate(model, units, (tokens, tokens), torch.float32)
    experts = [work for unit, work in zip(units, works, strict=True) if type(unit.module).__name__ == "Expert"]
    assert len(experts) == 2 * 4 and len({work.flops for work in experts}) == 1
    gated = getattr(units[-1].module, "gate", None) is not None
    rows = 4 * 16 // 4
    assert experts[0].flops == (6 if gated else 4) * rows * 32 * 64 * 1
    whole = estimate(model, discover(model, ["Block"]), (tokens, tokens), torch.float32)
    assert sum(work.flops for work in whole) == sum(work.flops for work in works)


def test_activations_by_tick() -> None:
    root, block = UnitWork(0, 10, 0), UnitWork(0, 100, 7)
    order = [(0, Phase.FORWARD), (1, Phase.FORWARD), (2, Phase.FORWARD)]
    order += [(2, Phase.BACKWARD), (1, Phase.BACKWARD), (0, Phase.BACKWARD)]
    trace = Trace(tuple(Tick(unit, phase, (0, unit) if unit else (0,)) for unit, phase in order))
    works = (root, block, block)
    assert activation_bytes(works, frozenset(), trace) == (10, 110, 210, 224, 124, 10)
    assert activation_bytes(works, frozenset({1, 2}), trace) == (10, 110, 117, 138, 131, 10)
    sliced = activation_bytes(works, frozenset({1, 2}), trace, of_slice={1: 25, 2: 25})
    assert sliced == (10, 10 + 25, 17 + 25, 24 + 25 + 14, 17 + 25 + 14, 10)
    three = (root, block, block, block)
    order[3:3] = [(3, Phase.FORWARD), (3, Phase.BACKWARD)]
    trace = Trace(tuple(Tick(unit, phase, (0, unit) if unit else (0,)) for unit, phase in order))
    assert activation_bytes(three, frozenset(), trace)[3:5] == (310, 324)
    # In RAM beside the unit that computes, and all but one of the others: on the device two units' and the root's.
    assert activation_bytes(three, frozenset(), trace, away={1, 2, 3}) == (10, 110, 210, 210, 224, 224, 124, 10)
    assert activation_bytes(three, frozenset({1, 2, 3}), trace, away={1, 2, 3}) == (
        10,
        110,
        117,
        117,
        138,
        138,
        131,
        10,
    )
    # Gradients in `.grad`: the root's in all ticks of the backward; a block's in its own, or until another one's is over.
    plain, grads = activation_bytes(three, frozenset({1, 2, 3}), trace), (5, 40, 40, 40)
    alone = activation_bytes(three, frozenset({1, 2, 3}), trace, gradients=grads)
    assert [one - other for one, other in zip(alone, plain, strict=True)] == [0] * 4 + [45, 45, 45, 5]
    late = activation_bytes(three, frozenset({1, 2, 3}), trace, gradients=grads, ends_with={2: 1, 3: 1})
    assert [one - other for one, other in zip(late, plain, strict=True)] == [0] * 4 + [45, 85, 125, 5]
    # They come while a unit's saved tensors go.
    kept = activation_bytes(three, frozenset(), trace, gradients=(5, 130, 40, 40))
    assert [one - other for one, other in zip(kept, activation_bytes(three, frozenset(), trace), strict=True)] == [
        0
    ] * 4 + [5, 5, 35, 5]
    assert offloaded_bytes(three, frozenset()) == 300
    assert offloaded_bytes(three, frozenset({1, 3})) == 114


def test_activations_in_ram_make_room_for_a_batch_and_take_the_links() -> None:
    path, batch = str(ROOT / "configs" / "gpt3_1.7b.yaml"), 12
    kept = {"recompute": "none", "offload_activations": "none"}
    keep, _ = forecast(path, "a100_40gb_x8", batch_size=batch, strategy=kept)
    settings = {"recompute": "none", "offload_activations": "host"}
    away, _ = forecast(path, "a100_40gb_x8", batch_size=batch, strategy=settings)
    assert not keep.fits and keep.offloaded_bytes == 0 == keep.tiers["host"].activation_bytes
    assert away.fits and away.tiers["device"].activation_bytes < keep.tiers["device"].activation_bytes
    assert away.tiers["host"].activation_bytes == away.offloaded_bytes > away.tiers["device"].activation_bytes
    assert "activations kept in RAM until the backward" in render(away)
    # More than 40 GB each way at 25 GB/s take longer than a step computes.
    assert away.timing is not None and away.seconds > away.timing.seconds and "copies" in away.binds


def test_slices_have_activations_of_one_slice_and_read_weights_once_a_pass() -> None:
    path = str(ROOT / "configs" / "gpt3_1.7b.yaml")
    whole, sliced = (
        forecast(path, "a100_40gb_x8", batch_size=16, strategy={"recompute": recompute, "slices": slices})[0]
        for recompute, slices in (("all", 1), ("none", 8))
    )
    assert sliced.tiers["device"].activation_bytes < whole.tiers["device"].activation_bytes
    assert sliced.tiers["device"].page_bytes == whole.tiers["device"].page_bytes
    assert sliced.flops == whole.flops and sliced.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_activations_on_disk_take_its_space_and_its_links(tmp_path: Path) -> None:
    path, batch = str(ROOT / "configs" / "gpt3_1.7b.yaml"), 8
    settings = {"recompute": "none", "offload_activations": "disk", "disk_path": "/nvme"}
    away, _ = forecast(path, "a100_40gb_x8", batch_size=batch, strategy=settings)
    assert away.fits and away.tiers["disk"].activation_bytes == away.offloaded_bytes
    assert away.tiers["host"].activation_bytes == 0
    assert "activations kept on disk until the backward" in render(away)
    # Nearly 30 GB each way, on an eighth of the node's disks.
    assert away.timing is not None and away.seconds > away.timing.seconds and "disk" in away.binds
    small, _ = forecast(path, "a100_40gb_x8", batch_size=batch, strategy={**settings, "disk_memory": "20GB"})
    assert not small.fits and "on disk (offload_activations='disk'), and pages leave 18.63 GiB" in small.reason


def test_activations_that_ram_does_not_hold_are_said(tmp_path: Path) -> None:
    gpu = yaml.safe_load(Path(find("a100_40gb_x8")).read_text())
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**gpu, "host_memory": "100MiB"}))
    path = config(tmp_path, {"page_size": "64KiB", "offload_activations": "host"})
    largest, _ = forecast(path, str(tmp_path / "small.yaml"), batch_size="auto")
    assert largest.fits and 0 < largest.offloaded_bytes < (100 << 20) // 8
    found, _ = forecast(path, str(tmp_path / "small.yaml"), batch_size=largest.batch_size + 1)
    assert not found.fits and "of RAM (offload_activations='host'), and pages leave" in found.reason


def test_the_command_prints_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    timeline = tmp_path / "out.json"
    main(["plan", "gpt", "--hardware", "a100_40gb_x8", "--nodes", "2", "--json", "--timeline", str(timeline)])
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["ranks"] == 16 and found["parameters"] == 1_927_296
    (optimizer,) = found["optimizers"]
    assert optimizer["kind"] == "element-wise" and 16 * optimizer["bytes"] >= 8 * found["parameters"]
    assert found["samples_per_s"] == pytest.approx(16 * 16 / found["seconds_per_step"])
    assert found["tokens_per_s"] == pytest.approx(256 * found["samples_per_s"])
    assert found["seconds_per_step"] == pytest.approx(found["compute_s"] + sum(found["stalls_s"].values()))
    events = json.loads(timeline.read_text())["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert all(event["tid"] > 0 and event["ts"] >= 0 for event in events if event["ph"] == "X")
    computed = sum(event["dur"] for event in events if event["ph"] == "X" and rows[event["tid"]] == "compute")
    assert computed == pytest.approx(found["compute_s"] * 1e6)


def test_what_begins_before_the_step_is_shown_and_the_start_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    reads = Activity(Link.DISK_READ, Operation.FETCH, 0, -0.5, 1.0, 4096)
    write_timeline(path, [reads, Activity(None, Operation.COMPUTE, 0, 0.0, 2.0, 0)], ["root"])
    events = json.loads(path.read_text())["traceEvents"]
    assert [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [(0.0, 1e6), (0.5e6, 2e6)]
    assert [event["ts"] for event in events if event["ph"] == "i"] == [0.5e6]


def colours_of(path: Path) -> set[str]:
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size == (1200, 800)
        return {"#{:02x}{:02x}{:02x}".format(*colour) for _, colour in image.convert("RGB").getcolors(1 << 20) or []}


@pytest.mark.usefixtures("proposes")
def test_the_picture_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(config(tmp_path, {"page_size": "64KiB", "host_memory": "64MiB", "disk_path": str(tmp_path)} | ALL_TIERS))
    plot = tmp_path / "out.png"
    arguments = ["plan", path, "--hardware", cpu_file(tmp_path, host_memory="80MiB"), "--plot", str(plot)]
    main(arguments)
    assert f"picture: {plot}" in capsys.readouterr().out
    shown = colours_of(plot)
    busy = {OPERATIONS[each] for each in (Operation.COMPUTE, Operation.FETCH, Operation.OFFLOAD, Operation.UPDATE)}
    assert {HOMES, HELD, ACTIVATIONS, *busy} <= shown and OVER not in shown
    with pytest.raises(SystemExit, match="1"):
        main([*arguments, "--batch-size", "50000"])  # what does not fit is shown, too
    assert re.match(r"does not fit: activations of 50000 .*\nconfig.*\nwould fit with --", capsys.readouterr().out)
    assert {HOMES, ACTIVATIONS, OVER} <= colours_of(plot)
    with pytest.raises(SystemExit, match=r"ends in \.png"):
        main(["plan", "gpt", "--hardware", "h200", "--plot", str(tmp_path / "out.svg")])


def test_the_largest_batch_fits_and_one_more_does_not(tmp_path: Path) -> None:
    path = config(tmp_path, {"page_size": "64KiB", "host_memory": "64MiB", "recompute": "none"})
    hardware = cpu_file(tmp_path, host_memory="80MiB")
    found, _ = forecast(path, hardware, batch_size="auto")
    assert found.fits and found.batch_size > 2
    over, _ = forecast(path, hardware, batch_size=found.batch_size + 1)
    assert not over.fits and re.match(r"activations of \d+ samples a rank take .* of RAM to them on cpu$", over.reason)


@pytest.mark.usefixtures("proposes")
def test_by_default_the_largest_batch_keeps_its_activations_and_a_larger_one_is_recomputed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = config(tmp_path, {"page_size": "64KiB", "host_memory": "64MiB"})
    hardware = cpu_file(tmp_path, host_memory="80MiB")
    kept = {"recompute": "none", "offload_activations": "none"}
    ours, fixed = (forecast(path, hardware, batch_size="auto", strategy=each)[0] for each in ({}, kept))
    assert ours.batch_size == fixed.batch_size > 2 and ours.seconds == fixed.seconds and not ours.handlings
    size = ours.batch_size + 1
    over, none = (forecast(path, hardware, batch_size=size, strategy=each)[0] for each in ({}, kept))
    assert over.fits and not none.fits
    assert "recomputed" in over.handlings.values() and over.samples_per_s < ours.samples_per_s
    main(["plan", str(path), "--hardware", hardware])
    assert f"largest batch that fits with all activations kept: {ours.batch_size:,} samples" in capsys.readouterr().out
    main(["plan", str(path), "--hardware", hardware, "--batch-size", str(size)])
    assert "largest batch that fits: " in capsys.readouterr().out


@pytest.mark.usefixtures("proposes")
def test_the_largest_batch_is_named_and_how_to_find_the_largest_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(config(tmp_path, {"page_size": "64KiB", "host_memory": "64MiB", "recompute": "none"}))
    arguments = ["plan", path, "--hardware", cpu_file(tmp_path, host_memory="80MiB")]
    main(arguments)
    text = capsys.readouterr().out
    main([*arguments, "--batch-size", "auto", "--json"])
    largest = json.loads(capsys.readouterr().out)["batch_size_per_rank"]
    assert f"largest batch that fits: {largest:,} samples a rank (--batch-size auto plans it)\n" in text
    assert "largest model of this width that fits: --largest layers finds it\n" in text
    assert "1 rank, " in text and re.search(
        r"model operations: \S+ [GT]FLOP/s a rank, \d+% of the peak matrix rate", text
    )
    with pytest.raises(SystemExit, match="1"):
        main([*arguments, "--batch-size", str(largest + 1), "--json"])
    refused = json.loads(capsys.readouterr().out)
    assert refused["largest_batch_size_per_rank"] == largest and "activations of" in refused["reason"]
    assert {"batch_size": largest} in [each["changes"] for each in refused["proposals"]]
    found, _ = forecast(path, arguments[-1], batch_size="auto")
    text = render(dataclasses.replace(found, chosen={"layers": 7}))
    assert "largest layers: 7\n" in text and "--largest" not in text and "--batch-size" not in text


class OneSize(L.LightningModule):
    """Computes batches of two samples, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layer(batch[0].view(32).float()).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_model_of_one_batch_size_is_planned(tmp_path: Path) -> None:
    path = config(tmp_path, {"page_size": "64KiB"})
    document = yaml.safe_load(path.read_text())
    document["model"] = {"class_path": f"{__name__}.OneSize"}
    path.write_text(yaml.safe_dump(document))
    found, _ = forecast(path, cpu_file(tmp_path))
    assert found.fits and found.batch_size == 2 and found.largest_batch is None
    text = render(found)
    assert "no batch of another size" in text and "--largest NAME (an argument of the model) finds it" in text


def test_a_timeline_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for target, words in ((tmp_path / "none" / "out.json", "there is no folder"), (tmp_path, "which is a folder")):
        # Of the two that are wrong it comes first: nothing has been read by then.
        with pytest.raises(SystemExit, match=words):
            main(["plan", "gpt", "--hardware", "no-such", "--timeline", str(target)])


@pytest.mark.parametrize("first", [1, 3, 40])
def test_the_search_finds_the_largest_that_fits(first: int) -> None:
    for most in range(70):
        asked: list[int] = []

        def fits(value: int, most: int = most, asked: list[int] = asked) -> bool:
            asked.append(value)
            return value <= most

        assert largest_value(first, fits) == most
        assert min(asked) >= 1 and len(asked) == len(set(asked)) <= 14


def test_what_changes_no_memory_has_no_largest_value() -> None:
    with pytest.raises(ConfigError, match="does not change the memory that is needed; name another argument"):
        largest_value(3, lambda value: True)


def test_a_value_that_the_model_refuses_is_told(tmp_path: Path) -> None:
    path = config(tmp_path, {"page_size": "64KiB"})
    hardware = cpu_file(tmp_path, host_memory="40MiB")
    with pytest.raises(SystemExit, match=r"largest is 'heads', and the model cannot have .*such as layers"):
        main(["plan", str(path), "--hardware", hardware, "--largest", "heads"])


def test_the_largest_model_fits_and_one_layer_more_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(tmp_path, {"page_size": "64KiB"})
    hardware = cpu_file(tmp_path, host_memory="40MiB")
    main(["plan", str(path), "--hardware", hardware, "--largest", "layers", "--json"])
    found = json.loads(capsys.readouterr().out)
    layers = found["chosen"]["layers"]
    assert found["fits"] and layers > 3
    document = yaml.safe_load(path.read_text())
    document["model"]["init_args"]["layers"] = layers + 1
    path.write_text(yaml.safe_dump(document))
    try:
        over = forecast(path, hardware)[0].fits
    except CapacityError:
        over = False
    assert not over
    with pytest.raises(SystemExit, match=r"largest is 'depth', and the model of .* has none; .*heads, layers"):
        main(["plan", str(path), "--hardware", hardware, "--largest", "depth"])


def cuda_file(folder: Path, **values: Any) -> str:
    """A hardware file of one rank with a device, on which a batch of some samples fits beside `config`'s pages."""
    rates = {"device_memory_bytes_per_s": 1e11, "host_to_device_bytes_per_s": 1e9, "device_to_host_bytes_per_s": 1e9}
    return cpu_file(folder, **{"device": "cuda", "device_memory": "8MiB"} | rates | values)


def test_device_memory_for_the_most_samples_and_for_the_largest_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, hardware = config(tmp_path, {"page_size": "64KiB"}), cuda_file(tmp_path)
    found = {
        goal: forecast(path, hardware, batch_size="auto", device_memory=goal)[0] for goal in (None, "best", "least")
    }
    assert all(each.fits for each in found.values())
    assert found["best"].samples_per_s >= max(each.samples_per_s for each in found.values())
    assert found["least"].batch_size > found["best"].batch_size
    # What it names can be set, and is what was told.
    size = found["best"].chosen["device_memory"]
    assert size != found["least"].chosen["device_memory"]
    again, _ = forecast(path, hardware, batch_size="auto", device_memory=str(size))
    assert again.samples_per_s == found["best"].samples_per_s and again.chosen == {}
    part = (8 << 20) // 16
    less = found["least"].chosen["device_memory"] - part
    with pytest.raises(CapacityError):
        forecast(path, hardware, batch_size="auto", device_memory=str(less))
    main(["plan", str(path), "--hardware", hardware, "--batch-size", "auto", "--device-memory", "best"])
    assert f"device_memory: {size} (" in capsys.readouterr().out


def test_the_largest_model_takes_what_activations_leave_of_the_device(tmp_path: Path) -> None:
    """A model whose RAM is full grows as far as the device's memory permits, as with a device_memory that was searched."""
    path, hardware = config(tmp_path, {"page_size": "64KiB"}), cuda_file(tmp_path, host_memory="8MiB")
    plain, _ = forecast(path, hardware, largest="layers")
    found, _ = forecast(path, hardware, largest="layers", device_memory="best")
    assert plain.fits and plain.chosen["layers"] >= found.chosen["layers"] >= 3
    half, _ = forecast(path, hardware, largest="layers", device_memory=str(4 << 20))
    assert plain.chosen["layers"] > half.chosen["layers"]


def test_what_does_not_fit_says_which_number_decides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(config(tmp_path, {"page_size": "64KiB", "host_memory": "64MiB"}))
    for arguments, words in (
        (
            [path, "--hardware", cpu_file(tmp_path, host_memory="1MiB"), "--batch-size", "auto"],
            "activations of 1 sample",
        ),
        (["gpt3_175b", "--hardware", "a100_40gb_x8"], r"need 199\.8 GiB; .* has [^\n]* left of 102\.4 GiB\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *arguments])
        said = capsys.readouterr()
        assert ended.value.code == 1 and not said.err
        assert re.match(f"does not fit: .*{words}", said.out)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "no-such"], "no hardware file 'no-such'"),
        (["--hardware", "h200", "--nodes", "0"], "nodes is 0"),
        (["--hardware", "a100_40gb_x8", "--nodes", "1000000000"], "nodes is 1000000000, .* lower it"),
        (["--hardware", "h200", "--batch-size", "9" * 30], "batch_size is .?9{30}.*from 1 to 1073741824"),
        (["--hardware", "h200", "--nodes", "2"], "inter_node_bytes_per_s is missing"),
        (["--hardware", "h200", "--batch-size", "0"], "batch_size is .?0"),
        (["--hardware", "h200", "--batch-size", "some"], "batch_size is 'some'"),
        (["--hardware", "h200", "--largest", "meta"], "largest is 'meta', and .* has True for it"),
        (
            ["--hardware", "h200", "--device-memory", "beast"],
            "device_memory=beast is not a size.*or say 'best' or 'least'",
        ),
        (["--hardware", "v100_32gb_x8"], "has no bfloat16"),
        (["--hardware", "h200", "--strategy", "{page_sice: 1}"], "did you mean 'page_size'"),
        (
            ["--hardware", "h200", "--strategy", "{expert_parallel_size: 2}"],
            "does not divide the number of ranks, 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], words: str) -> None:
    with pytest.raises(SystemExit, match=words):
        main(["plan", "gpt", *arguments])


def test_a_config_without_data_is_refused(tmp_path: Path) -> None:
    path = config(tmp_path, {})
    path.write_text(
        yaml.safe_dump({name: value for name, value in yaml.safe_load(path.read_text()).items() if name != "data"})
    )
    with pytest.raises(ConfigError, match="names no data"):
        forecast(path, "h200")


class Curve(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.gelu(x)


class Curves(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Curve(), Curve()])

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        x = batch.view(2, 8).t() + 1.0  # 64 bytes read, 64 written
        for block in self.blocks:
            x = block(x)
        return x.sum()  # 64 read, 4 written


def test_what_no_formula_counts_is_counted() -> None:
    """GELU of each element of its input; a call reads its inputs and writes its output; views are nothing."""
    model = Curves()
    root, *blocks = estimate(model, discover(model, ["Curve"]), torch.empty(16, device="meta"), torch.float32)
    assert (root.moved_bytes, root.curved_numel) == (64 + 64 + 64 + 4, 0)
    assert [(block.moved_bytes, block.curved_numel) for block in blocks] == 2 * [(128, 16)]


def test_the_page_size_is_the_hardware_files(tmp_path: Path) -> None:
    path = config(tmp_path, {"page_size": "auto", "offload_optimizer": "disk", "disk_path": str(tmp_path)})
    _, planned = forecast(path, cpu_file(tmp_path, page_size=1 << 20))
    assert planned.layout.page_size == 1 << 20
    with pytest.raises(
        ConfigError, match=r"page_size is 'auto', .*cpu\.yaml has no page_size; run `lightning-ptm probe`"
    ):
        forecast(path, cpu_file(tmp_path))
    path = config(tmp_path, {"page_size": "auto"})
    assert forecast(path, cpu_file(tmp_path))[1].layout.page_size == 4 << 20


def test_lock_free_updates_take_time_from_compute(tmp_path: Path) -> None:
    """On two cores, of which updates use one; an older hardware file tells nothing of such updates."""
    settings = {"lock_free": {"max_staleness": 16}, "page_size": "64KiB", "disk_path": str(tmp_path)}
    path = config(tmp_path, settings)
    free = {"disk_read_bytes_per_s": 1e12, "disk_write_bytes_per_s": 1e12, "cpu_cores": 2}

    def planned(**values: float) -> tuple[float, float]:
        found, _ = forecast(path, cpu_file(tmp_path, **free, **values))
        assert found.timing is not None
        return found.seconds, found.timing.compute_s

    old, compute_s = planned()
    assert old > compute_s
    known = {"update_bytes_per_s": 1e10, "beside_update_bytes_per_s": 1e9}
    whole, _ = planned(**known)
    half, _ = planned(**known, beside_loss=0.5)
    assert compute_s < half < whole
    forecasting, _ = planned(**known, prediction_numel_per_s=1e7, learn_numel_per_s=1e7)
    assert forecasting > whole


@pytest.mark.parametrize("offload_optimizer", ["disk", "device"])
def test_encoded_states_take_the_seconds_of_their_arithmetic(offload_optimizer: str, tmp_path: Path) -> None:
    """Updates compute on fp32 states whatever lies in pages; decoding and encoding comes on top. The disk takes no time."""
    free = {"disk_read_bytes_per_s": 1e15, "disk_write_bytes_per_s": 1e15, "cpu_cores": 2}
    settings = {"offload_optimizer": offload_optimizer, "page_size": "64KiB", "disk_path": str(tmp_path)}

    def seconds(optimizer_state_dtype: str, **rates: float) -> tuple[float, int]:
        path = config(tmp_path, settings | {"optimizer_state_dtype": optimizer_state_dtype})
        given = {"states_numel_per_s": rates} if rates else {}
        found, blueprint = forecast(path, cpu_file(tmp_path, **free, **given))
        return found.seconds, sum(flat.shard_numel for flat in blueprint.trained_flats())

    exact, numel = seconds("auto")
    for word in ("bf16", "int8"):
        assert seconds(word)[0] == pytest.approx(exact, rel=1e-3)
        other = {"bf16": "int8", "int8": "bf16"}[word]
        assert seconds(word, **{other: 1.0})[0] == pytest.approx(exact, rel=1e-3)
        coded, _ = seconds(word, **{word: 1e7})
        # Two states of each element.
        assert coded - exact == pytest.approx(2 * numel / 1e7, rel=0.02)
    assert seconds("auto", bf16=1.0, int8=1.0)[0] == exact
    settings |= {"lock_free": True}
    assert seconds("int8", int8=1e6)[0] > 1.1 * seconds("int8")[0]


class Orthogonal(L.LightningModule):
    """Matrices that Muon moves, whose update is mostly products."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        return self.layers(torch.nn.functional.one_hot(batch[0] % 64, 64).to(self.layers[0].weight.dtype)).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Muon(self.parameters())


@pytest.mark.parametrize(
    "settings", [{"offload_optimizer": "device"}, {"offload_optimizer": "disk"}, {"lock_free": True}]
)
def test_products_of_updates_take_their_seconds(settings: dict[str, Any], tmp_path: Path) -> None:
    """Products of updates are counted in the dtype in which the optimizer multiplies, at the rate of updates or, if
    that is unknown, of training."""
    path = config(tmp_path, settings | {"page_size": "64KiB", "disk_path": str(tmp_path)})
    document = yaml.safe_load(path.read_text())
    document["model"] = {"class_path": f"{__name__}.Orthogonal"}
    path.write_text(yaml.safe_dump(document))
    free = {"disk_read_bytes_per_s": 1e15, "disk_write_bytes_per_s": 1e15, "cpu_cores": 2}

    def seconds(**rates: Any) -> float:
        return forecast(path, cpu_file(tmp_path, **free, **rates))[0].seconds

    flops = 2 * 5 * (2 * 64**3 + 2 * 64**3 + 2 * 64**3)  # two layers, five steps of Newton and Schulz
    known = {"bfloat16": 1e9, "float32": 1e30}
    nothing = seconds(update_flops_per_s={"bfloat16": 1e30, "float32": 1e6})
    as_training_s, more_s = seconds() - nothing, seconds(update_flops_per_s=known) - nothing
    if "lock_free" in settings:  # on the cores of updates, while others compute
        assert as_training_s > flops / 1e11 and more_s > flops / 1e9
    else:
        assert as_training_s == pytest.approx(flops / 1e11, rel=1e-3)
        assert more_s == pytest.approx(flops / 1e9, rel=1e-3)


class NeedsValues(L.LightningModule):
    """Takes numbers out of tensors, which the meta device has none of."""

    def __init__(self, in_forward: bool) -> None:
        super().__init__()
        self.in_forward = in_forward
        self.layer = torch.nn.Linear(16, 1)
        if not in_forward:
            self.scale = float(self.layer.weight.detach().to("meta").sum())

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.layer(batch[0].float()).mean()
        return loss * float(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("in_forward", [False, True])
def test_a_module_that_needs_values_is_refused(tmp_path: Path, in_forward: bool) -> None:
    path = config(tmp_path, {"page_size": "64KiB"})
    document = yaml.safe_load(path.read_text())
    document["model"] = {"class_path": f"{__name__}.NeedsValues", "init_args": {"in_forward": in_forward}}
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigError, match=r"NeedsValues.* cannot .*on the meta device \(.*\), so"):
        forecast(path, cpu_file(tmp_path))


NODES = {
    "gpt3_1.7b": 1,
    "gpt3_13b": 1,
    "gpt3_28b": 1,
    "gpt3_30b": 1,
    "gpt3_55b": 1,
    "gpt3_120b": 4,
    "gpt3_175b": 96,
    "t5_1.4b": 1,
    "t5_27b": 1,
    "t5_58b": 1,
    "t5_moe_1.2t": 32,
}
"""For each row of Table 4, servers of the paper's on which it fits."""


def test_every_row_of_table_4_has_its_nodes() -> None:
    assert {path.stem for path in (ROOT / "configs").glob("*_*.yaml") if path.stem[-1] in "bt"} == set(NODES)


@pytest.mark.parametrize(("layers", "each"), [(14, 4), (6, 9)])
def test_units_of_plans_and_experts_have_their_own_pages_in_the_least_memory(
    tmp_path: Path, layers: int, each: int
) -> None:
    """Layers are recomputed, so that all of a rank's experts of one are on the device at once; the root and the blocks that
    are fetched without a plan leave adjacent pages to them."""
    document = yaml.safe_load((ROOT / "configs" / "t5_moe_1.2t.yaml").read_text())
    document["trainer"]["strategy"]["init_args"]["expert_parallel_size"] = 8
    document["model"]["init_args"] |= {"layers": layers, "experts": 8 * each}
    path = tmp_path / "t5_moe.yaml"
    path.write_text(yaml.safe_dump(document))
    found, _ = forecast(path, "a100_40gb_x8", 1, 8, {"disk_path": str(tmp_path), "offload_optimizer": "disk"})
    assert found.fits


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        *(
            pytest.param([row, f"--nodes={nodes}"], 30, marks=[] if row == "gpt3_175b" else pytest.mark.slow, id=row)
            for row, nodes in NODES.items()
        ),
        pytest.param(
            ["t5_moe_1.2t", "--nodes=64", "--strategy={page_size: 256KiB, expert_parallel_size: 1}"],
            400,  # 36,897 units on each rank
            marks=[pytest.mark.slow, pytest.mark.timeout(900)],
            id="t5_moe_1.2t_undivided",
        ),
    ],
)
def test_rows_of_table_4_are_planned_with_little_memory_and_time(arguments: list[str], limit_s: float) -> None:
    """Seconds of a processor, not of the clock, which depends on who else computes."""
    # The system's count of a child's peak (ru_maxrss) includes that of the process that has started it.
    program = (
        "import atexit, runpy, sys\n"
        "atexit.register(lambda: print(open('/proc/self/status').read(), file=sys.stderr))\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    command = [sys.executable, "-c", program, "main.py", "plan", *arguments, "--hardware=a100_40gb_x8", "--json"]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, **streams)
    assert process.stdout is not None and process.stderr is not None
    with process.stdout, process.stderr:
        found = json.loads(process.stdout.read())
        (peak,) = re.findall(r"^VmHWM:\s+(\d+) kB$", process.stderr.read(), re.M)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0 and found["fits"]
    assert int(peak) * 1024 < 4e9
    assert used.ru_utime + used.ru_stime < limit_s
