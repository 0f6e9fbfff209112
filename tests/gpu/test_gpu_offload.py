"""`activations="host"` on a CUDA device: the numbers of a run that keeps them, and less device memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.memory.activation_buffers import ActivationMover, HostBuffers, HostStore
from lightning_ptm.memory.backend import backend_here
from lightning_ptm.memory.streams import copy_streams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what torch asks for in order to promise the same bits


@pytest.fixture(autouse=True)
def same_bits_each_time() -> Iterator[None]:
    """Only an error in place of a warning makes torch choose the deterministic backward of fused attention."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


WIDTH, LAYERS, TOKENS, BATCH, STEPS = 256, 8, 512, 16, 5
HIDDEN_BYTES = BATCH * TOKENS * 4 * WIDTH * 2


class Block(nn.Module):
    """Attention and a feed-forward, with dropout; of the feed-forward alone autograd keeps two hidden tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.first(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)
        self.losses: list[Tensor] = []
        self.peaks: list[int] = []
        self.sent: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        torch.cuda.reset_peak_memory_stats()
        x = self.embed(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.peaks.append(torch.cuda.max_memory_allocated())
        offload = self.trainer.strategy.engine.offload  # type: ignore[attr-defined]
        self.sent.append(0 if offload is None else offload.sent_bytes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


@dataclasses.dataclass(frozen=True)
class Run:
    losses: Tensor
    weights: list[Tensor]
    peak_bytes: int
    sent_bytes: int


def train(precision: str = "bf16-mixed", **settings: Any) -> Run:
    torch.manual_seed(0)
    model = Model()
    data = torch.randint(0, 256, (BATCH * STEPS, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        accelerator="gpu",
        devices=1,
        strategy=AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, device_memory="128MiB", **settings),
        precision=precision,  # type: ignore[arg-type]
        max_steps=STEPS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=BATCH))
    weights = [parameter.detach().cpu() for parameter in model.parameters()]
    return Run(torch.stack(model.losses).cpu(), weights, max(model.peaks[1:]), model.sent[-1])


def assert_same(ours: Run, other: Run) -> None:
    assert torch.equal(ours.losses, other.losses), (ours.losses, other.losses)
    assert all(torch.equal(a, b) for a, b in zip(ours.weights, other.weights, strict=True))


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_the_numbers_are_those_of_activations_that_are_kept(precision: str, tmp_path: Path) -> None:
    homes = {
        "offload_optimizer": "host",
        "host_memory": "512MiB",
    }  # both updated by the CPU, so that only activations differ
    keep = train(precision, **homes)
    assert keep.sent_bytes == 0 and torch.isfinite(keep.losses).all()
    for settings in ({}, {"offload_parameters": "host"}, {"recompute": "every 2nd"}, {"recompute": "all"}):
        ours = train(precision, offload_activations="host", **homes, **settings)
        assert_same(ours, keep)
        assert ours.sent_bytes > 0


def test_the_device_holds_two_units_of_them_and_not_all() -> None:
    keep, host = train(), train(offload_activations="host")
    assert_same(host, keep)
    # Each block keeps at least its two hidden tensors. Of LAYERS of them, two and what one computes with are there at once.
    assert keep.peak_bytes - host.peak_bytes > (LAYERS - 4) * 2 * HIDDEN_BYTES
    assert host.sent_bytes >= STEPS * LAYERS * 2 * HIDDEN_BYTES


def test_recomputed_units_keep_their_inputs_in_ram() -> None:
    keep, host = train(recompute="all"), train(recompute="all", offload_activations="host")
    assert_same(host, keep)
    assert keep.peak_bytes - host.peak_bytes > (LAYERS - 5) * HIDDEN_BYTES // 4


def test_copies_are_ordered_behind_compute_and_buffers_are_page_locked() -> None:
    backend = backend_here(torch.cuda.current_device())
    device = backend.device
    mover = ActivationMover(backend, HostStore(copy_streams(backend), HostBuffers(backend, free_bytes=lambda: 1 << 40)))
    numel = 16 << 20
    held = []
    for number in range(6):
        source = torch.zeros(numel, device=device)
        for _ in range(20):  # a queue of kernels that the copy must wait for
            source.add_(float(number + 1))
        away = mover.send(source)
        assert away.buffer is not None and away.buffer.tensor.is_pinned()
        held.append(away)
        del source
        if number:
            mover.settle(held[number - 1])  # its memory is taken by the next source, or the one after it
    mover.settle(held[-1])
    for number in reversed(range(6)):
        mover.bring(held[number])
        storage = mover.storage(held[number])
        whole = torch.empty(0, device=device).set_(storage)
        assert torch.equal(whole, torch.full((numel,), 20.0 * (number + 1), device=device))
        del whole, storage
        held.pop()
    mover.close()
