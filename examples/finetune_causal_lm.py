"""Fine-tune a causal language model of Hugging Face Transformers, whole or with LoRA adapters of peft.

    python -m pip install -e ".[hf]"    # in a checkout
    python examples/finetune_causal_lm.py path/to/model --data path/to/texts
    python examples/finetune_causal_lm.py path/to/model --lora-rank 8 --output path/to/adapters
    python examples/finetune_causal_lm.py path/to/model --lora-rank 8 --frozen-dtype nf4    # QLoRA

`path/to/model` is a local folder with config.json and safetensors files; nothing is downloaded. The model is built on the
meta device, without memory, and its weights are read from the files directly into pages, so it may be larger than RAM
(give `--disk`). With LoRA the base model is frozen: it has pages of compute parameters (2 bytes per parameter in
bf16-mixed; with `--frozen-dtype int8` or `nf4` 1.06 or 0.56 for the matrices of its blocks) and no gradients, no fp32
copy and no optimizer states.

The text is read as bytes, which fit into every vocabulary of 256 or more tokens, so that the example needs no tokenizer;
for a model that you will use, replace TextBytes by a data module with the model's tokenizer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer, seed_everything
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_ptm import AngelPTMStrategy, Weights
from lightning_ptm.data import TextBytes


class CausalLM(LightningModule):
    """A causal language model as `self.model`.

    Args:
        folder: the folder of its config.json.
        lora_rank: rank of the adapters; 0: train all weights.
        learning_rate: of AdamW.
    """

    def __init__(self, folder: str, lora_rank: int = 0, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.folder = folder
        self.lora_rank = lora_rank
        self.learning_rate = learning_rate
        self.model: Any = None

    def configure_model(self) -> None:
        """Builds the model without memory for its weights; the strategy allocates them page by page."""
        if self.model is not None:
            return
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder, local_files_only=True))
        self.model = with_adapters(model, self.lora_rank) if self.lora_rank else model

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of the next token, in nats."""
        tokens, targets = batch
        logits = self.model(input_ids=tokens, use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW over the trained parameters: with adapters, only these."""
        return torch.optim.AdamW(self.trained(), lr=self.learning_rate)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.parameters() if parameter.requires_grad]


def with_adapters(model: Any, rank: int) -> Any:
    """Freezes a model, wherever its weights are, and adds LoRA adapters to the layers that peft chooses for its type."""
    settings = LoraConfig(
        task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, fan_in_fan_out=model.config.model_type == "gpt2"
    )
    adapted = get_peft_model(model, settings, low_cpu_mem_usage=True)  # adapters on the meta device
    for layer in adapted.modules():
        # The base model's files do not have the adapters: they are small, and are allocated and initialized at once.
        if isinstance(layer, LoraLayer):
            layer.lora_A.to_empty(device="cpu")
            layer.lora_B.to_empty(device="cpu")
            layer.reset_lora_parameters("default", init_lora_weights=True)
    return adapted


def make_strategy(options: argparse.Namespace) -> AngelPTMStrategy:
    """The strategy, with the source of the weights and the disk folder.

    The files have names like `transformer.h.0.attn.c_attn.weight`, and the module `model.transformer.h.0...`, or, with
    adapters, `model.base_model.model.transformer.h.0.attn.c_attn.base_layer.weight`. Such a prefix is found automatically,
    and wrapped layers are searched. If it is not found, give it:
    Weights(path=..., key_mapping={"": "model.base_model.model"}).
    """
    return AngelPTMStrategy(
        # A parameter that the files lack is an error, unless it is listed.
        weights=Weights(path=options.model, allow_missing=["*.lora_*"] if options.lora_rank else []),
        disk_path=options.disk,
        frozen_dtype=options.frozen_dtype,
        page_size=options.page_size,
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="folder with config.json and safetensors files")
    parser.add_argument("--data", help="text file or folder of text files (default: Python's own source)")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of this rank; 0: all weights")
    parser.add_argument("--frozen-dtype", default="compute", help="int8, nf4: what is frozen is kept in 8 or 4 bits")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--disk", help="folder for what RAM cannot hold")
    parser.add_argument("--page-size", default="4MiB")
    parser.add_argument("--output", help="folder for the result: a model, or adapters alone")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None, callbacks: Iterable[Any] = ()) -> Trainer:
    """Fine-tunes with the options of the command line."""
    options = parse(arguments)
    seed_everything(options.seed)
    module = CausalLM(options.model, options.lora_rank, options.learning_rate)
    data = TextBytes(options.data, sequence_length=options.sequence_length, batch_size=options.batch_size)
    trainer = Trainer(
        strategy=make_strategy(options),
        precision=options.precision,
        devices=options.devices,
        max_steps=options.steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        callbacks=list(callbacks),
    )
    trainer.fit(module, data)
    if trainer.is_global_zero:
        print(f"training loss of the last batch: {float(trainer.callback_metrics['train_loss']):.4f}")
    if options.output and trainer.is_global_zero:
        # After a run the weights are in the module again, if RAM can hold them.
        module.model.save_pretrained(options.output)
    return trainer


if __name__ == "__main__":
    main()
