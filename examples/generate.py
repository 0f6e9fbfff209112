"""Continue a text with a trained GPT, which may be larger than RAM.

    python examples/generate.py runs/gpt/version_0/checkpoints/last.ckpt --prompt "def "
    python examples/generate.py CKPT --prompt "def " --disk-path /nvme --host-memory 2GiB

The checkpoint is a file or a folder, of a GPT that reads bytes. Each new byte costs a forward (there is no cache of keys and
values) and, if the model is larger than RAM, a read of the weights that are on disk.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.data.text import TEXT_END, decode, encode
from lightning_ptm.models import GPT


class TextGPT(GPT):
    """A GPT whose `predict_step` writes the continuation of a text to standard output, byte by byte."""

    count, temperature, top_k, seed = 200, 1.0, 256, 0

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The new tokens, shape (new tokens,). Of a text longer than the context, only the last part is used."""
        generator, added = torch.Generator().manual_seed(self.seed), list[Tensor]()
        for _ in range(self.count):
            logits = self(batch[:, -self.sequence_length :])[0, -1].cpu().double()
            following = choose(logits, self.temperature, self.top_k, generator)
            if int(following) == TEXT_END:  # the end of a file in the training data
                break
            added.append(following)
            sys.stdout.buffer.write(decode(following))
            sys.stdout.flush()
            batch = torch.cat([batch, following.view(1, 1).to(batch)], dim=1)
        return torch.stack(added) if added else torch.empty(0, dtype=torch.int64)


def choose(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> Tensor:
    """The next token: the likeliest if `temperature` is 0, otherwise drawn from the `top_k` likeliest. Drawn on the CPU, so
    that a seed gives the same text on any device."""
    if not torch.isfinite(logits).all():
        raise SystemExit("the logits are NaN or infinite: use an earlier checkpoint, or --precision 32-true")
    if temperature == 0:
        return logits.argmax()
    values, tokens = logits.topk(min(top_k, len(logits)))
    return tokens[torch.multinomial(((values - values[0]) / temperature).softmax(-1), 1, generator=generator)[0]]


def model_of(checkpoint: Path) -> TextGPT:
    """A model of the checkpoint's sizes, on the meta device: the strategy reads the weights into pages, unit by unit."""
    file = checkpoint / "lightning.pt" if checkpoint.is_dir() else checkpoint
    sizes: dict[str, Any] = dict(torch.load(file, mmap=True, weights_only=True).get("hyper_parameters") or {})
    if not str(sizes.pop("_class_path", "GPT")).endswith("GPT") or sizes.get("vocab_size", 256) != 256:
        raise SystemExit(f"{checkpoint} is not of a lightning_ptm.models.GPT that reads bytes")
    sizes.pop("_instantiator", None)
    return TextGPT(**{**sizes, "meta": True})


def main(arguments: list[str] | None = None) -> Tensor:
    """Prints the continuation of the prompt, and returns its tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompt", default="", help="text to continue; an empty one begins a new text")
    parser.add_argument("--count", type=int, default=200, help="bytes to add, at most")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest byte")
    parser.add_argument("--top-k", type=int, default=256, help="draw from the so many likeliest bytes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--accelerator", default="auto")
    parser.add_argument("--disk-path", help="folder for the weights that RAM does not hold")
    parser.add_argument("--host-memory", default="auto", help="RAM that weights may take, such as 2GiB")
    parser.add_argument("--page-size", default="4MiB")
    given = parser.parse_args(arguments)
    model = model_of(given.checkpoint)
    model.count, model.temperature, model.top_k, model.seed = given.count, given.temperature, given.top_k, given.seed
    strategy = AngelPTMStrategy(
        disk_path=given.disk_path,
        host_memory=given.host_memory,
        page_size=given.page_size,
        tuning={"restore_weights": False},  # the weights are not needed after the text
    )
    trainer = Trainer(
        accelerator=given.accelerator,
        devices=1,
        strategy=strategy,
        precision=given.precision,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prompt = encode(given.prompt) if given.prompt else torch.tensor([TEXT_END])
    texts: DataLoader[Any] = DataLoader([prompt], batch_size=1)  # type: ignore[arg-type]
    (text,) = trainer.predict(model, texts, ckpt_path=given.checkpoint, weights_only=True)  # type: ignore[misc]
    return text  # type: ignore[return-value]


if __name__ == "__main__":
    main()
