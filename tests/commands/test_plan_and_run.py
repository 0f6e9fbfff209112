"""`lightning-ptm plan` against the run that it speaks of: bytes of pages in each tier, and of activations beside them."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import pytest
import torch
from kit.planned_runs import LIMITS, NEAR, make_trainer, planned

from lightning_ptm.data import TextBytes
from lightning_ptm.forecasting.prediction import Prediction
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.core_limits import one_core
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.models import GPT
from lightning_ptm.runtime.autograd import offload
from lightning_ptm.runtime.machine import heap
from lightning_ptm.runtime.units.store import DevicePages
from lightning_ptm.terms import TIERS, Tier
from lightning_ptm.trainer.matmul_precision import products_here

MODEL: dict[str, Any] = {"width": 128, "layers": 6, "heads": 4, "sequence_length": 64}
BATCH, STEPS = 8, 4
ON_DISK = {"offload_parameters": "disk", "offload_optimizer": "disk"}
THREE = {"device_memory": "3MiB", "offload_parameters": "host", "offload_optimizer": "disk"}
RUNS: dict[str, dict[str, Any]] = {
    "in RAM": {"disk_path": None},
    "masters on disk": {"offload_optimizer": "disk"},
    "all on disk": {"host_memory": "6MiB", **ON_DISK},
    "lock-free": {"lock_free": True},
    "lock-free, clipped": {"lock_free": True, "gradient_clip_val": 1.0},
    "three tiers": THREE,
    "three tiers, narrow": THREE | {"device_memory": "1600KiB"},
    "three tiers, masters on the host": THREE | {"offload_optimizer": "host"},
    "three tiers, lock-free": {"device_memory": "3MiB", "lock_free": True},
    "three tiers, accumulated": THREE | {"accumulate_grad_batches": 2},
    "checkpoints behind training": {
        "offload_optimizer": "disk",
        "checkpoints": {"state_dict_type": "sharded", "async_save": True},
    },
}
QUICK = (
    "all on disk",
    "three tiers, lock-free",
    "three tiers, accumulated",
)
OF_TRAINER = ("gradient_clip_val", "accumulate_grad_batches")


class Measured(L.Callback):
    """Bytes of pages at the peak, and what the first iteration takes beside them."""

    def __init__(self) -> None:
        self.pages: dict[str, int] = {}
        self.misses: list[int] = []
        self.beside = 0
        self._before = 0

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 0:
            gc.collect()  # what earlier runs have left, and would be gone in the middle of this one
            self._before = malloc_in_use_bytes()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        self.pages = {tier.name.lower(): engine.allocator.peak_bytes(tier) for tier in TIERS}
        self.misses.append(engine.executor.fetching.misses)
        trace = trainer.strategy.last_trace()  # type: ignore[attr-defined]
        if trace is not None and not self.beside:
            self.beside = trace.non_model_peak_bytes - self._before


Watching = TypeVar("Watching", bound=Measured)


def planned_and_trained(
    folder: Path, given: Mapping[str, Any], measured: Watching, **changes: Any
) -> tuple[Prediction, Watching]:
    """The forecast of a run, and what it measured; `changes`: sizes of the model."""
    model = MODEL | changes
    options = {name: given[name] for name in OF_TRAINER if name in given}
    settings = {**LIMITS, "disk_path": str(folder)}
    settings |= {name: value for name, value in given.items() if name not in options}
    if settings["disk_path"] is None:
        del settings["disk_memory"]
    text = folder / "text.txt"
    text.write_bytes(bytes(range(256)) * 256)
    data = {"path": str(text), "sequence_length": model["sequence_length"], "batch_size": BATCH}
    described = (
        {"class_path": "lightning_ptm.models.GPT", "init_args": model},
        {"class_path": "lightning_ptm.data.TextBytes", "init_args": data},
    )
    found = planned(folder, settings, STEPS, *described, ranks=1, **options)
    make_trainer(settings, STEPS, measured, ranks=1, **options).fit(GPT(**model), datamodule=TextBytes(**data))
    return found, measured


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    """Runs a model once: the memory that kernels take at their first use belongs to no run."""
    warmed()


def warmed(**changes: Any) -> None:
    model = GPT(**MODEL | changes).to(torch.bfloat16)
    model.configure_model()
    tokens = torch.zeros(BATCH, MODEL["sequence_length"], dtype=torch.long)
    with products_here(torch.bfloat16, CpuBackend()):
        model.to(torch.bfloat16).loss((tokens, tokens)).backward()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
)
def test_bytes_are_those_of_the_run(tmp_path: Path, name: str) -> None:
    found, measured = planned_and_trained(tmp_path, RUNS[name], Measured())
    assert {tier: plan.page_bytes for tier, plan in found.tiers.items()} == pytest.approx(measured.pages, rel=NEAR)
    assert found.tiers["device"].activation_bytes == pytest.approx(measured.beside, rel=NEAR)
    assert measured.misses[-1] == measured.misses[1]  # once traced, every unit was fetched ahead


@pytest.mark.filterwarnings("ignore")
def test_gradients_on_their_way_to_disk_keep_pages_only_where_there_is_room(tmp_path: Path) -> None:
    """How long depends on the disk."""
    found, measured = planned_and_trained(tmp_path, THREE | ON_DISK, Measured())
    for tier in ("host", "disk"):
        assert found.tiers[tier].page_bytes == pytest.approx(measured.pages[tier], rel=NEAR)
    device = found.tiers["device"]
    assert device.page_bytes * (1 - NEAR) <= measured.pages["device"] <= device.reserved_bytes


class Written(Measured):
    """And the bytes of activations on disk."""

    sent = reserved = written = 0

    def on_train_batch_end(self, trainer: L.Trainer, *rest: Any) -> None:
        super().on_train_batch_end(trainer, *rest)
        away = trainer.strategy.engine.offload  # type: ignore[attr-defined]
        self.sent, self.reserved = away.sent_bytes, away._movers[Tier.DISK]._store.total_bytes
        (self.written,) = away.disk_written_bytes()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_activations_on_disk_are_those_of_the_run(
    tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(heap, "_WATCHED_BYTES", 0)  # where RAM is short, tensors leave earlier
    with one_core():  # finds the OpenMP library, once in a process, which takes memory that is no activation
        pass
    given = {"disk_memory": "1GiB", "offload_activations": "disk", "recompute": recompute}
    found, measured = planned_and_trained(tmp_path, given, Written())
    assert found.offloaded_bytes == pytest.approx(measured.sent / STEPS, rel=NEAR)
    assert found.tiers["disk"].activation_bytes == found.offloaded_bytes <= measured.reserved
    assert found.disk_written_bytes == pytest.approx((measured.written / STEPS,), rel=NEAR)
    assert {tier: plan.page_bytes for tier, plan in found.tiers.items()} == pytest.approx(measured.pages, rel=NEAR)
    on_device = found.tiers["device"].activation_bytes
    assert measured.beside <= on_device
    # The plan counts what the root has saved for the whole step, of which the head's part is gone at the peak, and for a
    # recomputed unit its inputs beside its forward, which has not saved any.
    assert recompute == "all" or measured.beside >= on_device * 0.95


@pytest.mark.filterwarnings("ignore")
def test_whole_logits_count_for_no_sliced_loss(tmp_path: Path) -> None:
    """Counted are gradients of the head and of its input, which exist from the forward on, and one slice."""
    changes = {"vocab_size": 8192, "tie_head": True, "loss_tokens": 8}
    for _ in range(2):
        warmed(**changes)
    found, measured = planned_and_trained(tmp_path, {"disk_path": None, "host_memory": "256MiB"}, Measured(), **changes)
    assert found.tiers["device"].activation_bytes == pytest.approx(measured.beside, rel=NEAR)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", ["three tiers, narrow", pytest.param("three tiers, accumulated", marks=pytest.mark.slow)]
)
def test_gradients_and_copies_are_in_the_pages_of_the_plan(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[str, int | None, int]] = []
    take = DevicePages.take

    def noted(
        self: DevicePages,
        name: str,
        numel: int,
        dtype: torch.dtype,
        unit: int,
        frame: int | None = None,
        **more: Any,
    ) -> Any:
        made = take(self, name, numel, dtype, unit, frame, **more)
        taken.append((name, frame, made.pages.frames[0] - self._first))
        return made

    class Traced(Measured):
        """Forgets what the iterations before the first plan of a traced order have taken."""

        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            super().on_train_batch_start(trainer, *args)
            if len(self.misses) < 2:
                taken.clear()

    monkeypatch.setattr(DevicePages, "take", noted)
    planned_and_trained(tmp_path, RUNS[name], Traced())
    assert {what.split()[-1] for what, *_ in taken} == {"full", "gradient"}
    assert [each for each in taken if each[1] != each[2]] == []


class Sampled(Measured):
    """The peak of all steps, read where a module of a block has computed, and where its result has its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for block in module.blocks:  # type: ignore[union-attr]
            for each in block.modules():
                each.register_forward_hook(self._computed)

    def _computed(self, module: Any, args: Any, result: torch.Tensor) -> None:
        self._read()
        if result.requires_grad:
            result.register_hook(self._read)

    def _read(self, *_: Any) -> None:
        self.peak = max(self.peak, malloc_in_use_bytes() - self._before)


IN_SLICES: dict[str, Any] = {
    "of the batch": 4,
    "of tokens": {"*.feed_forward": ("tokens", 4)},
    "of both": {"blocks.*": 4, "*.feed_forward": ("tokens", 4)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name == "of tokens" else pytest.param(name, marks=pytest.mark.slow) for name in IN_SLICES]
)
def test_activations_of_slices_are_those_of_the_run(tmp_path: Path, name: str) -> None:
    """Within a twentieth; of both within a fifth: slices of slices have so few tokens that gradients of weights count."""
    given = {"offload_optimizer": "disk", "slices": IN_SLICES[name]}
    for _ in range(2):  # kernels of products of other numbers of rows take memory at their first use
        found, measured = planned_and_trained(tmp_path, given, Sampled(), sequence_length=256)
    assert found.tiers["device"].activation_bytes == pytest.approx(
        measured.peak, rel=0.2 if name == "of both" else 0.05
    )
