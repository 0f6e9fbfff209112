"""Whole fits on the fake device, in a process that has no other: `python fits_program.py FOLDER NUMBER...`, with numbers
of `fit_cases.CASES`; as one rank of several, which torchrun's variables tell, of `CASES_OF_RANKS` and then `CASES_OF_PARTS`.
For each it prints a line, `case NUMBER: ok` or `case NUMBER: failed`, the latter with a traceback.

I1: losses and weights of a case are, bit for bit, those of the same training with everything on the device, nothing
    recomputed, activations kept and updates synchronous; of 32-true on one rank those are a plain Trainer's.
I2: a run that goes on from a case's checkpoint ends with the same losses and weights.
I3: no access is without order.
"""

from __future__ import annotations

import gc
import os
import sys
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import fake_device  # noqa: F401 before torch
import lightning as L
import told_cases
import torch
from fake_library import NAME, SAME_KERNELS
from fit_cases import ACCUMULATED, CASES, CASES_OF_PARTS, CASES_OF_RANKS, CLIPS, HOMES, SAVES, settings_of
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.models.moe import MixtureOfExperts
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel

WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
ALL = CASES if WORLD_SIZE == 1 else [*CASES_OF_RANKS, *CASES_OF_PARTS]
if NAME != "cuda":
    import fake_accelerator  # noqa: F401
if WORLD_SIZE > 1:
    import fake_nccl  # noqa: F401 in place of NCCL

VOCABULARY, WIDTH, LENGTH = 97, 64, 16
EPOCHS, BATCHES, ROWS = 2, 4, 4


class Dense(nn.Module):
    """Attention and a feed-forward, with dropout: 49,000 parameters, some pages of 64 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.heads = 2

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = self.qkv(self.first(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + functional.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Experts(nn.Module):
    """Four experts, one a token; the batch decides which units are used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = MixtureOfExperts(
            WIDTH,
            2 * WIDTH,
            experts=4,
            choices=1,
            capacity_factor=1.25,
            eval_capacity_factor=2.0,
            jitter=0.01,
            gated=False,
            dropout=0.1,
        )
        for parameter in self.layer.parameters():
            nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        out, routing = self.layer(x)
        return x + out + 0.01 * routing.balance_loss.to(x.dtype)


EXPERTS = {"units": ["Dense", "MixtureOfExperts", "Expert"]}
CUT: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "tensor_parallel": {
        "plan": {
            "blocks.*.qkv": ColwiseParallel(parts=3, heads="heads"),
            "blocks.*.out": RowwiseParallel(),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
        }
    },
}
UNITS: dict[str, dict[str, Any]] = {
    "dense": {},
    "experts": EXPERTS,
    "divided": {**EXPERTS, "expert_parallel_size": 2},
    "cut": CUT,
    "halves": {**CUT, "tensor_parallel": {**CUT["tensor_parallel"], "overlap": "two_batches"}},
}
"""Settings of the strategy by model."""


class Net(L.LightningModule):
    def __init__(self, model: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            [Dense(), *(Dense() if model in ("dense", "cut", "halves") else Experts() for _ in range(2))]
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.parts = 2 if model == "halves" else 1
        """How often a step is called for a batch."""
        self.losses: list[Tensor] = []
        self.sent_bytes = 0
        """Bytes of activations copied to RAM."""

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.embedding(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1).float(), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        engine = getattr(self.trainer.strategy, "engine", None)  # a plain Trainer's has none
        if engine is not None and engine.offload is not None:
            self.sent_bytes = engine.offload.sent_bytes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


class Saves(L.Callback):
    """A checkpoint after the first epoch."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self._path)


Training = tuple[str, str, str, str]
"""Model, clip, accumulation, precision: what decides the numbers."""


def train(training: Training, strategy: Any, resume: Path | None = None, *callbacks: L.Callback) -> Net:
    model, clip, accumulate, precision = training
    gc.collect()  # the pool of the fit before may still be there
    torch.manual_seed(0)
    module = Net(model)
    batches = BATCHES * WORLD_SIZE // UNITS[model].get("tensor_parallel_size", 1)
    rows = torch.randint(0, VOCABULARY, (batches * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    trainer = L.Trainer(
        accelerator=NAME,
        devices=WORLD_SIZE,
        strategy=strategy,
        precision=precision,  # type: ignore[arg-type]
        max_epochs=EPOCHS,
        gradient_clip_val=CLIPS[clip],
        accumulate_grad_batches=ACCUMULATED[accumulate],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=list(callbacks) or None,
    )
    trainer.fit(module, DataLoader(rows, batch_size=ROWS), ckpt_path=resume)  # type: ignore[arg-type]
    return module.cpu()


def same(ours: Net, theirs: Net, epochs: int) -> None:
    """The losses of the last epochs and all weights, bit for bit."""
    count = epochs * BATCHES * ours.parts
    mine, others = (torch.stack(net.losses[-count:]).cpu() for net in (ours, theirs))
    assert len(ours.losses) == count and mine.isfinite().all(), ours.losses
    assert torch.equal(mine, others), (mine, others)
    _same_parameters(ours, theirs)


def same_weights(ours: Net, theirs: Net) -> None:
    """All losses and weights, bit for bit."""
    mine, others = (torch.stack(net.losses).cpu() for net in (ours, theirs))
    assert torch.equal(mine, others), (mine, others)
    _same_parameters(ours, theirs)


def _same_parameters(ours: Net, theirs: Net) -> None:
    weights = dict(theirs.named_parameters())
    different = [name for name, weight in ours.named_parameters() if not torch.equal(weight, weights[name])]
    assert not different, different


@lru_cache
def expected(training: Training, homes_name: str = "device", disk: Path | None = None) -> Net:
    """I1's other side. A real device rounds updates and norms of gradients otherwise than the CPU, so that the other side has
    to compute them in the same place."""
    homes = (
        HOMES[homes_name]
        if homes_name in ("device", "all on disk")
        else HOMES["device"] | {"offload_optimizer": "host"}
    )
    ours = train(training, AngelPTMStrategy(page_size="64KiB", disk_path=disk, **homes, **UNITS[training[0]]))
    assert all(weight.isfinite().all() for weight in ours.parameters())
    if training[-1] == "32-true" and WORLD_SIZE == 1 and homes_name == "device":
        same(ours, train(training, SingleDeviceStrategy(torch.device(NAME, 0))), EPOCHS)
    return ours


def training_of(number: int) -> Training:
    model, clip, accumulate, precision = ALL[number][3], *ALL[number][6:]
    return model, clip, accumulate, precision


def check(number: int, folder: Path) -> None:
    case, training = ALL[number], training_of(number)
    saves, model = case[2], training[0]
    disk, path = folder / "disk", folder / "half.ckpt"
    disk.mkdir(parents=True, exist_ok=True)  # another rank may have
    settings = settings_of(case)

    def strategy() -> AngelPTMStrategy:
        return AngelPTMStrategy(page_size="64KiB", debug={"poison": True}, disk_path=disk, **settings, **UNITS[model])

    theirs = expected(training) if SAME_KERNELS else expected(training, case[0], disk)
    with told_cases.in_order():
        whole = train(training, strategy(), None, *([Saves(path)] if SAVES[saves] else []))
        same(whole, theirs, EPOCHS)
        assert (whole.sent_bytes > 0) == (settings["offload_activations"] == "host"), whole.sent_bytes
        if SAVES[saves]:
            same(train(training, strategy(), path), whole, 1)
    assert not list(disk.iterdir())


def prepare() -> None:
    told_cases.prepare(least_bytes=4096)


def main(folder: Path, numbers: list[int]) -> None:
    prepare()
    told_cases.go_through(
        (f"case {number}", ", ".join(ALL[number]), partial(check, number, folder / str(number))) for number in numbers
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), list(map(int, sys.argv[2:])))
