"""`lightning-ptm generate` and `trainer.predict`: the text that a plain loop over the same weights gives, from RAM and from
disk, and what is said of checkpoints that cannot be continued."""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit.products import products_of
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.cli import main
from lightning_ptm.commands import generate as continuation
from lightning_ptm.data.text import decode, encode
from lightning_ptm.models import GPT, Sampling

SIZES: dict[str, Any] = {"width": 64, "layers": 12, "heads": 4, "sequence_length": 24}
PROMPT = "To be, or not"
COUNT = 20
"""Prompt and continuation are longer than the context, so the window moves."""

DTYPES = {"bf16-mixed": torch.bfloat16, "32-true": torch.float32}
SMALL = "'{page_size: 64KiB, poison: true, disk_path: %s, host_memory: 640KiB}'"


@dataclasses.dataclass(frozen=True)
class Saved:
    """A GPT's weights (in fp32), and its two checkpoints."""

    model: GPT
    full: Path
    sharded: Path


class Varied(GPT):
    """With first weights that are large enough for texts that are no single letter; trained by a step it stays so."""

    def init_weights(self, module: nn.Module) -> None:
        super().init_weights(module)
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim > 1:
                    parameter.mul_(12)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder = tmp_path_factory.mktemp("gpt")
    environment, level = dict(os.environ), logging.getLogger("lightning.pytorch").level
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in ("full", "sharded"):
        torch.manual_seed(0)
        model = Varied(**SIZES, learning_rate=1e-4)
        trainer = Trainer(
            accelerator="cpu",
            devices=1,
            precision="bf16-mixed",
            strategy=AngelPTMStrategy(page_size="64KiB", state_dict_type=kind),
            max_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[ModelCheckpoint(folder / kind, filename="one", every_n_train_steps=1)],
            default_root_dir=folder,
        )
        tokens = encode("a text to learn from, which is longer than a window. ")[:25]
        trainer.fit(model, DataLoader([(tokens[:-1], tokens[1:])], batch_size=1))  # type: ignore[arg-type]
    logging.getLogger("lightning.pytorch").setLevel(level)
    os.environ.clear()
    os.environ.update(environment)
    return Saved(model, folder / "full" / "one.ckpt", folder / "sharded" / "one.ckpt")


def plainly(saved: Saved, prompt: str, count: int, dtype: torch.dtype = torch.float32) -> bytes:
    """An argmax loop in plain PyTorch, as one would write it, over the parameters that computing sees."""
    model = GPT(**SIZES)
    model.configure_model()
    model.load_state_dict(saved.model.state_dict())
    model.to(dtype).eval()
    tokens = list(prompt.encode())
    mixed = dtype is torch.bfloat16
    with (
        products_of("bf16-mixed" if mixed else "32-true"),
        torch.no_grad(),
        torch.autocast("cpu", torch.bfloat16, enabled=mixed),
    ):
        for _ in range(count):
            logits = model(torch.tensor([tokens[-SIZES["sequence_length"] :]]))
            tokens.append(int(logits[0, -1].argmax()))
            if tokens[-1] == 0:  # a text's end, which the command does not print
                break
    return bytes(tokens[len(prompt) :]).rstrip(b"\0")


Generate = Callable[..., tuple[bytes, str]]


@pytest.fixture
def generate(capfdbinary: pytest.CaptureFixture[bytes]) -> Generate:
    def run(*options: str) -> tuple[bytes, str]:
        capfdbinary.readouterr()
        main(["generate", "--accelerator=cpu", *options])
        captured = capfdbinary.readouterr()
        return captured.out, captured.err.decode()

    return run


def greedy(ckpt: Path, *options: str) -> list[str]:
    return [f"--ckpt={ckpt}", f"--prompt={PROMPT}", f"--max-new-tokens={COUNT}", "--temperature=0", *options]


@pytest.mark.slow_unless("full-32-true-disk", "sharded-bf16-mixed-disk")
@pytest.mark.parametrize(
    ("kind", "precision", "where"),
    [
        ("full", "bf16-mixed", "ram"),
        ("sharded", "32-true", "ram"),
        ("full", "32-true", "disk"),
        ("sharded", "bf16-mixed", "disk"),
    ],
)
def test_greedy_text_is_that_of_a_plain_loop(
    saved: Saved, generate: Generate, disk: Path, kind: str, precision: str, where: str
) -> None:
    on_disk = [
        f"--strategy.disk_path={disk}",
        "--strategy.offload_parameters=disk",
        "--strategy.page_size=64KiB",
        "--strategy.poison=true",
    ]
    text, said = generate(
        *greedy(getattr(saved, kind), f"--precision={precision}", *(on_disk if where == "disk" else []))
    )
    expected = plainly(saved, PROMPT, COUNT, DTYPES[precision])
    assert text == expected and len(set(expected)) > 4
    assert f"{len(expected)} bytes in" in said


class Watching(GPT):
    """Notes, at each token, what the run holds in RAM and on disk."""

    def forward(self, tokens: Tensor) -> Tensor:
        strategy: Any = self.trainer.strategy
        self.ram_bytes = sum(room.bytes for room in strategy.tier_rooms() if room.tier != "disk")
        self.beside = len(strategy.engine.values._originals)
        self.misses = strategy.engine.executor.fetching.misses
        return super().forward(tokens)


def predicting(disk: Path, **settings: Any) -> Trainer:
    strategy = AngelPTMStrategy(page_size="64KiB", poison=True, disk_path=disk, restore_weights=False, **settings)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, precision="bf16-mixed", strategy=strategy, **quiet)  # type: ignore[arg-type]


@pytest.mark.slow_unless("full")
@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_predict_continues_with_less_memory_than_the_model_takes(saved: Saved, disk: Path, kind: str) -> None:
    model = Watching(**SIZES, meta=True)
    model.sampling = Sampling(COUNT, temperature=0, stop=0)
    told: list[Tensor] = []
    model.told = told.append
    trainer = predicting(disk, host_memory="640KiB")
    prompts = DataLoader([encode(PROMPT), encode("Something else"[:13])], batch_size=1)  # type: ignore[arg-type]
    found = trainer.predict(model, prompts, ckpt_path=getattr(saved, kind))
    assert found is not None
    for text, prompt in zip(found, (PROMPT, "Something else"[:13]), strict=True):
        assert decode(text).rstrip(b"\0") == plainly(saved, prompt, COUNT, torch.bfloat16)  # type: ignore[arg-type]
    assert torch.equal(torch.cat(told), torch.cat([text[0] for text in found]))  # type: ignore[arg-type, index]
    model_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())
    assert model.ram_bytes <= (640 + 2 * 64) << 10 < model_bytes * 0.7  # two pages for values in transit
    assert model.beside == 0  # nor are precise copies kept beside pages that were given so little
    # Weights come by the plan, ahead of their use, in each of some 60 passes: none is fetched for want of it.
    assert model.misses == 0


def test_a_model_that_is_larger_than_the_memory_it_may_take(saved: Saved, generate: Generate, disk: Path) -> None:
    text, _ = generate(*greedy(saved.sharded, "--strategy", SMALL.strip("'") % disk))
    assert text == plainly(saved, PROMPT, COUNT, torch.bfloat16)


def test_draws_are_repeated_by_their_seed(saved: Saved, generate: Generate) -> None:
    def text(*options: str) -> bytes:
        return generate(f"--ckpt={saved.full}", "--prompt=x", "--max-new-tokens=12", *options)[0]

    drawn = text("--seed=3")
    assert text("--seed=3") == drawn != text("--seed=4")
    # The likeliest alone leaves nothing to draw.
    assert text("--top-k=1", "--temperature=5") == plainly(saved, "x", 12, torch.bfloat16)


def test_the_prompt_from_standard_input_and_one_that_is_too_long(
    saved: Saved, generate: Generate, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = PROMPT * 3
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(long.encode())))
    text, said = generate(f"--ckpt={saved.full}", "--max-new-tokens=5", "--temperature=0")
    assert text == plainly(saved, long[-24:], 5, torch.bfloat16)
    assert "the prompt has 39 bytes and the model reads 24: only the last 24 count" in said


def test_an_empty_prompt_begins_a_new_text(saved: Saved, generate: Generate) -> None:
    text, _ = generate(f"--ckpt={saved.full}", "--prompt=", "--max-new-tokens=5", "--temperature=0")
    assert text == plainly(saved, "\0", 5, torch.bfloat16)


def without(ckpt: Path, path: Path, *names: str) -> Path:
    checkpoint = torch.load(ckpt, weights_only=True)
    for name in names:
        del checkpoint[name]
    torch.save(checkpoint, path)
    return path


def config(path: Path, class_path: str = "lightning_ptm.models.GPT", **changes: Any) -> Path:
    arguments = {**SIZES, **changes}
    trainer = {
        "precision": "32-true",
        "strategy": {"class_path": "lightning_ptm.AngelPTMStrategy", "init_args": {"page_size": "128KiB"}},
    }
    path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"class_path": class_path, "init_args": arguments}}))
    return path


def test_the_config_says_what_the_checkpoint_does_not(saved: Saved, generate: Generate, tmp_path: Path) -> None:
    bare = without(saved.full, tmp_path / "bare.ckpt", "hyper_parameters")
    text, _ = generate(f"--config={config(tmp_path / 'gpt.yaml')}", *greedy(bare))
    assert text == plainly(saved, PROMPT, COUNT, torch.float32)
    # Sizes that the checkpoint says count.
    other = config(tmp_path / "other.yaml", width=128, layers=2)
    assert generate("--config", str(other), *greedy(saved.full))[0] == text


def refusal(*options: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--accelerator=cpu", "--prompt=x", *options])
    assert isinstance(stop.value.code, str)
    return stop.value.code


def test_what_cannot_be_continued_is_said(saved: Saved, tmp_path: Path) -> None:
    assert "generate needs --ckpt" in refusal()
    assert f"there is no checkpoint {tmp_path / 'none.ckpt'}" in refusal(f"--ckpt={tmp_path / 'none.ckpt'}")
    bare = without(saved.full, tmp_path / "bare.ckpt", "hyper_parameters")
    assert "saved without hyper-parameters" in refusal(f"--ckpt={bare}")
    small = config(tmp_path / "small.yaml", layers=11)
    said = refusal(f"--ckpt={bare}", f"--config={small}")
    assert (
        f"{bare} is of another model than this GPT: it has blocks.11.attention_norm.weight, " in said
        and "7 more" in said
    )
    wide = config(tmp_path / "wide.yaml", width=32)
    said = refusal(f"--ckpt={bare}", f"--config={wide}")
    assert "token_embedding.weight is (256, 64) there and (256, 32) here" in said
    (tmp_path / "text.txt").write_text("no checkpoint")
    assert str(tmp_path / "text.txt") in refusal(f"--ckpt={tmp_path / 'text.txt'}")


def named(path: Path, saved: Saved, **hyper_parameters: Any) -> Path:
    checkpoint = torch.load(saved.full, weights_only=True)
    checkpoint["hyper_parameters"] = {**hyper_parameters}
    torch.save(checkpoint, path)
    return path


def test_checkpoints_of_other_classes_are_said(saved: Saved, tmp_path: Path) -> None:
    t5 = named(tmp_path / "t5.ckpt", saved, _class_path="lightning_ptm.models.T5", width=64)
    assert "T5, which continues no text" in refusal(f"--ckpt={t5}")
    said = refusal(f"--ckpt={t5}", f"--config={config(tmp_path / 'gpt.yaml')}")
    assert "is of a lightning_ptm.models.T5 and the model of" in said
    foreign = named(tmp_path / "foreign.ckpt", saved, _class_path="os.path.GPT", width=64)
    assert "os.path.GPT, which is not a model of lightning_ptm; give the config that names it" in refusal(
        f"--ckpt={foreign}"
    )
    words = named(tmp_path / "words.ckpt", saved, **{**SIZES, "vocab_size": 500})
    assert "has 500 tokens, and generate reads and writes bytes" in refusal(f"--ckpt={words}")
    assert "temperature is -1" in refusal(f"--ckpt={saved.full}", "--temperature=-1")
    assert "top_k is 0, so there is no token to draw" in refusal(f"--ckpt={saved.full}", "--top-k=0")
    assert "no such Trainer" in refusal(f"--ckpt={saved.full}", "--accelerator=tpu")
    assert re.search("no such Trainer.*bf17.*bf16-mixed", refusal(f"--ckpt={saved.full}", "--precision=bf17"))


def test_a_reader_that_has_seen_enough_ends_it(saved: Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with monkeypatch.context() as patched, os.fdopen(writes, "w") as out:
        patched.setattr(sys, "stdout", out)
        main(["generate", "--accelerator=cpu", f"--ckpt={saved.full}", "--prompt=x", "--max-new-tokens=1000000"])


def test_a_config_may_name_the_strategy_alone() -> None:
    assert continuation._settings("angel_ptm_disk") == {"offload_optimizer": "disk"}
    assert continuation._settings("ddp") == continuation._settings(None) == {}
