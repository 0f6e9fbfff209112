"""Readers of autograd's graphs, on graphs of a few nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.runtime.tensors.autograd_graphs import (
    OwnHook,
    exit_nodes,
    in_derivative,
    nodes_of,
    refuse_derivative,
    run_before_output_hooks,
    tensors_in,
    user_receives_gradient,
)


@dataclasses.dataclass
class Pair:
    first: Any
    second: Any


class Plain:
    def __init__(self, **what: Any) -> None:
        vars(self).update(what)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_tensors_are_found_in_whatever_holds_them_but_modules() -> None:
    a, b, c, d = (torch.full((1,), float(at)) for at in range(4))
    around: dict[str, Any] = {"list": [a, (b, "text", 1)], "pair": Pair(c, None), "plain": Plain(d=d), "type": int}
    around["itself"] = around
    around["module"] = nn.Linear(1, 1)
    assert [float(each) for each in tensors_in(around)] == [0, 1, 2, 3]


def test_under_vmap_the_tensor_itself_is_found() -> None:
    x, found = torch.ones(2, 3), []

    def inside(row: Tensor) -> Tensor:
        found.extend(tensors_in([row]))
        return row

    torch.func.vmap(inside)(x)
    assert [each.data_ptr() for each in found] == [x.data_ptr()]


def test_others_are_those_who_get_the_gradient() -> None:
    mine, theirs, kept, several = (leaf() * 2 for _ in range(4))
    mine.register_hook(OwnHook(print))
    theirs.register_hook(lambda gradient: gradient)
    kept.retain_grad()
    torch.autograd.graph.register_multi_grad_hook([several], lambda gradients: None)
    assert [user_receives_gradient(each) for each in (leaf(), mine, theirs, kept, several)] == [
        False,
        False,
        True,
        True,
        False,
    ]


def test_a_hook_on_an_input_comes_before_those_on_it_as_an_output() -> None:
    heard: list[str] = []
    x = leaf() * 2
    x.register_hook(lambda _: heard.append("user's"))
    x.register_hook(OwnHook(lambda _: heard.append("output's")))
    x.register_hook(lambda _: heard.append("user's second"))
    handle = x.register_hook(lambda _: heard.append("input's"))
    run_before_output_hooks(x, handle.id)
    x.sum().backward()
    assert heard == ["user's", "input's", "output's", "user's second"]


def test_nodes_are_of_tensors_and_of_what_they_are_views_of() -> None:
    base = leaf() * 2
    view = base[:2]
    assert nodes_of([view, leaf()]) == (view.grad_fn, base.grad_fn)


def test_ways_out_lead_to_what_was_there_before_and_to_others_parameters() -> None:
    own, other, given, hidden = leaf(), leaf(), leaf() * 2, leaf() * 3
    began = torch._C._autograd._get_sequence_nr()
    product = given * own
    sum_ = product + hidden
    output = sum_ * other
    out = exit_nodes([output], began, nodes_of([given]), frozenset({id(own)}))
    # `given` is known already, and gradients of `own` leave nothing.
    assert set(out) == {output.grad_fn, sum_.grad_fn}
    assert exit_nodes([given * own], began, nodes_of([given]), frozenset({id(own)})) == ()


def test_derivatives_of_torch_func_are_known_from_its_other_transforms() -> None:
    seen: list[bool] = []

    def inside(x: Tensor) -> Tensor:
        seen.append(in_derivative())
        return x.sum()

    inside(torch.ones(2))
    torch.func.vmap(inside)(torch.ones(2, 2))
    torch.func.grad(inside)(torch.ones(2))
    torch.func.jvp(inside, (torch.ones(2),), (torch.ones(2),))
    assert seen == [False, False, True, True]


def test_refusals_name_the_unit_and_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"blocks\.1 is called inside of a derivative .* use torch\.autograd\.grad"):
        refuse_derivative("blocks.1")
    with pytest.raises(UsageError, match="the root is called"):
        refuse_derivative("")
