"""Forwards around those of modules: what stands in for a module's own comes inside of them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_ptm.runtime.autograd.forward_wrappers import ForwardWrapper, RecomputedForwardWrapper, stand_in


def plus_one(inside: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda x: inside(x) + 1


def test_it_computes_around_what_is_inside_and_has_its_name() -> None:
    module = nn.Identity()
    around = ForwardWrapper(plus_one, module.forward)
    assert around(torch.tensor(2.0)) == 3
    assert around.__name__ == "forward" and around.inside == module.forward


def test_the_same_around_another() -> None:
    for kind in (ForwardWrapper, RecomputedForwardWrapper):
        other = kind(plus_one, nn.Identity().forward).with_inside(lambda x: 10 * x)
        assert type(other) is kind and other(torch.tensor(2.0)) == 21


def test_what_stands_in_comes_inside_and_is_taken_back() -> None:
    module = nn.Identity()
    module.forward = ForwardWrapper(plus_one, module.forward)  # type: ignore[method-assign, assignment]
    back = stand_in(module, lambda x: 10 * x)
    assert module(torch.tensor(2.0)) == 21
    back()
    assert module(torch.tensor(2.0)) == 3


def test_what_stands_in_for_a_plain_module_leaves_nothing_behind() -> None:
    plain = nn.Identity()
    back = stand_in(plain, lambda x: 10 * x)
    assert plain(torch.tensor(2.0)) == 20
    back()
    assert plain(torch.tensor(2.0)) == 2 and "forward" not in vars(plain)
