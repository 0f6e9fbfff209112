"""The cut of a module into stages: what each stage computes of a step, and the modules that it refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.memory.backend import Backend, backend_of
from lightning_ptm.runtime.autograd.stage_cut import AbsentOutput, MicroForward, StageCut, StageEnds
from lightning_ptm.runtime.tensors.random_states import restored, seed
from lightning_ptm.runtime.units.discovery import discover


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x).tanh()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 64, dtype=torch.float64)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


RUNS = (range(1, 3), range(3, 5))


def cut(model: nn.Module, stage: int, backend: Backend | None = None, runs: Sequence[range] = RUNS) -> StageCut:
    """Returns the cut of a model whose calls are wrapped as in a run."""
    units = discover(model, "auto")
    made = StageCut(units, runs, stage, 2, backend)
    for unit in units[1:]:
        wrapper = made.wrapper(unit.index, absent=not any(unit.index in run for run in runs[stage::2]))
        unit.module.forward = partial(wrapper, unit.module.forward)  # type: ignore[method-assign]
    return made


def model_of(kind: type[nn.Module] = Model) -> nn.Module:
    torch.manual_seed(0)
    return kind()


X = torch.randn(3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def forward(kind: type[nn.Module], stage: int) -> tuple[nn.Module, StageCut, MicroForward, Tensor | None]:
    """Runs a step of a stage, behind one of the stage before."""
    received = None
    if stage:
        first = model_of(kind)
        micro, _ = cut(first, 0).forward(lambda: first(X), None)
        assert micro.output is not None
        received = micro.output.detach()
    model = model_of(kind)
    made = cut(model, stage)
    micro, result = made.forward(lambda: model(X), received)
    return model, made, micro, result


def test_two_stages_compute_what_the_whole_model_computes() -> None:
    whole = model_of()
    loss = whole(X)
    loss.backward()
    first = model_of()
    early, nothing = cut(first, 0).forward(lambda: first(X), None)
    assert nothing is None and early.output is not None
    last = model_of()
    late, result = cut(last, 1).forward(lambda: last(X), early.output.detach())
    assert torch.equal(result, loss)
    result.backward()
    assert late.received.gradient is not None
    early.output.backward(late.received.gradient)
    for name, parameter in whole.named_parameters():
        own = first if name.startswith(("first", "blocks.0", "blocks.1")) else last
        other = last if own is first else first
        assert torch.equal(own.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]
        assert other.get_parameter(name).grad is None, name


def test_stages_with_several_runs_compute_what_the_whole_model_computes() -> None:
    """Blocks 0 and 2 are on stage 0, blocks 1 and 3 on stage 1."""
    whole = model_of()
    loss = whole(X)
    loss.backward()
    models = [model_of(), model_of()]
    cuts = [cut(model, stage, runs=[range(at, at + 1) for at in range(1, 5)]) for stage, model in enumerate(models)]
    assert [each.chunks for each in cuts] == [2, 2]
    micros: list[MicroForward] = []
    received = result = None
    for position in range(4):
        stage = position % 2
        micro, result = cuts[stage].forward(lambda stage=stage: models[stage](X), received, position // 2)  # type: ignore[misc]
        assert (result is None) == (position < 3) and micro.output is not None
        received = micro.output.detach()
        micros.append(micro)
    assert result is not None and torch.equal(result, loss)
    result.backward()
    for position in (2, 1, 0):
        gradient, output = micros[position + 1].received.gradient, micros[position].output
        assert output is not None
        output.backward(gradient)
    for name, parameter in whole.named_parameters():
        own, other = models if name.startswith(("first", "blocks.0", "blocks.2")) else models[::-1]
        assert torch.equal(own.get_parameter(name).grad, parameter.grad), name  # type: ignore[arg-type]
        assert other.get_parameter(name).grad is None, name


def test_a_block_of_another_stage_answers_without_memory() -> None:
    answer = AbsentOutput(torch.empty(1 << 40, device="meta").to(torch.float64), "blocks.0")
    assert answer.shape == (1 << 40,) and answer.dtype is torch.float64
    with pytest.raises(UsageError, match=r"aten.add.Tensor was called on the output of blocks.0"):
        answer + 1
    assert isinstance(answer.detach(), AbsentOutput)


class Skips(Model):
    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.first(x)]
        for block in self.blocks:
            hidden.append(block(hidden[-1]))
        return (hidden[-1] + hidden[1]).square().mean()


class Scales(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for at, block in enumerate(self.blocks):
            x = block(x if at != 2 else self.first.bias * 1.0)
        return x.mean()


class Backwards(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in reversed(self.blocks):
            x = block(x)
        return x.mean()


class Twice(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + super().forward(x)


class Fewer(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](self.first(x)).mean()


class PairBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x), None)  # type: ignore[return-value]


class Pairs(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            out = block(x)
            x = out if isinstance(out, Tensor) else out[0]
        return x.mean()


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        (Skips, 1, "on the output of blocks.0, which another pipeline stage computes"),
        (Scales, 1, "the first argument of blocks.2, the first block of a pipeline stage, is not what blocks.1 has"),
        (Backwards, 0, "blocks.3 was called where blocks.0 was expected"),
        (Twice, 1, "blocks.0 was called where no block was expected"),
        (Fewer, 0, "returned without a call of blocks.1, the last block of pipeline stage 0"),
        (Pairs, 0, r"blocks.0 \(PairBlock\) returned a tuple"),
    ],
)
def test_modules_that_have_no_stages_are_refused(kind: type[nn.Module], stage: int, words: str) -> None:
    received = torch.zeros(3, 64, dtype=torch.float64) if stage else None
    model = model_of(kind)
    with pytest.raises(UsageError, match=words):
        cut(model, stage).forward(lambda: model(X), received)


class InnerLoss(Block):
    """Keeps a loss of its own, or gives it away."""

    kept: Tensor | None = None
    given: Callable[[Tensor], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layer(x)
        if self.given is None:
            self.kept = inner.mean()
        else:
            self.given(inner.mean())
        return x + inner


class KeepsLosses(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InnerLoss() for _ in range(4))


class GivesLosses(KeepsLosses):
    def forward(self, x: Tensor) -> Tensor:
        losses: list[Tensor] = []
        for block in self.blocks:
            block.given = losses.append
        loss = super().forward(x)
        return loss + torch.stack(losses).sum()


@pytest.mark.parametrize(
    ("kind", "stage", "words"),
    [
        (KeepsLosses, 0, "InnerLoss.kept keeps a tensor with its graph beside the output of blocks.0"),
        (KeepsLosses, 1, "beside the output of blocks.2: a loss that arises inside of a block"),
        (GivesLosses, 1, r"the loss uses a \w+ of it beside the output of blocks.[23]"),
    ],
)
def test_losses_that_arise_inside_of_blocks_are_refused(kind: type[nn.Module], stage: int, words: str) -> None:
    _, made, micro, result = forward(kind, stage)
    with pytest.raises(UsageError, match=words):
        made.check_loss(micro, result)


def test_other_losses_are_not() -> None:
    for stage in (0, 1):
        _, made, micro, result = forward(Model, stage)
        made.check_loss(micro, result)


def test_blocks_are_not_called_outside_of_steps() -> None:
    model = model_of()
    cut(model, 1)
    with pytest.raises(UsageError, match=r"blocks.0 was called outside of a step of the Trainer"):
        model(X)


class NoisyBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.noise = float(torch.rand(()))
        return super().forward(x)


class Noisy(Model):
    """Draws before, between and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyBlock() for _ in range(4))
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            self.drawn.append(float(torch.rand(())))
            x = block(x)
        return x.mean() * torch.rand(())


def test_code_outside_of_blocks_draws_the_same_numbers_on_all_stages() -> None:
    models, cpu = [], backend_of("cpu")
    with restored(cpu):
        for stage in (0, 1):
            model = model_of(Noisy)
            made = cut(model, stage, cpu)
            seed(7, cpu)
            made.forward(lambda model=model: model(X), torch.zeros(3, 64, dtype=torch.float64) if stage else None)  # type: ignore[misc]
            models.append(model)
    first, last = models
    assert first.drawn == last.drawn[:2]
    noises = [first.blocks[0].noise, first.blocks[1].noise, last.blocks[2].noise, last.blocks[3].noise]
    assert len({*noises, *last.drawn}) == 8  # blocks draw others, each its own


class Whole:
    """Gives the last block's output of one model to another."""

    def __init__(self, last: Tensor | None = None, received: Tensor | None = None, *, ends: bool = False) -> None:
        self.ends = ends
        self.last = last
        self.received = received
        self.seen: list[str] = []
        self.handed_on: list[Tensor] = []

    def receive(self) -> Tensor:
        assert self.received is not None
        return self.received

    def see(self, block: str, args: Any, kwargs: Any) -> None:
        self.seen.append(block)

    def hand_on(self, output: Tensor) -> None:
        self.handed_on.append(output)

    def last_output(self, own: Tensor | None) -> Tensor:
        if own is not None:
            self.last = own.detach()
        assert self.last is not None
        return self.last

    def blocks_end(self) -> None:
        self.seen.append("end")
        if self.ends:
            raise StageEnds


def test_a_whole_step_goes_on_with_the_last_blocks_output() -> None:
    whole = model_of()
    ends: list[Tensor] = []
    whole.blocks[3].register_forward_hook(lambda *given: ends.append(given[-1].detach()))  # type: ignore[index, union-attr]
    loss = whole(X)
    first, told = model_of(), Whole(ends[0])
    _, early = cut(first, 0).forward_whole(lambda: first(X), told)
    last, telling = model_of(), Whole(received=told.handed_on[0].detach())
    _, late = cut(last, 1).forward_whole(lambda: last(X), telling)
    assert torch.equal(early, loss) and torch.equal(late, loss)
    assert telling.last is not None and torch.equal(telling.last, ends[0])
    assert told.seen == telling.seen == [*(f"blocks.{number}" for number in range(4)), "end"]


def test_a_whole_step_may_end_behind_the_last_block() -> None:
    for stage in (0, 1):
        model = model_of()
        ends = Whole(torch.zeros(3, 64, dtype=torch.float64), torch.zeros(3, 64, dtype=torch.float64), ends=True)
        _, result = cut(model, stage).forward_whole(lambda model=model: model(X), ends)  # type: ignore[misc]
        assert result is None and ends.seen[-2:] == ["blocks.3", "end"]


class Box:
    loss: Tensor | None = None


class BoxedLoss(Block):
    """Leaves a loss of value zero in an object that the model reads."""

    box: Box

    def forward(self, x: Tensor) -> Tensor:
        inner = self.layer(x)
        self.box.loss = inner.mean() - inner.mean().detach()
        return x + inner


class Boxed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.box = Box()
        self.blocks = nn.ModuleList([BoxedLoss(), *(Block() for _ in range(3))])
        self.blocks[0].box = self.box  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss if self.box.loss is None else loss + self.box.loss


def test_a_loss_that_an_early_block_leaves_in_an_object_is_refused_on_its_stage() -> None:
    _, made, micro, result = forward(Boxed, 0)
    assert result is None
    with pytest.raises(UsageError, match=r"BoxedLoss.box keeps a tensor with its graph beside the output of blocks.0"):
        made.check_loss(micro, None)
    model = model_of(Boxed)
    vars(model.blocks[0])["_box"] = vars(model.blocks[0]).pop("box")  # type: ignore[index]
    BoxedLoss.box = vars(model.blocks[0])["_box"]  # type: ignore[index]
    made = cut(model, 0)
    micro, result = made.forward_whole(lambda: model(X), Whole(torch.zeros(3, 64, dtype=torch.float64)))
    with pytest.raises(UsageError, match=r"the loss uses a \w+ of it beside the output of blocks.0"):
        made.check_loss(micro, result)
