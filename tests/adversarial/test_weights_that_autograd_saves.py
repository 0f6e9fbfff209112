"""Tensors that autograd saves of a weight in pages, in whatever form: read as they were saved, or refused.

Pages are used again between forward and backward here (`tight`), with and without poison, recomputed or not.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from kit.odd import WIDTH, Block, Odd, assert_refused, assert_same
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_ptm.runtime.autograd import offload

PLACES = ["ram", "all_on_disk", "tight", "tight_recomputed"]


class Penalty(Odd):
    """A function of each block's weight, taken behind the block's call, is a part of the loss."""

    def of(self, weight: Tensor) -> Tensor:
        return weight.square().mean()

    def loss(self, x: Tensor) -> Tensor:
        x, penalty = self.stem(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            penalty = penalty + self.of(block.up.weight)
        return self.head(x).square().mean() + penalty


class Norm(Penalty):
    """The weight's norm."""

    def of(self, weight: Tensor) -> Tensor:
        return torch.linalg.norm(weight)


class Gram(Penalty):
    """The weight's product with its own transpose."""

    def of(self, weight: Tensor) -> Tensor:
        return (weight @ weight.T - torch.eye(len(weight))).square().mean()


class Complex(Penalty):
    """Pairs of its elements as complex numbers."""

    def of(self, weight: Tensor) -> Tensor:
        return torch.view_as_complex(weight.view(-1, 2)).exp().abs().mean()


class Conjugate(Penalty):
    """The weights' conjugates."""

    def of(self, weight: Tensor) -> Tensor:
        number = torch.view_as_complex(weight.view(-1, 2))
        return (number.conj() * number.sin()).imag.square().mean()


class Rows(Penalty):
    """Every second row, backwards."""

    def of(self, weight: Tensor) -> Tensor:
        return weight[::2].flip(0).exp().mean()


class Windows(Penalty):
    """Windows that overlap."""

    def of(self, weight: Tensor) -> Tensor:
        return weight.unfold(0, 3, 2).sin().prod(-1).mean()


class Expanded(Penalty):
    """One row of it, expanded."""

    def of(self, weight: Tensor) -> Tensor:
        return (weight[:1].expand(4, -1) * weight[4:8]).mean()


class Singular(Penalty):
    """The weight's largest singular value."""

    def of(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_norm(weight, 2)


class Vmapped(Penalty):
    """A function of each of its rows."""

    def of(self, weight: Tensor) -> Tensor:
        return torch.vmap(lambda row: (row * row.roll(1)).sum())(weight).mean()


class Spectral(Odd):
    """A weight that is looked at as complex numbers multiplies a spectrum, inside of the block."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) * 0.2)

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.w), n=WIDTH))

        return OfBlock()


class Tied(Odd):
    """A projection that is tied by hand, behind the call of the block that has it."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            x = x + F.linear(F.linear(x, block.up.weight, block.up.bias), block.up.weight.T) * 0.01
        return self.head(x)  # type: ignore[no-any-return]


class NotForward(Odd):
    """A method of the block that is not its forward."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def score(self, x: Tensor) -> Tensor:
                return F.linear(x, self.down.weight.T).square().mean()

        return OfBlock()

    def loss(self, x: Tensor) -> Tensor:
        x, scores = self.stem(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            scores = scores + block.score(x)  # type: ignore[operator]
        return self.head(x).square().mean() + scores


class _Times(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight.T)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, turned = ctx.saved_tensors
        return gradient @ turned.T, gradient.T @ x


class OwnFunction(Odd):
    """A function of the user's saves a view of the weight that it was given."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(_Times.apply(x, self.up.weight)[:, :WIDTH] + x)

        return OfBlock()


class HooksThatKeep(Odd):
    """Hooks of the user's that keep what they are given, around all."""

    def through(self, x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().through(x)


class HooksInside(Odd):
    """Hooks inside of each block."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                with saved_tensors_hooks(lambda tensor: [tensor], lambda packed: packed[0]):
                    return super().forward(x)

        return OfBlock()


class SavedOnCpu(HooksInside):
    """torch's own hooks that copy."""

    def block(self) -> nn.Module:
        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                with save_on_cpu():
                    return super().forward(x)

        return OfBlock()


class InCheckpoint(Tied):
    """A checkpoint of the user's around calls of blocks and uses of their weights by hand."""

    reentrant = False

    def through(self, x: Tensor) -> Tensor:
        def both(x: Tensor, block: Any) -> Tensor:
            x = block(x)
            return x + F.linear(x, block.up.weight)[:, :WIDTH] * 0.1  # type: ignore[no-any-return]

        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(both, x, block, use_reentrant=self.reentrant)
        return self.head(x)  # type: ignore[no-any-return]


class InReentrantCheckpoint(InCheckpoint):
    """Checkpointed forward, with torch's reentrant checkpoint."""

    reentrant = True


class SparseActivations(Odd):
    """A constant sparse matrix multiplies activations."""

    layout = "coo"

    def matrix(self, count: int) -> Tensor:
        whole = torch.eye(count) + torch.eye(count).roll(1, 0)
        return whole.to_sparse() if self.layout == "coo" else whole.to_sparse_csr()

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) + self.matrix(len(x)) @ x
        return self.head(x)  # type: ignore[no-any-return]


class CompressedActivations(SparseActivations):
    """A compressed one."""

    layout = "csr"


class AfterAnError(Odd):
    """A try raises with views of weights in its variables, and another is made while the error is handled."""

    def loss(self, x: Tensor) -> Tensor:
        try:
            x = self.attempt(x, fails=True)
        except MemoryError:
            x = self.attempt(x[:1], fails=False)
        return self.head(x).square().mean()

    def attempt(self, x: Tensor, *, fails: bool) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            turned, listed = block.up.weight.T, [block.down.weight.detach()]
            if fails and block is self.blocks[2]:
                raise MemoryError
            x = x + (x @ turned)[:, :WIDTH] * 0.1
            del turned, listed
        return x


class ForwardDerivative(Odd):
    """A derivative along one direction, by forward-mode differentiation, which saves zeros that have no memory."""

    def loss(self, x: Tensor) -> Tensor:
        with torch.autograd.forward_ad.dual_level():
            made = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            value, slope = torch.autograd.forward_ad.unpack_dual(self.through(made))
            return value.square().mean() + slope.square().mean()


class InSelectiveCheckpoint(Odd):
    """A checkpoint of the user's that keeps what its matrix products give, by a mode of torch's dispatcher."""

    def through(self, x: Tensor) -> Tensor:
        keep = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=keep)
        return self.head(x)  # type: ignore[no-any-return]


SAME = [
    AfterAnError,
    InSelectiveCheckpoint,
    Penalty,
    Norm,
    Gram,
    Complex,
    Conjugate,
    Rows,
    Windows,
    Expanded,
    Singular,
    Vmapped,
    Spectral,
    Tied,
    NotForward,
    OwnFunction,
    HooksThatKeep,
    HooksInside,
    SavedOnCpu,
    InCheckpoint,
    InReentrantCheckpoint,
    SparseActivations,
    CompressedActivations,
]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("program", SAME, ids=lambda program: program.__name__)
def test_as_a_plain_trainer(strategy_at, program: type[Odd], place: str) -> None:
    assert_same(program, strategy_at(place))


class KeptForLater(Odd):
    """Views of weights are kept in a list, and used when other blocks have been called."""

    def loss(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(self.look(block.up.weight))
        return self.head(x).square().mean() + sum(each.sum() for each in kept) * 0.1

    def look(self, weight: Tensor) -> Tensor:
        return weight.view(-1)


class KeptTransposed(KeptForLater):
    """Transposed."""

    def look(self, weight: Tensor) -> Tensor:
        return weight.T


class KeptDetached(KeptForLater):
    """Detached."""

    def look(self, weight: Tensor) -> Tensor:
        return weight.detach()


class KeptData(KeptForLater):
    """The weight's data."""

    def look(self, weight: Tensor) -> Tensor:
        return weight.data


class KeptAsArray(KeptForLater):
    """An array of NumPy's."""

    def look(self, weight: Tensor) -> Tensor:
        return torch.from_numpy(weight.detach().numpy())


class KeptByDlpack(KeptForLater):
    """By way of DLPack."""

    def look(self, weight: Tensor) -> Tensor:
        return torch.from_dlpack(weight.detach())


class KeptAsStorage(KeptForLater):
    """The weight's storage, as the Python object."""

    def loss(self, x: Tensor) -> Tensor:
        x, kept = self.stem(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(block.up.weight.untyped_storage())
        values = [torch.empty(0).set_(each) for each in kept]  # type: ignore[call-overload]
        return self.head(x).square().mean() * sum(each.norm() for each in values)


class KeptWhileAnErrorIsHandled(KeptDetached):
    """Detached, while an error is handled that has nothing to do with it."""

    def loss(self, x: Tensor) -> Tensor:
        try:
            raise ImportError
        except ImportError:
            return super().loss(x)


class KeptInAContext(OwnFunction):
    """A function of the user's keeps a view as an attribute of its context, which autograd knows nothing of."""

    def block(self) -> nn.Module:
        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.turned = weight.T
                return x @ weight.T

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                return gradient @ ctx.turned.T, None

        class OfBlock(Block):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(Times.apply(x, self.up.weight)[:, :WIDTH] + x)

        return OfBlock()


class KeptByAClosure(Odd):
    """A closure that a checkpoint recomputes has a view of the weight."""

    def through(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
            turned = block.up.weight.T
            x = checkpoint(lambda x, turned=turned: x + (x @ turned)[:, :WIDTH] * 0.1, x, use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


class SparseOverAWeight(Penalty):
    """A sparse tensor whose values are the weight's own."""

    def of(self, weight: Tensor) -> Tensor:
        places = torch.arange(8)
        values = weight.detach().view(-1)[:8]
        sparse = torch.sparse_coo_tensor(torch.stack((places, places)), values, (8, 8), check_invariants=False)
        return (sparse @ weight[:8]).square().mean()


REFUSED = [
    KeptForLater,
    KeptTransposed,
    KeptDetached,
    KeptData,
    KeptAsArray,
    KeptByDlpack,
    KeptAsStorage,
    KeptWhileAnErrorIsHandled,
    KeptInAContext,
    KeptByAClosure,
]


@pytest.mark.diagonal
@pytest.mark.parametrize("place", ["ram", "tight", "tight_recomputed"])
@pytest.mark.parametrize("program", REFUSED, ids=lambda program: program.__name__)
def test_what_outlives_the_call_of_its_unit_is_refused_where_pages_are_given_up(
    strategy_at, program: type[Odd], place: str
) -> None:
    if place == "ram":
        assert_same(program, strategy_at(place))
    else:
        assert_refused(program, strategy_at(place), "a view of ", "up.weight", "clone()")


@pytest.mark.parametrize("place", ["ram", "tight"])
def test_a_sparse_tensor_over_a_weight(strategy_at, place: str) -> None:
    if place == "ram":
        assert_same(SparseOverAWeight, strategy_at(place))
    else:
        assert_refused(SparseOverAWeight, strategy_at(place), "up.weight", "a part of another tensor", "clone()")


class GivenOnByABackward(Odd):
    """A function's backward gives the weight that it has saved on as a gradient."""

    def block(self) -> nn.Module:
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
                ctx.save_for_backward(weight)
                return (x * weight[: len(x)]).sum()

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
                return ctx.saved_tensors[0][:2], None

        class OfBlock(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.one, self.two = (nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(2))

            def forward(self, x: Tensor) -> Tensor:
                return x.detach() @ self.two + Sum.apply(x, self.one)

        return OfBlock()


@pytest.mark.parametrize("place", ["ram", "tight"])
def test_what_a_backward_was_given_is_refused_where_it_outlives_it(strategy_at, place: str) -> None:
    if place == "ram":
        assert_same(GivenOnByABackward, strategy_at(place))
    else:
        assert_refused(GivenOnByABackward, strategy_at(place), "a view of ", ".one", "clone()")


class ErrorThatIsKept(Odd):
    """An exception that the step survives is put into a list; a frame that it came through had a view."""

    without_frames = False

    def __init__(self) -> None:
        super().__init__()
        self.errors: list[ValueError] = []

    def fails(self) -> None:
        view = self.blocks[0].up.weight.t()
        raise ValueError(f"{view.shape}")

    def loss(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        try:
            self.fails()
        except ValueError as error:
            self.errors.append(error.with_traceback(None) if self.without_frames else error)
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x).square().mean()


class ErrorWithoutFrames(ErrorThatIsKept):
    """Kept error without its frames, as the refusal advises."""

    without_frames = True


@pytest.mark.parametrize("place", ["ram", "tight"])
def test_an_exception_that_is_kept_is_named_as_what_holds_a_view(strategy_at, place: str) -> None:
    assert_same(ErrorWithoutFrames, strategy_at(place))
    if place == "ram":
        assert_same(ErrorThatIsKept, strategy_at(place))
    else:
        assert_refused(
            ErrorThatIsKept, strategy_at(place), "a view of ", "a stored exception may", "with_traceback(None)"
        )


@pytest.mark.parametrize("place", ["ram", "tight"])
@pytest.mark.parametrize("to", ["none", "disk"])
def test_forward_mode_derivatives(monkeypatch: pytest.MonkeyPatch, strategy_at, place: str, to: str) -> None:
    monkeypatch.setattr(offload, "LEAST_BYTES", 512)
    assert_same(ForwardDerivative, strategy_at(place, offload_activations=to))
