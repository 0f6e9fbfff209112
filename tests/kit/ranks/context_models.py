"""Models by name, trained by ranks that have parts of each sequence, and by one rank that has whole ones."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler

from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks.tensor_models import BATCH, STEPS, TRANSFORMERS, VOCABULARY, Evictions, Losses
from kit.ranks.training import PLACES
from kit.settings import merged
from lightning_ptm.models import GPT
from lightning_ptm.models.gpt import Block
from lightning_ptm.models.moe import Expert, MixtureOfExperts, Router
from lightning_ptm.planning.mesh import Axis

LENGTH = 32

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 20,
}
"""Rotary positions with other frequencies in texts of more than 20 tokens."""

_OF_CHUNKS = {
    **TRANSFORMERS["llama"][1],
    "num_local_experts": 2,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 20,
}
"""A layer whose tokens see those of their chunk only, and one whose late queries may be scaled."""

FAMILIES = {
    **TRANSFORMERS,
    "mistral": ("Mistral", {**TRANSFORMERS["llama"][1], "sliding_window": 7}),
    "llama4": ("Llama4", _OF_CHUNKS),
    "gemma2": ("Gemma2", TRANSFORMERS["llama"][1]),
    "dynamic": ("Llama", {**TRANSFORMERS["llama"][1], "max_position_embeddings": 20, "rope_parameters": _DYNAMIC}),
    "longrope": ("Llama", {**TRANSFORMERS["llama"][1], "rope_parameters": _LONG}),
}


class InDouble(TorchFunctionMode):
    """Context in which what a model computes in fp32 on purpose (norms, rotary positions, its loss) is computed in fp64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            return args[0].double()
        args = [_wide(each) for each in args]
        return func(*args, **{name: _wide(each) for name, each in (kwargs or {}).items()})


def _wide(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


class ContextGPT(Losses, GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(
            **{"vocab_size": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "sequence_length": LENGTH, **sizes}
        )

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())


class MixtureBlock(Block):
    """Block with experts that have room for all tokens; it returns their balance loss, too."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__(width, heads, width // heads, width, 0.0)
        sizes = {"experts": experts, "capacity_factor": float(experts), "eval_capacity_factor": float(experts)}
        self.feed_forward = MixtureOfExperts(  # type: ignore[assignment]
            width, 2 * width, choices=2, jitter=0.0, gated=True, dropout=0.0, **sizes
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x = x + self.attention(self.attention_norm(x))
        out, routing = self.feed_forward(self.feed_forward_norm(x))
        return x + out, routing.balance_loss


class ContextMoE(ContextGPT):
    """Adds the balance losses of its blocks, times a factor, to the loss."""

    def __init__(self, balance: float = 0.0, experts: int = 4) -> None:
        super().__init__()
        self.balance, self.experts = balance, experts

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(MixtureBlock(self.width, self.heads, self.experts) for _ in range(self.layers))

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        super().init_weights(module)
        if isinstance(module, (Router, Expert)):
            for weight in module.parameters():
                nn.init.normal_(weight, std=0.2)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        tokens, targets = batch
        x, balance = self.token_embedding(tokens) + self.position_embedding(self.positions(tokens)), []
        for block in self.blocks:
            x, each = block(x)
            balance.append(each)
        entropy = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        return entropy + self.balance * torch.stack(balance).sum()


class Causal(Losses, L.LightningModule):
    """A causal model of Transformers, whose loss comes from labels."""

    def __init__(self, name: str, *, in_double: bool = False, **sizes: Any) -> None:
        super().__init__()
        self.name, self.in_double, self.sizes = name, in_double, sizes

    def configure_model(self) -> None:
        if "model" in self._modules:
            return
        import transformers

        family, settings = FAMILIES[self.name]
        config = getattr(transformers, f"{family}{'Text' * (family == 'Llama4')}Config")(**{**settings, **self.sizes})
        name = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
        self.model: nn.Module = getattr(transformers, name)(config)

    def loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        with InDouble() if self.in_double else contextlib.nullcontext():
            loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


OURS: dict[str, Callable[..., ContextGPT]] = {"gpt": ContextGPT, "moe": ContextMoE}


class SaveAtEnd(L.Callback):
    """Saves a checkpoint while the run still has its pages."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path)


@dataclasses.dataclass(frozen=True)
class ContextRun:
    """How ranks train a model.

    Attributes:
        in_double: nothing of the model is computed in fp32. Not with recomputation.
        padded: texts have padding before or after them, with an attention_mask; labels of some of it count.
    """

    model: str
    ranks: int = 1
    context: int = 1
    way: str = "auto"
    tensor: int = 1
    tier: str = "ram"
    precision: str = "64-true"
    steps: int = 6  # losses are checked before steps 0, 1, 2 and 4
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evictions: int | None = None
    texts: int = STEPS * BATCH
    padded: bool = False
    in_double: bool = False
    saved_to: str | None = None
    resumed_from: str | None = None


@dataclasses.dataclass(frozen=True)
class ContextOutcome:
    """Result of a training on one rank; `exchanges` are those of its context group."""

    losses: list[float]
    weights: dict[str, Tensor]
    exchanges: int


def batches(how: ContextRun) -> DataLoader[Any]:
    """Returns the batches of this rank; all runs use the same texts."""
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(3, VOCABULARY, (how.texts, LENGTH + 1), generator=generator)
    data: list[Any]
    if how.model in OURS:
        data = [(text[:-1], text[1:]) for text in texts]
    else:
        labels = texts[:, :-1].clone()
        labels[:, 5:17] = -100  # of one part more than of the others
        masks = torch.ones_like(labels)
        masks[0::3, :11], masks[1::3, -9:] = 0, 0
        if how.padded:
            labels[0::2] = labels[0::2].masked_fill(masks[0::2] == 0, -100)
        rows = zip(texts, labels, masks, strict=True)
        data = [{"input_ids": text[:-1], "labels": label, "attention_mask": mask} for text, label, mask in rows]
        if not how.padded:
            data = [{name: each[name] for name in ("input_ids", "labels")} for each in data]
    same = how.context * how.tensor
    replicas, replica = how.ranks // same, int(os.environ["RANK"]) // same
    sampler = DistributedSampler(data, replicas, replica, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return DataLoader(data, BATCH // replicas, sampler=sampler)  # type: ignore[arg-type]


def build(how: ContextRun) -> L.LightningModule:
    if how.model in OURS:
        return OURS[how.model](**how.sizes)
    return Causal(how.model, in_double=how.in_double, **how.sizes)


def train(how: ContextRun, disk: Path, *callbacks: L.Callback) -> ContextOutcome:
    """One rank's part."""
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module = build(how)
    base = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": str(disk), "timeout": timedelta(seconds=60)}
    divided = {"context_parallel_size": how.context, "context_parallel": how.way, "tensor_parallel_size": how.tensor}
    strategy = strategy_with(**merged(base, divided, PLACES[how.tier], how.settings))
    added: list[L.Callback] = [] if how.evictions is None else [Evictions(how.evictions)]
    if how.saved_to is not None:
        added.append(SaveAtEnd(disk / how.saved_to))
    trainer = quiet_trainer(
        strategy,
        devices=how.ranks,
        precision=how.precision,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[*callbacks, *added],
        **{"max_steps": how.steps, **how.trainer},
    )
    trainer.fit(module, batches(how), ckpt_path=how.resumed_from)
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    group = strategy._groups.by_axis.get(Axis.CONTEXT)
    return ContextOutcome(vars(module)["losses"], weights, 0 if group is None else group.exchanges)
