"""Models by name, trained by ranks that divide their parameters, and by one rank that has them whole.

Each takes the same batches of tokens; its loss is in the dtype of its weights, so that float64 shows what differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from kit.fits import quiet_trainer
from kit.ranks.training import TIERS
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.comm import intra_node
from lightning_ptm.models import GPT, T5, T5MoE
from lightning_ptm.models.moe import Router
from lightning_ptm.models.t5 import shifted
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule
from lightning_ptm.planning.plan import Task
from lightning_ptm.terms import Operation

STEPS, BATCH, LENGTH = 12, 4, 17
VOCABULARY = 64


class Losses:
    """Losses of training steps, as they come."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.loss(batch)  # type: ignore[attr-defined]
        self.__dict__.setdefault("losses", []).append(float(loss))
        return loss

    def token_count(self, batch: Tensor) -> int:
        return batch.numel()


class Unbounded(torch.autograd.Function):
    """Function whose input's gradient has no bound."""

    @staticmethod
    def forward(context: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf)


class PreciseGPT(Losses, GPT):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(
            **{"vocab_size": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "sequence_length": LENGTH - 1, **sizes}
        )

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class CompiledGPT(PreciseGPT):
    """Model whose blocks are compiled, with operators as they are."""

    def build(self) -> None:
        super().build()
        for block in self.blocks:
            block.compile(backend="eager")


_T5 = {"vocab_size": VOCABULARY, "width": 32, "layers": 2, "heads": 4, "buckets": 8, "max_distance": 16}


class PreciseT5(Losses, T5):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{**_T5, **sizes})

    def loss(self, batch: Tensor) -> Tensor:
        targets = batch[:, 9:]
        return F.cross_entropy(self(batch[:, :9], shifted(targets)).flatten(0, 1), targets.flatten())


class PreciseT5MoE(Losses, T5MoE):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**{"experts": 4, "choices": 2, "jitter": 0.0, **_T5, **sizes})

    def loss(self, batch: Tensor) -> Tensor:
        targets = batch[:, 9:]
        x, routings = self.hidden(batch[:, :9], shifted(targets))
        loss = F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())
        return loss + 0.01 * torch.stack([each.balance_loss for each in routings]).sum()


class UndecidedT5MoE(PreciseT5MoE):
    """Every token goes to one expert until its routers have learnt: ranks that have others get none."""

    @torch.no_grad()
    def init_weights(self, module: nn.Module) -> None:
        super().init_weights(module)
        if isinstance(module, Router):
            module.weight.zero_()


IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**IDS, **SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "qwen3": ("Qwen3", LLAMA),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 4, "experts_implementation": "eager"}),
    "gemma": ("Gemma", LLAMA),
    "gpt2": ("GPT2", {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, **_NO_DROPOUT}),
}
"""By name the family, and its configuration."""

GPT2_PLAN: dict[str, Rule] = {
    "model.transformer.h.*.attn.c_attn": ColwiseParallel(parts=3, heads=("num_heads", "split_size")),
    "model.transformer.h.*.attn.c_proj": RowwiseParallel(),
    "model.transformer.h.*.mlp.c_fc": ColwiseParallel(),
    "model.transformer.h.*.mlp.c_proj": RowwiseParallel(),
}
"""A user's: Transformers has none for it."""


class Held(Losses, L.LightningModule):
    """A model of Transformers in a LightningModule."""

    def __init__(self, name: str, *, lora: bool = False, meta: bool = False, rate: float = 1e-3, **sizes: Any) -> None:
        super().__init__()
        self.name, self.lora, self.meta, self.rate, self.sizes = name, lora, meta, rate, sizes

    def configure_model(self) -> None:
        if "model" in self._modules:
            return
        import transformers

        family, settings = TRANSFORMERS[self.name]
        config = getattr(transformers, f"{family}Config")(**{**settings, **self.sizes})
        kind = getattr(transformers, "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")
        with torch.device("meta" if self.meta else "cpu"):
            self.model: nn.Module = kind(config)
        if self.lora:
            import peft

            targets = ["q_proj", "v_proj", "o_proj", "down_proj"]
            adapters = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=0.0, init_lora_weights=False)
            self.model = peft.get_peft_model(self.model, adapters)

    def loss(self, batch: Tensor) -> Tensor:
        logits = self.model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=self.rate)


MODELS: dict[str, Callable[..., L.LightningModule]] = {
    "gpt": PreciseGPT,
    "compiled gpt": CompiledGPT,
    "t5": PreciseT5,
    "t5_moe": PreciseT5MoE,
    "undecided": UndecidedT5MoE,
}


def build(model: str, sizes: Mapping[str, Any]) -> L.LightningModule:
    return MODELS[model](**sizes) if model in MODELS else Held(model, **sizes)


@dataclasses.dataclass(frozen=True)
class Run:
    """How ranks train a model.

    Attributes:
        micro_batches: one rank goes through the batches of so many ranks, one after the other, and adds gradients up.
        way: by which ranks reach each other, of WAYS.
    """

    model: str
    ranks: int = 1
    tensor: int = 1
    tier: str = "ram"
    precision: str = "64-true"
    steps: int = STEPS
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trainer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    norms: bool = False
    evictions: int | None = None
    """Seed of random ones, others on each rank; None: the policy's alone."""
    micro_batches: int = 1
    way: str = "neighbours"

    def on_one(self) -> Run:
        divided = ("tensor_parallel", "expert_parallel", "sequence_parallel")
        settings = {name: value for name, value in self.settings.items() if not name.startswith(divided)}
        return dataclasses.replace(self, ranks=1, tensor=1, settings=settings)

    def on_one_by_batches(self) -> Run:
        """Returns the run on one rank with the batches of each of the ranks: routing tokens of a batch together is no
        mean over its halves."""
        batches = self.ranks // self.tensor
        trainer = {**self.trainer, "accumulate_grad_batches": batches}
        return dataclasses.replace(self.on_one(), micro_batches=batches, trainer=trainer)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a training on one rank.

    Attributes:
        norms: of gradients, before each step, if they were asked for.
        exchanges: collectives of the tensor group.
        state_bytes: at home on this rank, by kind of states.
        mesh: sizes of the device mesh that `configure_model` finds, by axis; empty without one.
    """

    losses: list[float]
    weights: dict[str, Tensor]
    norms: list[float]
    exchanges: int
    state_bytes: dict[str, int]
    mesh: dict[str, int]


class Watch(L.Callback):
    """Takes down what is in `Outcome`."""

    def __init__(self, *, norms: bool) -> None:
        self.wants_norms = norms
        self.norms: list[float] = []
        self.state_bytes: dict[str, int] = {}
        self.mesh: dict[str, int] = {}

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        for each in trainer.strategy.states_at_home():  # type: ignore[attr-defined]
            self.state_bytes[each.states] = self.state_bytes.get(each.states, 0) + each.bytes
        if module.device_mesh is not None:
            names = ("data_parallel", "tensor_parallel")
            self.mesh = {name: module.device_mesh[name].size() for name in names}

    def on_before_optimizer_step(self, trainer: L.Trainer, module: Any, optimizer: Any) -> None:
        if self.wants_norms:
            self.norms.append(float(trainer.strategy.gradient_norm(optimizer)))  # type: ignore[attr-defined]


class Evictions(L.Callback):
    """At ticks each rank gives up units of its own choice, as far as nobody uses them: it has to gather these again when
    others need not."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed * 100 + int(os.environ["RANK"]))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        engine = trainer.strategy.engine  # type: ignore[attr-defined]
        refcounts = engine.executor.fetching.refcounts

        def evict(task: Task) -> None:
            if task.operation is not Operation.COMPUTE:
                return
            for unit, store in enumerate(engine.stores):
                if store.movable and not refcounts.referenced(unit) and self._random.random() < 0.5:
                    store.release()
                    store.evict()

        engine.executor.fetching.on_decision = evict


def batches(how: Run) -> DataLoader[Any]:
    """Returns the batches of this rank; all runs of as many steps use the same rows."""
    rows = torch.randint(3, VOCABULARY, (how.steps * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    data = how.ranks // how.tensor
    if how.micro_batches > 1:
        rows = rows.view(how.steps, -1, how.micro_batches, LENGTH).transpose(1, 2).reshape(-1, LENGTH)
    place = int(os.environ.get("RANK", 0)) // how.tensor
    sampler = DistributedSampler(rows, data, place, shuffle=False)  # type: ignore[arg-type, var-annotated]
    return DataLoader(rows, BATCH // data // how.micro_batches, sampler=sampler)  # type: ignore[arg-type]


WAYS = ("neighbours", "gloo")
"""Directly, as ranks of one machine do, or by process groups alone, as those of several machines."""


@contextlib.contextmanager
def by(way: str) -> Iterator[None]:
    """This rank's process makes its connections so."""
    kept, asked = (intra_node.connected, intra_node.shm_collectives), []
    if way == "gloo":
        intra_node.connected = intra_node.shm_collectives = lambda *args, **named: asked.append(args)  # type: ignore[assignment, func-returns-value]
    try:
        yield
        assert asked or way != "gloo", "nobody has asked for connections, which are made otherwise now"
    finally:
        intra_node.connected, intra_node.shm_collectives = kept


def train(how: Run, disk: Path, *callbacks: L.Callback) -> Outcome:
    """One rank's part."""
    with by(how.way):
        return _train(how, disk, *callbacks)


def _train(how: Run, disk: Path, *callbacks: L.Callback) -> Outcome:
    os.environ.setdefault("RANK", "0")
    torch.manual_seed(0)
    module = build(how.model, how.sizes)
    strategy = AngelPTMStrategy(
        page_size="64KiB",
        debug={"poison": True},
        disk_path=str(disk),
        tensor_parallel_size=how.tensor,
        timeout=timedelta(seconds=60),
        **{**TIERS[how.tier], **how.settings},
    )
    watch = Watch(norms=how.norms)
    trainer = quiet_trainer(
        strategy,
        devices=how.ranks,
        precision=how.precision,
        use_distributed_sampler=False,  # it would shuffle
        callbacks=[watch, *callbacks, *([] if how.evictions is None else [Evictions(how.evictions)])],
        **{"max_steps": how.steps, **how.trainer},
    )
    trainer.fit(module, batches(how))
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    group = strategy._groups.tensor
    exchanges = 0 if group is None else group.exchanges
    return Outcome(vars(module)["losses"], weights, watch.norms, exchanges, watch.state_bytes, watch.mesh)


def assert_same_learning(outcomes: list[Outcome], whole: Outcome, losses: float = 1e-12, weights: float = 1e-9) -> None:
    mean = torch.tensor([each.losses for each in outcomes], dtype=torch.float64).mean(0)
    theirs = torch.tensor(whole.losses, dtype=torch.float64).view(len(mean), -1).mean(1)
    torch.testing.assert_close(mean, theirs, rtol=0, atol=losses)
    for each in outcomes:
        assert each.weights.keys() == whole.weights.keys()
        for name, value in whole.weights.items():
            torch.testing.assert_close(each.weights[name], value, rtol=0, atol=weights, msg=name)
