"""Fine-tune a Llama whose layers are divided over ranks, with fp32 weights and optimizer states on disk.

    python -m pip install -e ".[hf]"    # in a checkout
    python examples/tensor_parallel.py --tensor 2 --output tuned
    python examples/tensor_parallel.py path/to/model --tensor 4 --devices 8 --disk /mnt/nvme

`path/to/model` is a local folder with config.json and safetensors files; without one, a small Llama with random weights is
made. Each of `--tensor` ranks reads its slices of the weights from the files directly into pages, computes its part of each
layer, and exchanges activations with the others. The result is a whole model, the same (except for rounding) as with
`--tensor 1`.
"""

from __future__ import annotations

import argparse
import os
import tempfile
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
    """A causal language model as `self.model`, with no code for tensor parallelism.

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
        """Cross-entropy of the next token, in nats."""
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("train_loss", loss, prog_bar=True)
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
        num_key_value_heads=4,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rows(length: int, count: int) -> Tensor:
    """Rows of this file's text, byte by byte, repeated."""
    text = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    return text.repeat(-(-length * count // len(text)))[: length * count].view(count, length)


def main(arguments: Sequence[str] | None = None) -> Trainer:
    """Trains with the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", help="folder with config.json and safetensors files")
    parser.add_argument("--tensor", type=int, default=2, help="ranks that share the work of each layer")
    parser.add_argument("--devices", type=int, help="ranks; by default as many as --tensor")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="of all ranks together")
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--disk", default=tempfile.gettempdir(), help="folder for fp32 weights and optimizer states")
    parser.add_argument("--output", help="folder for the tuned model")
    options = parser.parse_args(arguments)
    seed_everything(0)
    devices = options.devices or options.tensor
    # Every rank runs this script; the first rank makes the model before the others are started.
    folder = options.model or os.environ.get("EXAMPLE_MODEL") or make_model(Path(tempfile.mkdtemp()))
    os.environ["EXAMPLE_MODEL"] = folder
    trainer = Trainer(
        strategy=AngelPTMStrategy(
            tensor_parallel_size=options.tensor,
            weights=folder,
            offload_optimizer="disk",
            disk_path=options.disk,
        ),
        devices=devices,
        precision=options.precision,
        max_steps=options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,  # the sampler below does not shuffle, so batches are independent of the ranks
    )
    data: Any = rows(options.sequence_length, options.steps * options.batch_size)
    replicas = devices // options.tensor
    sampler: Any = DistributedSampler(data, replicas, trainer.global_rank // options.tensor, shuffle=False)
    trainer.fit(CausalLM(folder), DataLoader(data, options.batch_size // replicas, sampler=sampler))
    if trainer.is_global_zero:
        print(f"training loss of the last batch: {float(trainer.callback_metrics['train_loss']):.4f}")
        if options.output:
            module: Any = trainer.lightning_module
            module.model.save_pretrained(options.output)  # after a run the module has its weights, if RAM can hold them
    return trainer


if __name__ == "__main__":
    main()
