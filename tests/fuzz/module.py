"""The LightningModule that does what a program says, on one rank or several, with any strategy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.distributed.nn
from kit.models import Block
from torch import Tensor, nn
from torch.nn import functional

from fuzz.programs import ALONE, BATCHES, HIDDEN, HOOKS, Fit, Program
from lightning_ptm import AngelPTMStrategy

VOCABULARY = 67
WIDTH = 66
"""No multiple of a vector's length; each block has more than 4096 elements, so that it is a unit."""

# The strategy takes torch's fused kernel unless it is told otherwise. That of momentum wants a gradient of each parameter.
_OPTIMIZERS: dict[str, Callable[[Sequence[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "SGD": lambda them: [torch.optim.SGD(them, lr=1e-2, fused=True)],
    "SGD with momentum": lambda them: [torch.optim.SGD(them, lr=1e-2, momentum=0.9, nesterov=True, fused=False)],
    "Adam": lambda them: [torch.optim.Adam(them, lr=1e-2, fused=True)],
    "AdamW amsgrad": lambda them: [torch.optim.AdamW(them, lr=1e-2, amsgrad=True, fused=True)],
    "RMSprop": lambda them: [torch.optim.RMSprop(them, lr=1e-2, centered=True, momentum=0.5)],
    "Adafactor": lambda them: [torch.optim.Adafactor(them, lr=1e-2)],
    "two": lambda them: [
        torch.optim.SGD(them[:3], lr=1e-2, fused=True),
        torch.optim.Adam(them[3:], lr=1e-2, fused=True),
    ],
}


class Broken(Exception):
    """Error that a program raises."""


class Fuzzed(L.LightningModule):
    """Does what its program says; `notes` are what is compared beside weights and buffers."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.fit_of: Fit = program.fits[0]
        self.notes: list[tuple[str, Tensor]] = []
        self.automatic_optimization = not program.manual
        features = program.features
        dropout = 0.1 if "dropout" in features else 0.0
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            Block(WIDTH, hidden, functional.gelu, norm=True, dropout=dropout) for hidden in HIDDEN
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if "tied" in features:
            self.head.weight = self.embedding.weight
        self.statistics = nn.BatchNorm1d(WIDTH) if "statistics" in features else None
        self.gain = nn.Parameter(torch.ones(())) if "vector" in features else None
        # Adafactor divides by the number of elements.
        self.nothing = (
            nn.Parameter(torch.ones(0)) if "vector" in features and program.optimizer != "Adafactor" else None
        )
        self.register_buffer("seen", torch.zeros(2))
        self.pairs: list[Any] = []
        self._freeze(0)

    def note(self, name: str, value: Tensor) -> None:
        self.notes.append((name, value.detach().clone()))

    def configure_optimizers(self) -> Any:
        return _OPTIMIZERS[self.program.optimizer](list(self.parameters()))

    # -- a step ---------------------------------------------------------------------------------------------------

    def loss(self, batch: Tensor, index: int, *, training: bool) -> Tensor:
        program, rank = self.program, self.trainer.global_rank
        order = program.orders[index % BATCHES][rank]
        talks = program.talks[index % BATCHES] if training and program.talks else ()
        self.seen += 1
        x = self.embedding(batch[:, :-1])
        if self.statistics is not None:
            x = self.statistics(x.transpose(1, 2)).transpose(1, 2)
        for place, block in enumerate((*order, None)):
            for kind, places in talks:
                if places[rank] == place:
                    x = self._talk(kind, x)
            if training:
                self._break(place)
                if program.raises == (rank, index, place):
                    raise Broken("this rank has had enough")
            if block is not None:
                for _ in range(2 if block == 0 and "repeated" in program.features else 1):
                    x = self.blocks[block](x)
        logits = self.head(self.norm(x))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = loss if self.gain is None else loss * self.gain
        return loss if self.nothing is None else loss + self.nothing.sum()

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        if not self.program.manual:
            loss = self.loss(batch, index, training=True)
            self.note("loss", loss)
            return None if index in self.program.no_loss else loss
        steps = (index + 1) % self.program.accumulate == 0
        for optimizer in self.optimizers():
            loss = self.loss(batch, index, training=True)
            self.note("loss", loss)
            self.manual_backward(loss)
            if steps:
                if self.program.clip is not None:
                    bound, kind = self.program.clip
                    self.clip_gradients(optimizer, gradient_clip_val=bound, gradient_clip_algorithm=kind)
                optimizer.step()
                self.zero_grad()
        return None

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.note("validation", self.loss(batch, index, training=False))

    # -- what is done in hooks --------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        if dist.is_initialized():
            size = dist.get_world_size()
            firsts = range(size if size > 2 else 1)
            self.pairs = [dist.new_group([first, (first + 1) % size]) for first in firsts]

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        torch.manual_seed(100 * self.current_epoch + index)  # a run that is resumed draws what one from the start does
        self._freeze(self._at(index))
        self._break("start")
        self._hook("on_train_batch_start", index)

    def on_train_batch_end(self, outputs: Any, batch: Tensor, index: int) -> None:
        self._hook("on_train_batch_end", index)
        self._break("end")

    def on_train_epoch_end(self) -> None:
        self._hook("on_train_epoch_end", self.current_epoch)

    def _at(self, index: int) -> int:
        return self.current_epoch * BATCHES + index

    def _freeze(self, batch: int) -> None:
        for block, first in self.program.frozen:
            trained = batch >= first
            if self.blocks[block].up.weight.requires_grad != trained:
                self.blocks[block].requires_grad_(trained)

    def _break(self, place: int | str) -> None:
        if self.fit_of.breaks is not None:
            batch = self.trainer.fit_loop.epoch_loop.batch_idx
            if self.fit_of.breaks == (self._at(batch), place):
                raise Broken("broken off")

    def _hook(self, name: str, index: int = 0) -> None:
        rank = self.trainer.global_rank
        if self.program.raises is not None and self.program.raises[:2] == (rank, name):
            raise Broken("this rank has had enough")
        for hook, who in self.program.alone:
            if hook == name and who == rank:
                self._look()
        for hook, batch, action in self.program.actions:
            if hook == name and batch == index:
                getattr(self, f"_{action}")()

    @torch.no_grad()
    def _look(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)  # dropout before the first step: only our checkpoints restore the random states
            x = self.embedding(torch.arange(34).view(2, 17))
            for block in (2, 0):
                x = self.blocks[block](x)
            self.note("look", self.head(self.norm(x)).sum())

    def _edit(self) -> None:
        strategy: Any = self.trainer.strategy
        paged = isinstance(strategy, AngelPTMStrategy)
        with strategy.gathered(self.blocks[1]) if paged else nullcontext(), torch.no_grad():
            for parameter in self.blocks[1].parameters():
                parameter.mul_(0.9)

    def _state(self) -> None:
        for name, value in self.state_dict().items():
            self.note(name, value)

    def _rate(self) -> None:
        for optimizer in self.trainer.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5

    # -- collectives of its own -------------------------------------------------------------------------------------

    def _talk(self, kind: str, x: Tensor) -> Tensor:
        value = x.detach().mean(dim=(0, 1))
        if kind == "all_reduce":
            dist.all_reduce(value)
        elif kind == "barrier":
            dist.barrier()
        elif kind == "objects":
            told: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(told, value.sum().item())
            value = torch.tensor(told)
        elif kind == "later":
            dist.all_reduce(value, op=dist.ReduceOp.MAX, async_op=True).wait()
        elif kind == "gathered":
            value = self.all_gather(value).sum(dim=0)
        elif kind == "with_gradient":
            return x + 0.1 * torch.stack(list(dist.nn.functional.all_gather(x.mean(dim=(0, 1))))).sum(dim=0)
        else:
            for pair in self.pairs:
                if pair != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(value, group=pair)
        self.note(kind, value)
        return x * (1 + value.mean().to(x.dtype))


for _name in {*ALONE, *HOOKS} - {"on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"}:
    setattr(Fuzzed, _name, lambda self, *_, _name=_name, **__: self._hook(_name))
