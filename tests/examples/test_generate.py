"""The example that continues a text: it writes what a plain loop over the same weights does, from RAM and from disk."""

from __future__ import annotations

import logging
import os
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.products import products_of
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.data.text import decode, encode
from lightning_ptm.models import GPT

EXAMPLE = Path(__file__).parents[2] / "examples" / "generate.py"
SIZES: dict[str, Any] = {"width": 64, "layers": 12, "heads": 4, "sequence_length": 24}
PROMPT = "To be, or not"
COUNT = 20
"""Prompt and continuation are longer than the context, so the window moves."""
HOST_KIB = 640

DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}


@dataclass(frozen=True)
class Saved:
    """A GPT's weights (in fp32), and its two checkpoints."""

    model: GPT
    full: Path
    sharded: Path


class Varied(GPT):
    """Model whose first weights are large enough for texts of more than one letter; a step of training does not change
    that."""

    def init_weights(self, module: nn.Module) -> None:
        super().init_weights(module)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.mul_(12)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("gpt")
    environment = dict(os.environ)
    for kind in ("full", "sharded"):
        torch.manual_seed(0)
        model = Varied(**SIZES, learning_rate=1e-4)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            strategy=AngelPTMStrategy(page_size="64KiB", checkpoints={"state_dict_type": kind}),
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder / kind, filename="one", every_n_train_steps=1)],
            default_root_dir=folder,
        )
        tokens = encode("a text to learn from, which is longer than a window. ")[:25]
        trainer.fit(model, DataLoader([(tokens[:-1], tokens[1:])], batch_size=1))  # type: ignore[arg-type]
    os.environ.clear()
    os.environ.update(environment)
    return Saved(model, folder / "full" / "one.ckpt", folder / "sharded" / "one.ckpt")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "disabled", True)
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def plainly(saved: Saved, prompt: str, count: int, precision: str) -> bytes:
    """An argmax loop in plain PyTorch, as one would write it, over the parameters that computing sees."""
    model = GPT(**SIZES)
    model.configure_model()
    model.load_state_dict(saved.model.state_dict())
    model.to(DTYPES[precision]).eval()
    tokens = list(prompt.encode())
    with (
        products_of(precision),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"),
    ):
        for _ in range(count):
            logits = model(torch.tensor([tokens[-SIZES["sequence_length"] :]]))
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == 0:  # a text's end
                break
    return bytes(tokens[len(prompt) :]).rstrip(b"\0")


@pytest.mark.parametrize("host_memory", ["auto", f"{HOST_KIB}KiB"])
@pytest.mark.parametrize(("kind", "precision"), [("full", "bf16-mixed"), ("sharded", "32-true")])
def test_the_text_is_that_of_a_plain_loop_with_less_memory_than_the_model_takes(
    saved: Saved, example: Any, disk: Path, capfdbinary: Any, kind: str, precision: str, host_memory: str
) -> None:
    assert saved.model.parameter_numel * DTYPES[precision].itemsize > 1.4 * (HOST_KIB << 10)
    options = [f"--disk-path={disk}", f"--host-memory={host_memory}", "--page-size=64KiB", f"--precision={precision}"]
    sampled = [f"--prompt={PROMPT}", f"--count={COUNT}", "--temperature=0", "--accelerator=cpu"]
    capfdbinary.readouterr()
    text = example.main([str(getattr(saved, kind)), *sampled, *options])
    expected = plainly(saved, PROMPT, COUNT, precision)
    assert decode(text) == capfdbinary.readouterr().out == expected and len(set(expected)) > 4


def test_weights_are_fetched_ahead_of_their_use_and_not_copied_beside_their_pages(
    saved: Saved, example: Any, disk: Path
) -> None:
    class Watching(example.TextGPT):  # type: ignore[misc, name-defined]
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            strategy: Any = self.trainer.strategy
            seen["ram"] = sum(room.bytes for room in strategy.tier_rooms() if room.tier != "disk")
            seen["beside"] = len(strategy.engine.values._originals)
            seen["misses"] = strategy.engine.executor.fetching.misses
            return super().forward(tokens)

    seen: dict[str, int] = {}
    example.main.__globals__["TextGPT"] = Watching
    memory = [f"--disk-path={disk}", f"--host-memory={HOST_KIB}KiB", "--page-size=64KiB"]
    example.main([str(saved.full), "--accelerator=cpu", f"--prompt={PROMPT}", f"--count={COUNT}", *memory])
    assert seen["ram"] <= (HOST_KIB + 2 * 64) << 10  # two pages for values in transit
    assert seen["beside"] == seen["misses"] == 0


def test_draws_are_repeated_by_their_seed(saved: Saved, example: Any) -> None:
    def text(*options: str) -> bytes:
        return decode(example.main([str(saved.full), "--accelerator=cpu", "--prompt=x", "--count=12", *options]))

    drawn = text("--seed=3")
    assert text("--seed=3") == drawn != text("--seed=4")
    # The likeliest alone leaves nothing to draw.
    assert text("--top-k=1", "--temperature=5") == plainly(saved, "x", 12, "bf16-mixed")


def test_an_empty_prompt_begins_a_new_text(saved: Saved, example: Any) -> None:
    text = example.main([str(saved.full), "--accelerator=cpu", "--count=5", "--temperature=0"])
    assert decode(text) == plainly(saved, "\0", 5, "bf16-mixed")


def test_a_checkpoint_of_another_kind_of_model_is_refused(saved: Saved, example: Any, tmp_path: Path) -> None:
    checkpoint = torch.load(saved.full, weights_only=True)
    for changed in ({"_class_path": "lightning_ptm.models.T5"}, {"vocab_size": 500}):
        torch.save({**checkpoint, "hyper_parameters": {**SIZES, **changed}}, tmp_path / "other.ckpt")
        with pytest.raises(SystemExit, match=r"other.ckpt is not of a lightning_ptm.models.GPT that reads bytes"):
            example.main([str(tmp_path / "other.ckpt")])
