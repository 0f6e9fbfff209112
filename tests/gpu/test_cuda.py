"""The engine on a CUDA device: streams, page-locked host memory, the three tiers; same numbers wherever bytes live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.models import Block
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.memory.quantization import rounded
from lightning_ptm.terms import CODES, Tier

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Model(LightningModule):
    def __init__(self, width: int = 128, layers: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width, 4 * width, F.gelu, norm=True) for _ in range(layers))
        self.head = nn.Linear(width, 256)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(
    precision: str = "bf16-mixed",
    clip: float | None = None,
    *,
    model: type[Model] = Model,
    accumulate: int = 1,
    devices: int | list[int] = 1,
    **settings: Any,
) -> tuple[Tensor, list[Tensor]]:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    made = model()
    data = torch.randint(0, 256, (32 * accumulate, 65), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="gpu",
        devices=devices,
        strategy=AngelPTMStrategy(**{"page_size": "64KiB", "debug": {"poison": True}, **settings}),  # type: ignore[arg-type]
        precision=precision,  # type: ignore[arg-type]
        max_steps=4,
        gradient_clip_val=clip,
        accumulate_grad_batches=accumulate,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(made, DataLoader(data, batch_size=8))
    return torch.stack(made.losses).cpu(), [p.detach().cpu() for p in made.parameters()]


SMALL = {"device_memory": "24MiB", "host_memory": "256MiB"}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_homes_of_parameters_do_not_change_numbers(precision: str, clip: float | None, tmp_path: Path) -> None:
    # Master states on the host are updated by the CPU in every run, so that only where bytes live differs.
    host, weights = train(precision, clip, offload_optimizer="host")
    for settings in (
        {"offload_parameters": "host", "offload_optimizer": "host", **SMALL},
        {"offload_parameters": "host", "offload_optimizer": "disk", "disk_path": str(tmp_path), **SMALL},
        {"offload_parameters": "disk", "offload_optimizer": "disk", "disk_path": str(tmp_path), **SMALL},
        {"offload_parameters": "host", "offload_optimizer": "host", "recompute": "all", **SMALL},
    ):
        losses, after = train(precision, clip, **settings)
        assert torch.equal(host, losses), settings
        assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True)), settings


class Frozen(Model):
    """Blocks with frozen matrices."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(parameter.dim() < 2)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-3)


class RoundedBefore(Frozen):
    """By the CPU, to the codes of bf16 values."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.blocks.parameters():
            if not parameter.requires_grad:
                flat = rounded(parameter.data.flatten().bfloat16(), CODES["nf4"])
                parameter.data = flat.float().view(parameter.shape)


def test_frozen_weights_in_codes_are_decoded_on_the_device_as_on_a_cpu(tmp_path: Path) -> None:
    before, weights = train(model=RoundedBefore, offload_optimizer="host")
    for settings in (
        {"offload_optimizer": "host"},
        {"offload_parameters": "host", "offload_optimizer": "host", **SMALL},
        {"offload_parameters": "disk", "offload_optimizer": "host", "disk_path": str(tmp_path), **SMALL},
    ):
        losses, after = train(model=Frozen, frozen_dtype="nf4", **settings)
        assert torch.equal(before, losses), settings
        assert all(torch.equal(a, b) for a, b in zip(weights, after, strict=True)), settings


def test_everything_on_the_device_equals_a_plain_loop() -> None:
    losses, weights = train()
    torch.manual_seed(0)
    model = Model().cuda()
    masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    data = torch.randint(0, 256, (32, 65), generator=torch.Generator().manual_seed(1))
    for batch in data.split(8):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model.training_step(batch.cuda(), 0)
        loss.backward()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for parameter, master in zip(model.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    assert torch.equal(torch.stack(model.losses).cpu(), losses)
    assert all(torch.equal(a.detach().cpu(), b) for a, b in zip(masters, weights, strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
@pytest.mark.parametrize("home", ["device", "host"])
def test_gradients_go_where_their_parameters_go_when_the_run_ends(home: str, precision: str) -> None:
    made: list[Model] = []

    class Looks(Model):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def on_after_backward(self) -> None:
            self.norms = [float(parameter.grad.norm()) for parameter in self.parameters()]  # type: ignore[union-attr]

    settings = SMALL if home == "host" else {}
    train(precision, model=Looks, offload_parameters=home, offload_optimizer=home, **settings)
    for parameter, norm in zip(made[0].parameters(), made[0].norms, strict=True):  # type: ignore[arg-type]
        assert parameter.grad is not None and parameter.grad.device == parameter.device == torch.device("cpu")
        assert parameter.grad.dtype == parameter.dtype
        assert float(parameter.grad.norm()) == pytest.approx(norm, rel=1e-2 if precision == "bf16-mixed" else 1e-5)


def test_fp16_with_a_dynamic_loss_scale_skips_overflowing_steps() -> None:
    losses, weights = train("16-mixed")
    assert torch.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_host_pages_are_page_locked_and_copies_are_ordered_behind_compute() -> None:
    backend = backend_here(torch.cuda.current_device())
    with Allocator(
        page_size=1 << 20, backend=backend, sizes={Tier.DEVICE: 64 << 20, Tier.HOST: 64 << 20}, pin_host=True
    ) as allocator:
        host = allocator.allocate("host", 8 << 20, torch.float32, Tier.HOST)
        assert host.tensor().is_pinned()
        target = allocator.allocate("device", 8 << 20, torch.float32, Tier.DEVICE)
        back = allocator.allocate("back", 8 << 20, torch.float32, Tier.HOST)
        host.tensor().copy_(torch.arange(8 << 20, dtype=torch.float32))
        allocator.copy(host, target).wait(host=False)
        for _ in range(50):  # a queue of kernels that the copy back must wait for
            target.tensor().add_(1.0)
        allocator.copy(target, back).wait()
        assert torch.equal(back.tensor(), torch.arange(8 << 20, dtype=torch.float32) + 50)


class Metered(Model):
    """Model with a metric, which is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__(32, 1)
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert self.device == loss.device == self.mean.device
        self.log("loss", self.mean, on_step=True)
        self.mean(loss.detach())
        return loss


def test_metrics_of_a_module_are_where_its_steps_are_and_afterwards_in_ram() -> None:
    module = Metered()
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy=AngelPTMStrategy(page_size="64KiB"),
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(torch.randint(0, 256, (4, 9)), batch_size=2))
    assert module.device == module.mean.device == torch.device("cpu")
