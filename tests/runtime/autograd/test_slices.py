"""Calls of a unit on slices: which arguments are cut, how results are joined, and which units are sliced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.mesh import Mesh
from lightning_ptm.runtime.autograd.recompute import Recompute
from lightning_ptm.runtime.autograd.slices import CutArguments, sizes_of, slices_of
from lightning_ptm.runtime.autograd.token_slices import token_slices_of
from lightning_ptm.runtime.units.discovery import Unit
from lightning_ptm.runtime.units.divided_experts import DividedExperts

SAMPLES, WIDTH = 6, 4


def unit_of(module: nn.Module, index: int = 1, name: str = "block") -> Unit:
    return Unit(index, name, module, (), ())


def sliced(module: nn.Module, slices: int = 3) -> Any:
    return Recompute(module, lambda _: None, lambda _: dict).of(unit_of(module), module.forward, slices=slices)


class Rich(nn.Module):
    """Takes keywords, tuples and inputs that all samples share; returns a tuple with a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))
        self.seen: list[int] = []

    def forward(
        self, x: Tensor, pair: tuple[Tensor, Tensor], *, scale: Tensor, mask: Tensor | None = None, flag: bool = True
    ) -> Any:
        self.seen.append(len(x))
        found = self.linear(x) * pair[0] + pair[1] * scale
        return found if mask is None else found * mask, {"bias": self.bias * scale, "twice": 2 * x, "flag": flag}, None


def call_of(module: Any, inputs: list[Tensor]) -> list[Tensor]:
    x, first, second, scale, mask = inputs
    found, others, nothing = module(x, (first, second), scale=scale, mask=mask)
    assert nothing is None and others["flag"] is True
    return [found, others["bias"], others["twice"]]


def test_arguments_and_results_keep_their_structure() -> None:
    torch.manual_seed(0)
    module = Rich()
    shapes = (SAMPLES, 2, WIDTH), (SAMPLES, 1, WIDTH), (1, 2, WIDTH), (WIDTH,), (SAMPLES, 1, 1)
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    outcomes = []
    for call in (module, sliced(module)):
        results = call_of(call, inputs)
        sum(each.sin().sum() for each in results).backward()
        outcomes.append([*results, *(each.grad for each in (*inputs, *module.parameters()))])
        for each in (*inputs, *module.parameters()):
            each.grad = None
    assert module.seen == [SAMPLES, 2, 2, 2]  # what the check and the recomputed forwards change is discarded
    for ours, theirs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_backward_goes_through_slices_in_the_order_of_the_batch() -> None:
    module = Rich()
    order: list[float] = []

    def call(x: Tensor) -> Tensor:
        order.append(float(x[0, 0, 0].detach()))
        return module.linear(x)

    x = torch.arange(SAMPLES).view(-1, 1, 1).expand(SAMPLES, 2, WIDTH).contiguous().float().requires_grad_()
    found = Recompute(module, lambda _: None, lambda _: dict).of(unit_of(module), call, slices=3)(x)
    order.clear()
    found.sum().backward()
    assert order == [0.0, 2.0, 4.0]


def test_slices_differ_by_one_sample_at_most() -> None:
    assert sizes_of(7, 3) == [3, 2, 2]
    assert sizes_of(2, 8) == [1, 1]
    assert sizes_of(0, 8) == [0]


def test_what_has_the_batch_in_front_is_cut() -> None:
    cut = CutArguments.of(
        (torch.ones(4, dtype=torch.long), torch.ones(3, 2)), {"m": torch.ones(3), "n": torch.ones(1, 3)}
    )
    assert (cut.samples, cut.cut, cut.never_cut) == (3, {1, 2}, {0})


class Placed(nn.Module):
    """Attention with positions and a mask of tokens by tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(2 * SAMPLES, WIDTH))

    def forward(self, x: Tensor, at: Tensor, *, mask: Tensor, own: Tensor) -> Tensor:
        x = x + self.positions[at]
        return (x @ x.mT).masked_fill(~mask, -1e9).softmax(-1) @ x * own.view(-1, 1, 1)


@pytest.mark.parametrize("lengths", [(SAMPLES, 3, SAMPLES), (3, SAMPLES)])
def test_what_has_as_many_elements_as_there_are_samples_by_chance_is_passed_whole(lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Placed()
    call = sliced(module)
    for length in lengths:
        x = torch.randn(SAMPLES, length, WIDTH, requires_grad=True)
        given = {"mask": torch.ones(length, length).tril().bool(), "own": torch.randn(SAMPLES)}
        outcomes = []
        for each in (module, call):
            found = each(x, torch.arange(length), **given)
            outcomes.append((found, *torch.autograd.grad(found.sin().sum(), [x, module.positions])))
        for ours, theirs in zip(*outcomes, strict=True):
            torch.testing.assert_close(ours, theirs)


def test_results_are_the_same_tensors_and_have_the_same_layout() -> None:
    class Returns(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            found = super().forward(x).transpose(1, 2)
            return found, found, x

    x = torch.randn(SAMPLES, 3, WIDTH, requires_grad=True)
    found, same, given = sliced(Returns(WIDTH, WIDTH))(x)
    assert same is found and given is x
    assert found.shape == (SAMPLES, WIDTH, 3) and found.mT.is_contiguous()


def test_a_result_that_slices_no_longer_share_is_refused() -> None:
    class Counts(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), (x.detach() > 0).sum()

    call, x = sliced(Counts(WIDTH, WIDTH)), torch.zeros(SAMPLES, WIDTH)
    for _ in range(2):
        call(x)
    x[2] = 1  # in the third call, which is not checked
    with pytest.raises(ConfigError, match="result 1, which has no dimension of samples, differs between slices"):
        call(x)


def test_which_units_are_sliced() -> None:
    units = [unit_of(nn.Identity(), at, name) for at, name in enumerate(["", "a.0", "a.1", "b", "b.c"])]
    assert slices_of(units, 1) == {}
    assert slices_of(units, {"a.*": 4, "a.1": 1}) == {1: 4}
    with pytest.raises(
        ConfigError, match=r"slices would compute b \(Identity\) in slices, and it contains the unit b.c"
    ):
        slices_of(units, 4)
    with pytest.raises(
        ConfigError, match=r"4 slices of each unit named 'd', and there is none.*the units are a.0, a.1, b"
    ):
        slices_of(units, {"d": 4})
    with pytest.raises(ConfigError, match=r"named '\*'.*the units are none but the module itself"):
        slices_of(units[:1], 4)


class Routed(nn.Module):
    """A block whose experts are divided over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.moe = nn.ModuleDict({"router": nn.Linear(WIDTH, 2), "experts": nn.ModuleList([nn.Linear(WIDTH, WIDTH)])})


def test_units_with_divided_experts_are_refused_by_name_and_others_are_cut() -> None:
    root = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), Routed()])
    units = [unit_of(root, 0, ""), *(unit_of(each, 1 + at, str(at)) for at, each in enumerate(root))]
    experts = DividedExperts(Mesh({}), (("1.moe", root[1].moe),), (), {})  # type: ignore[arg-type, union-attr]
    assert slices_of(units, {"0": 2}, experts) == {1: 2}
    assert slices_of(units, 2) == {1: 2, 2: 2}
    with pytest.raises(ConfigError, match=r"slices would compute 1 \(Routed\) in slices, and ranks exchange tokens"):
        slices_of(units, 2, experts)
    with pytest.raises(
        ConfigError, match=r"slices would compute 1.moe.router \(Linear\) in slices, and ranks exchange"
    ):
        token_slices_of(units, {"*.router": ("tokens", 2)}, experts)
    assert set(token_slices_of(units, {"auto": ("tokens", 2)}, experts)) == {"0.0", "0.1", "1.norm"}
