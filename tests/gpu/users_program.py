"""Programs of users around a run, on the fake device, in a process that has no other device.

Call it as `python users_program.py FOLDER CASE...`, with cases as `NAME:HOME` or `NAME:HOME:ACTIVATIONS`. For each it
prints a line, `CASE: ok` or `CASE: failed`, with why.

Streams of their own, which they order as torch asks for; hooks on these; gradients that they look at, change and assign;
several backward passes of a graph; failures in mid-step, and another fit of the same module behind them.

I1: losses, weights and what is noted are, bit for bit, those of a plain Trainer on the CPU.
I2: no access is without order.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, ClassVar

import fake_device  # noqa: F401 before torch
import lightning as L
import told_cases
import torch
from fit_cases import HOMES, SMALL
from kit.models import Block
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy

VOCABULARY, WIDTH, LENGTH, ROWS, BATCHES = 64, 64, 16, 4, 8
PLACES: dict[str, dict[str, Any]] = {
    **HOMES,
    "masters in RAM": {"offload_parameters": "device", "offload_optimizer": "host"},
}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "keep": {},
    "host": {"offload_activations": "host"},
    "recomputed": {"offload_activations": "host", "recompute": "all"},
    "lock-free": {"lock_free": {"max_staleness": 0}},
}


class Plain(L.LightningModule):
    """Sums of gradients over two batches."""

    trainer_settings: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2}

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks = nn.ModuleList(Block(WIDTH, activation=functional.gelu, norm=True) for _ in range(3))
        self.losses: list[Tensor] = []
        self.notes: list[Tensor] = []
        self._side: torch.cuda.Stream | None = None

    def loss(self, batch: Tensor) -> Tensor:
        x = self.embed(batch[:, :-1])
        for number, block in enumerate(self.blocks):
            x = self.through(number, block, x)
        loss = functional.cross_entropy(self.head(x).flatten(0, 1), batch[:, 1:].flatten())
        self.losses.append(loss.detach().clone())
        return loss

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        found: Tensor = block(x)
        return found

    def training_step(self, batch: Tensor, index: int) -> Tensor | None:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def fit(self, new_trainer: Callable[..., L.Trainer]) -> None:
        rows = torch.randint(0, VOCABULARY, (BATCHES * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
        new_trainer(**self.trainer_settings).fit(self, DataLoader(rows, batch_size=ROWS))

    @contextmanager
    def aside(self, *given: Tensor, joined: bool = True) -> Iterator[None]:
        """On a stream of the user's, which uses what is given; the current one goes on behind it, if joined."""
        if self.device.type == "cpu":
            yield
            return
        self._side = self._side or torch.cuda.Stream()
        main = torch.cuda.current_stream()
        self._side.wait_stream(main)
        for each in given:
            each.record_stream(self._side)
        with torch.cuda.stream(self._side):
            yield
        if joined:
            main.wait_stream(self._side)

    def back(self, made: Tensor) -> Tensor:
        """Makes the current stream use a tensor of another stream."""
        if made.device.type != "cpu":
            made.record_stream(torch.cuda.current_stream())
        return made

    def end(self) -> None:
        if self._side is not None:
            self._side.synchronize()


class LooksAside(Plain):
    """At gradients in pages, on two streams that nothing waits for, neither the other."""

    def __init__(self) -> None:
        super().__init__()
        self._sides: list[torch.cuda.Stream | None] = [None, None]

    def on_after_backward(self) -> None:
        for number in range(2):
            self._side = self._sides[number]
            with self.aside(joined=False):
                self.notes += [each.grad.mul(2).sum() for each in self.parameters() if each.grad is not None]
            self._sides[number] = self._side

    def end(self) -> None:
        for side in self._sides:
            if side is not None:
                side.synchronize()


class ChangesAside(Plain):
    trainer_settings: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

    def on_after_backward(self) -> None:
        with self.aside():
            for parameter in self.parameters():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)


class AssignsAside(Plain):
    def on_after_backward(self) -> None:
        weights = [block.up.weight for block in self.blocks]
        with self.aside(*(weight.grad for weight in weights)):
            for weight in weights:
                weight.grad = weight.grad.clone().mul_(0.25)
        for weight in weights:
            self.back(weight.grad)


class HooksAside(Plain):
    """Registers hooks on parameters and on activations."""

    def twice(self, gradient: Tensor) -> Tensor:
        with self.aside(gradient):
            doubled = gradient * 2
        return self.back(doubled)

    def on_train_start(self) -> None:
        self.handles = [block.down.weight.register_hook(self.twice) for block in self.blocks]

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        x.register_hook(self.twice)
        return x

    def on_train_end(self) -> None:
        for handle in self.handles:
            handle.remove()


class UnitsAside(Plain):
    """In threads of their own."""

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        if number != 1:
            return super().through(number, block, x)
        found: list[Tensor] = []

        def compute() -> None:
            with self.aside(x):
                found.append(block(x))

        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()
        return self.back(found[0])


class StepsAside(Plain):
    trainer_settings: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.4}

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if index % 2 == 0:
            return self.loss(batch)
        with self.aside(batch):
            loss = self.loss(batch)
        self.back(self.losses[-1])
        return self.back(loss)


class GoesOnAside(Plain):
    """From the backward pass to the end of the batch another stream is the current one."""

    trainer_settings: ClassVar[dict[str, Any]] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.4}

    def on_train_start(self) -> None:
        if self.device.type != "cpu":
            self.home, self._side = torch.cuda.current_stream(), torch.cuda.Stream()

    def go(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)

    def on_before_backward(self, loss: Tensor) -> None:
        self.go(self._side)
        self.back(loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.go(self._side and self.home)


class ByHand(Plain):
    trainer_settings: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class PassesOfOneGraph(ByHand):
    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        with self.aside(loss):
            self.manual_backward(loss * 0.5, retain_graph=True)
        self.manual_backward(loss * 0.25)
        optimizer.step()


class TwoGraphs(ByHand):
    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        losses = [self.loss(batch), self.loss(batch.flip(0))]
        for loss in losses[:: 1 - index % 2 * 2]:
            self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3)
        optimizer.step()


class AllAside(ByHand):
    """Backward, clipping, step, forgetting."""

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        with self.aside(loss):
            self.manual_backward(loss * 0.5)
        if index % 2:
            with self.aside():
                self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
                optimizer.step()
            with self.aside():
                optimizer.zero_grad(set_to_none=index % 4 == 1)


class LeavesAside(ByHand):
    """Backward, norm, clipping, step and forgetting, each on a stream of its own, behind the current one, that nothing waits
    for: the run itself has one order for all it does."""

    @contextmanager
    def left(self, *given: Tensor) -> Iterator[None]:
        if self.device.type == "cpu":
            yield
            return
        self.sides.append(torch.cuda.Stream())
        self.sides[-1].wait_stream(torch.cuda.current_stream())
        for each in given:
            each.record_stream(self.sides[-1])
        with torch.cuda.stream(self.sides[-1]):
            yield

    def on_train_start(self) -> None:
        self.sides: list[torch.cuda.Stream] = []

    def norm(self, optimizer: Any) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, AngelPTMStrategy):
            return strategy.gradient_norm(optimizer)
        norms = [torch.linalg.vector_norm(each.grad) for each in self.parameters() if each.grad is not None]
        return torch.linalg.vector_norm(torch.stack(norms))

    def training_step(self, batch: Tensor, index: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        with self.left(loss):
            self.manual_backward(loss)
        if index % 2:
            with self.left():
                self.notes.append(self.norm(optimizer))
            with self.left():
                algorithm = "norm" if index % 4 == 1 else "value"
                self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm=algorithm)
            with self.left():
                optimizer.step()
            with self.left():
                optimizer.zero_grad(set_to_none=index % 4 == 1)

    def end(self) -> None:
        torch.cuda.synchronize()


class ReadsWeightsAside(Plain):
    """Reads and writes weights on another stream."""

    def on_train_batch_end(self, *_: Any) -> None:
        strategy, block = self.trainer.strategy, self.blocks[1]
        if self.trainer.fit_loop.epoch_loop.batch_idx % 2 == 0:
            return
        with self.aside(), torch.no_grad():
            if isinstance(strategy, AngelPTMStrategy):
                with strategy.gathered(block, write=True):
                    self.notes.append(block.up.weight.sum())
                    block.up.weight.mul_(0.9)
            else:
                self.notes.append(block.up.weight.sum())
                block.up.weight.mul_(0.9)


class Breaks(Plain):
    """In the second batch of a step; then it is fitted again."""

    where = ""
    armed = True

    def fit(self, new_trainer: Callable[..., L.Trainer]) -> None:
        try:
            super().fit(new_trainer)
        except ZeroDivisionError:
            self.armed = False
        assert not self.armed
        for parameter in self.parameters():
            parameter.grad = None
        super().fit(new_trainer)

    def point(self, where: str) -> None:
        if self.armed and where == self.where and self.trainer.fit_loop.epoch_loop.batch_idx == 3:
            raise ZeroDivisionError(where)

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = block(x)
        if number == 1:
            self.point("in the forward")
            x.register_hook(lambda _: self.point("in the backward"))
        return x

    def on_after_backward(self) -> None:
        self.point("behind the backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.point("before the step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.point("behind the step")


class FitsAside(Plain):
    """Then fitted again, on the stream that is the current one."""

    def fit(self, new_trainer: Callable[..., L.Trainer]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            super().fit(new_trainer)
        torch.cuda.current_stream().wait_stream(side)
        super().fit(new_trainer)


class LoadsAndSkips(Plain):
    """Loads the optimizer's states before one of the few steps of a block; no other block has had as many steps, and nothing
    waits for the block's update before the next step."""

    trainer_settings: ClassVar[dict[str, Any]] = {"gradient_clip_val": 0.5}

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if index == 4:
            optimizer = self.trainer.optimizers[0]
            states = optimizer.state_dict()
            for each in states["state"].values():
                each["step"] = each["step"] + 1
            optimizer.load_state_dict(states)

    def through(self, number: int, block: nn.Module, x: Tensor) -> Tensor:
        skips = number == 2 and self.trainer.fit_loop.epoch_loop.batch_idx not in (0, 4)
        return x if skips else super().through(number, block, x)


KINDS: list[type[Plain]] = [LooksAside, ChangesAside, AssignsAside, HooksAside, UnitsAside, StepsAside, GoesOnAside]
KINDS += [PassesOfOneGraph, TwoGraphs, AllAside, LeavesAside, ReadsWeightsAside, FitsAside, LoadsAndSkips]
USERS: dict[str, type[Plain]] = {kind.__name__: kind for kind in KINDS}
for _where in ("in the forward", "in the backward", "behind the backward", "before the step", "behind the step"):
    USERS[f"Breaks {_where}"] = type("Breaks", (Breaks,), {"where": _where})

Found = tuple[list[Tensor], list[Tensor], list[Tensor]]


def train(name: str, accelerator: str, strategy: Callable[[], Any]) -> Found:
    gc.collect()
    torch.manual_seed(0)
    module = USERS[name]()

    def new_trainer(**settings: Any) -> L.Trainer:
        quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        quiet["enable_checkpointing"] = False
        return L.Trainer(accelerator=accelerator, devices=1, strategy=strategy(), max_epochs=1, **quiet, **settings)

    module.fit(new_trainer)
    module.end()
    everything = (module.losses, list(module.parameters()), module.notes)
    losses, weights, notes = ([each.detach().cpu() for each in found] for found in everything)
    return losses, weights, notes


@lru_cache
def expected(name: str) -> Found:
    return train(name, "cpu", lambda: SingleDeviceStrategy(torch.device("cpu")))


def check(case: str, folder: Path) -> None:
    name, home, *activations = case.split(":")
    settings = {**PLACES[home], **ACTIVATIONS[activations[0] if activations else "keep"]}
    if home == "masters in RAM":
        settings = {**SMALL, **settings, "device_memory": "4MiB"}
    strategy = {"page_size": "64KiB", "debug": {"poison": True}, "disk_path": folder, **settings}
    with told_cases.in_order():
        found = train(name, "gpu", lambda: AngelPTMStrategy(**strategy))
        for what, ours, theirs in zip(("losses", "weights", "notes"), found, expected(name), strict=True):
            assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs)), what


def prepare() -> None:
    told_cases.prepare(least_bytes=1024)


def main(folder: Path, cases: list[str]) -> None:
    prepare()
    told_cases.go_through((case, case, partial(check, case, folder)) for case in cases)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
