"""The example of fine-tuning: from a folder of Transformers' own, whole and with adapters, as the plain strategy does it."""

from __future__ import annotations

import ctypes
import logging
import re
import runpy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")
pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, LlamaConfig

from lightning_ptm import ConfigError
from lightning_ptm.memory.quantization import rounded
from lightning_ptm.terms import CODES
from lightning_ptm.trainer.matmul_precision import SLOW, _slowdown_here

EXAMPLE = Path(__file__).parents[2] / "examples" / "finetune_causal_lm.py"
STEPS = 3


@pytest.fixture(scope="module")
def example() -> Any:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(logging.getLogger("lightning.pytorch"), "disabled", True)


CONFIGS = {
    "gpt2": GPT2Config(n_layer=3, n_embd=64, n_head=4, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0),
    "llama": LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=32,
        attention_dropout=0.1,
    ),
}


@pytest.fixture(params=list(CONFIGS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A small model with random weights; gpt2's head is tied, llama's is in several shards."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(CONFIGS[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.02)  # norms and biases are not all ones and zeros
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB" if request.param == "llama" else "1GB")
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 200)
    return tmp_path / "model"


class Watching(L.Callback):
    """Keeps losses, the weights that training starts from, and what the engine keeps of what kind."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.first: dict[str, Tensor] = {}
        self.gradients: set[str] = set()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if hasattr(trainer.strategy, "engine"):
            self.look_at(trainer.strategy.engine)
            with trainer.strategy.gathered(write=False):
                self.first = {name: value.detach().clone() for name, value in module.named_parameters()}
        else:
            self.first = {name: value.detach().clone() for name, value in module.named_parameters()}

    def look_at(self, engine: Any) -> None:
        """Bytes of master states, elements that have some, bytes of compute parameters."""
        trained = [flat for flats in engine.flats for flat in flats]
        pages = [paged for flat in trained for paged in (flat.states.master, *flat.states.slots.values()) if paged]
        self.master_bytes = sum(paged.nbytes for paged in pages)
        self.trained_numel = sum(flat.store.layout.padded_numel for flat in trained)
        self.padding_numel = self.trained_numel - sum(
            slot.numel for flat in trained for slot in flat.store.layout.slots
        )
        self.compute_bytes = sum(flat.home.nbytes for store in engine.stores for flat in store.flats)

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs["loss"].detach().clone())

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.gradients |= {name for name, value in module.named_parameters() if value.grad is not None}


def options(folder: Path, rank: int, precision: str = "32-true", *more: str) -> list[str]:
    text = str(folder.parent / "text.txt")
    return [
        *(str(folder), "--data", text, "--lora-rank", str(rank), "--steps", str(STEPS), "--precision", precision),
        *("--sequence-length", "16", "--batch-size", "4", "--page-size", "64KiB", "--learning-rate", "1e-2", *more),
    ]


def plainly(example: Any, arguments: list[str]) -> tuple[Watching, dict[str, Tensor]]:
    """Runs the example with Lightning's own strategy and a model that is loaded by Transformers."""
    given = example.parse(arguments)

    class Plain(example.CausalLM):  # type: ignore[misc, name-defined]
        def configure_model(self) -> None:
            if self.model is None:
                model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).train()
                self.model = example.with_adapters(model, self.lora_rank) if self.lora_rank else model
                for name, value in self.model.named_parameters():
                    if given.frozen_dtype in CODES and not value.requires_grad and value.dim() > 1 and in_a_block(name):
                        value.data = rounded(value.data.flatten(), CODES[given.frozen_dtype]).view(value.shape)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.trained(), lr=self.learning_rate, fused=True)

    L.seed_everything(given.seed)
    module = Plain(given.model, given.lora_rank, given.learning_rate)
    data = example.TextBytes(given.data, sequence_length=given.sequence_length, batch_size=given.batch_size)
    watching = Watching()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        precision=given.precision,
        max_steps=given.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[watching],
    )
    trainer.fit(module, data)
    return watching, {name: value.detach().clone() for name, value in module.named_parameters()}


def in_a_block(name: str) -> bool:
    return ".h." in name or ".layers." in name


def test_frozen_weights_in_four_bits_are_as_if_rounded_before(example: Any, folder: Path) -> None:
    arguments = options(folder, 4, "32-true", "--frozen-dtype", "nf4")
    ours = Watching()
    trainer = example.main(arguments, [ours])
    theirs, trained = plainly(example, arguments)
    assert len(ours.losses) == STEPS and all(map(torch.equal, ours.losses, theirs.losses)), (ours.losses, theirs.losses)
    weights = dict(trainer.lightning_module.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in trained.items())
    numel = sum(value.numel() for name, value in weights.items() if "lora_" not in name and in_a_block(name))
    assert ours.compute_bytes < 0.6 * numel + 4 * (sum(value.numel() for value in weights.values()) - numel) + 16384


@pytest.mark.parametrize("rank", [0, 4])
def test_the_same_as_with_the_plain_strategy(example: Any, folder: Path, rank: int, tmp_path: Path) -> None:
    ours = Watching()
    trainer = example.main(options(folder, rank), [ours])
    theirs, trained = plainly(example, options(folder, rank))
    assert ours.first.keys() == theirs.first.keys()
    for name, value in theirs.first.items():
        assert torch.equal(ours.first[name], value), name
    assert len(ours.losses) == STEPS and all(map(torch.equal, ours.losses, theirs.losses)), (ours.losses, theirs.losses)
    weights = dict(trainer.lightning_module.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in trained.items())
    in_files: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        in_files |= load_file(file)
    for name, value in ours.first.items():
        if "lora_" not in name:
            plain = name.removeprefix("model.").removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(value, in_files[plain]), name
    changed = {name for name, value in weights.items() if not torch.equal(value, ours.first[name])}
    if rank:
        assert changed == {name for name in weights if "lora_" in name}
        assert all(not ours.first[name].any() and weights[name].any() for name in weights if "lora_B" in name)
    else:
        assert changed == set(weights)


def test_what_is_frozen_has_no_gradients_and_no_master_states(example: Any, folder: Path, tmp_path: Path) -> None:
    ours = Watching()
    trainer = example.main(options(folder, 4, "bf16-mixed", "--output", str(tmp_path / "out")), [ours])
    weights = dict(trainer.lightning_module.named_parameters())
    adapters = sum(value.numel() for name, value in weights.items() if "lora_" in name)
    assert ours.trained_numel == adapters + ours.padding_numel and ours.padding_numel < 0.3 * adapters
    assert ours.master_bytes == 12 * (adapters + ours.padding_numel)
    assert ours.compute_bytes < 2.1 * sum(value.numel() for value in weights.values())
    assert ours.gradients <= {name for name in weights if "lora_" in name}
    # What was trained can be put on the model again.
    base = AutoModelForCausalLM.from_pretrained(folder)
    again = dict(PeftModel.from_pretrained(base, tmp_path / "out").named_parameters())
    assert all(torch.equal(again[name.removeprefix("model.")], v) for name, v in weights.items() if "lora_" in name)


def test_adapters_without_values_are_refused(example: Any, folder: Path) -> None:
    """The base model's own rule, which is the nearest, would give random numbers to what must be zero."""
    given = example.parse(options(folder, 4))

    class Forgetful(example.CausalLM):  # type: ignore[misc, name-defined]
        def configure_model(self) -> None:
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            self.model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"), low_cpu_mem_usage=True)

    module = Forgetful(given.model, 4)
    trainer = L.Trainer(strategy=example.make_strategy(given), max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ConfigError, match=r"adapter of peft .* was built on the meta device"):
        trainer.fit(module, example.TextBytes(given.data, sequence_length=16))


class Peak(L.Callback):
    """The most anonymous memory that the process has between set-up and the end of training, in bytes more than before."""

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before must not serve as memory that costs nothing
        self._done = threading.Event()
        self._before = self._most = anonymous_bytes()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._most = max(self._most, anonymous_bytes())

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._done.set()
        self._thread.join()
        self.more = self._most - self._before

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self.on_train_end(trainer, module)


def anonymous_bytes() -> int:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found.group(1)) * 1024


def test_memory_of_adapters(example: Any, tmp_path: Path) -> None:
    """Two bytes for each of 25M frozen parameters, whose training would take 16, and a fixed amount for activations and
    all else."""
    config = GPT2Config(n_layer=8, n_embd=512, n_head=8, vocab_size=256, n_positions=32, bos_token_id=0, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    numel = sum(value.numel() for value in model.parameters())
    model.save_pretrained(tmp_path / "model")
    del model
    (tmp_path / "text.txt").write_text("It was a bright cold day in April. " * 200)
    peak = Peak()
    example.main(options(tmp_path / "model", 4, "bf16-mixed", "--page-size", "1MiB", "--batch-size", "1"), [peak])
    print(peak.more, numel)
    # A CPU without 16-bit arithmetic computes products in fp32: copies of what is multiplied come and go.
    copies = (16 << 20) if _slowdown_here(torch.bfloat16) >= SLOW else 0
    assert 2 * numel < peak.more < 2 * numel + (64 << 20) + copies < (6 if copies else 5) * numel
