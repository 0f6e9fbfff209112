"""What a fit says of the bytes that it writes to disk: in its first line, where the disk does not last, and at its end."""

from __future__ import annotations

import io
import logging
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.config import format_bytes
from lightning_ptm.trainer.disk_report import token_count

WIDTH, TOKENS, BATCH, STEPS = 64, 16, 2, 3
COUNT, BLOCK = 6, 4096
FP32_BYTES = 16 * BLOCK + COUNT * 5 * BLOCK
"""An fp32 number for each parameter: the embedding has 16 blocks of the disk, a linear layer begins a fifth."""
BF16_BYTES = 8 * BLOCK + COUNT * 3 * BLOCK
STEP_BYTES = 3 * FP32_BYTES
"""Master parameters and both moments of Adam."""


class Words(L.LightningModule):
    """Learns from rows of tokens, or of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(COUNT))

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        x = self.words(batch.long())
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def messages_of(caplog: pytest.LogCaptureFixture, rows: Tensor, accumulate: int = 1, **settings: Any) -> list[str]:
    """What a fit of three steps says."""
    trainer = quiet_trainer(
        AngelPTMStrategy(page_size="64KiB", **settings),
        precision="bf16-mixed",
        max_steps=STEPS,
        accumulate_grad_batches=accumulate,
    )
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        caplog.clear()
        trainer.fit(Words(), DataLoader(rows, batch_size=BATCH))  # type: ignore[arg-type]
        return list(caplog.messages)


def tokens(dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.ones(BATCH * STEPS * 4, TOKENS, dtype=dtype)


def written(messages: list[str]) -> list[str]:
    return [message for message in messages if " has written " in message]


def test_bytes_of_a_step_and_a_token_are_said_at_the_end(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = messages_of(caplog, tokens(), offload_optimizer="disk", disk_path=disk, disk_tbw="600TB")
    (line,) = written(messages)
    found = re.fullmatch(
        r"angel_ptm has written (.*) to disk in 3 steps, checkpoints not counted: (.*) a step, (.*) a token; the disk's "
        r"rated 600 TB \(disk_tbw\) last (.*) at this speed",
        line,
    )
    assert found is not None, line
    whole, step, token, _ = found.groups()
    assert whole == format_bytes(3 * STEP_BYTES) and step == format_bytes(STEP_BYTES)
    assert token == format_bytes(STEP_BYTES / (BATCH * TOKENS))
    assert "a step writes" not in messages[0]  # lasts longer than a month of steps of a second


def test_a_token_of_accumulated_batches_and_none_of_numbers(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"offload_optimizer": "disk", "disk_path": disk}
    (line,) = written(messages_of(caplog, tokens(), accumulate=2, **settings))
    assert f", {format_bytes(STEP_BYTES / (2 * BATCH * TOKENS))} a token; " in line
    assert "600 times the disk's size, since no disk_tbw is given" in line
    (line,) = written(messages_of(caplog, tokens(torch.float32), **settings))
    assert "a token" not in line and f": {format_bytes(STEP_BYTES)} a step; " in line


def test_the_first_line_says_that_a_disk_does_not_last(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = messages_of(caplog, tokens(), offload_optimizer="disk", disk_path=disk, disk_tbw="1TB")
    steps = 10**12 // STEP_BYTES
    end = f"; a step writes {format_bytes(STEP_BYTES)} to disk, and the rated 1 TB (disk_tbw) last {steps:,} steps"
    assert messages[0].endswith(end), messages[0]


def test_a_lock_free_step_writes_at_most_so_much(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    messages = messages_of(caplog, tokens(), lock_free=True, disk_path=disk, disk_tbw="1TB")
    assert f"; a step writes at most {format_bytes(STEP_BYTES)} to disk" in messages[0]


def test_gradients_that_have_no_pages_yet_count(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"offload_optimizer": "disk", "offload_parameters": "disk", "device_memory": "1MiB"}
    messages = messages_of(caplog, tokens(), accumulate=2, disk_path=disk, disk_tbw="1TB", **settings)
    whole = STEP_BYTES + BF16_BYTES + 2 * FP32_BYTES  # compute parameters, and the sums after two micro-batches
    assert f"; a step writes {format_bytes(whole)} to disk" in messages[0]
    (line,) = written(messages)
    assert f": {format_bytes(whole)} a step, " in line


def test_nothing_is_said_where_nothing_is_written(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert not written(messages_of(caplog, tokens(), disk_path=disk))
    assert not written(messages_of(caplog, tokens()))


def of_a_rank(folder: str) -> list[str]:
    """What a rank says at the end of its fit."""
    said = io.StringIO()
    handler, logger = logging.StreamHandler(said), logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    try:
        strategy = AngelPTMStrategy(page_size="64KiB", offload_optimizer="disk", disk_path=folder)
        trainer = quiet_trainer(strategy, precision="bf16-mixed", max_steps=STEPS, devices=2)
        trainer.fit(Words(), DataLoader(tokens(), batch_size=BATCH))  # type: ignore[arg-type]
    finally:
        logger.removeHandler(handler)
    return written(said.getvalue().splitlines())


@pytest.mark.slow
def test_the_first_rank_speaks_of_its_own_bytes(disk: Path) -> None:
    first, second = run_ranks(of_a_rank, 2, str(disk), limit_s=100)
    (line,) = first
    assert not second and " to disk in 3 steps (rank 0 of 2), checkpoints not counted: " in line
    found = re.search(r": ([\d.]+) KiB a step, ([\d.]+) KiB a token; ", line)
    assert found is not None, line
    step, token = map(float, found.groups())
    assert STEP_BYTES / 2 <= 1024 * step < STEP_BYTES and token == pytest.approx(step / (BATCH * TOKENS), rel=1e-3)


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.ones(2, 8, dtype=torch.int64), 16),
        ({"ids": torch.ones(2, 8, dtype=torch.int32), "mask": torch.ones(2, 8)}, 16),
        ((torch.ones(2, 8), torch.ones(2, dtype=torch.int64)), None),
        (torch.ones(8, dtype=torch.int64), None),
        ("text", None),
    ],
)
def test_tokens_of_a_batch(batch: Any, count: int | None) -> None:
    assert token_count(batch) == count
