"""Fine-tune a Llama on long texts whose tokens are divided over ranks (context parallelism).

    python -m pip install -e ".[hf]"    # in a checkout
    python examples/long_context.py --context 2 --tokens 16384 --output tuned
    python examples/long_context.py path/to/model --context 4 --devices 8 --tokens 131072

`path/to/model` is a local folder with config.json and safetensors files; without one, a small Llama with random weights is
made. Each of `--context` ranks has its part of every text, and so of the activations; in attention they exchange keys and
values. The result is the same (except for rounding) as with `--context 1`. At the end each rank's largest memory is printed.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_ptm import AngelPTMStrategy


class CausalLM(LightningModule):
    """A causal language model as `self.model`, with no code for context parallelism.

    Args:
        folder: the folder of its config.json.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.model: Any = None

    def configure_model(self) -> None:
        """Builds the model without memory for its weights; the strategy allocates them page by page."""
        if self.model is None:
            with torch.device("meta"):
                self.model = AutoModelForCausalLM.from_config(
                    AutoConfig.from_pretrained(self.folder, local_files_only=True)
                )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of the next token, in nats, of this rank's tokens."""
        loss: Tensor = self.model(input_ids=batch, labels=batch).loss
        self.log("train_loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over all weights."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_model(folder: Path) -> str:
    """Saves a small Llama with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 20,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def texts(length: int, count: int) -> Tensor:
    """Texts of this file, byte by byte, repeated."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    return text.repeat(-(-length * count // len(text)))[: length * count].view(count, length)


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder with config.json and safetensors files")
    parser.add_argument("--context", type=int, default=2, help="ranks that share the tokens of each text")
    parser.add_argument("--devices", type=int, help="ranks; by default as many as --context")
    parser.add_argument("--tokens", type=int, default=16384, help="of a text")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--recompute", default="none", help="none, all, every 2nd...")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--output", help="folder for the tuned model")
    options = parser.parse_args(arguments)
    seed_everything(0)
    devices = options.devices or options.context
    # Every rank runs this script; the first rank makes the model before the others are started.
    folder = options.model or os.environ.get("EXAMPLE_MODEL") or make_model(Path(tempfile.mkdtemp()))
    os.environ["EXAMPLE_MODEL"] = folder
    trainer = Trainer(
        strategy=AngelPTMStrategy(
            context_parallel_size=options.context,
            weights=folder,
            recompute=options.recompute,
            page_size="4MiB" if options.model else "256KiB",  # layers of the small model would leave larger pages empty
        ),
        devices=devices,
        precision=options.precision,
        max_steps=options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,  # the sampler below does not shuffle, so batches are independent of the ranks
    )
    replicas = devices // options.context
    data: Any = texts(options.tokens, options.steps * replicas)
    sampler: Any = DistributedSampler(data, replicas, trainer.global_rank // options.context, shuffle=False)
    began_s = time.perf_counter()
    trainer.fit(CausalLM(folder), DataLoader(data, 1, sampler=sampler))
    seconds = time.perf_counter() - began_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"rank {trainer.global_rank}: {peak:,.0f} MiB at most, {seconds:.1f} s")
    if trainer.is_global_zero:
        print(f"training loss of the last batch: {float(trainer.callback_metrics['train_loss']):.4f}")
        if options.output:
            module: Any = trainer.lightning_module
            module.model.save_pretrained(options.output)  # after a run the module has its weights, if RAM can hold them
    return trainer


if __name__ == "__main__":
    main()
