"""A gradient in pages: fetched when somebody looks, and changed where it was fetched to."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor

from lightning_ptm.runtime.gradients.view import GradPlaceholder


class Pages:
    """Whose values are counted when they are read."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def read(self) -> Tensor:
        self.reads += 1
        return torch.full((3,), self.value)


def made(value: float = 2.0) -> tuple[Pages, GradPlaceholder, Tensor]:
    pages, parameter = Pages(value), torch.ones(3, requires_grad=True)
    shown = GradPlaceholder(parameter, pages.read)
    parameter.grad = shown
    return pages, shown, parameter


def test_who_asks_about_the_tensor_fetches_nothing() -> None:
    pages, shown, parameter = made()
    assert (shown.shape, shown.dtype, shown.device) == (parameter.shape, parameter.dtype, parameter.device)
    assert shown.numel() == 3 and parameter.grad is shown and shown.fetched_values is None and pages.reads == 0


def test_values_are_fetched_once_and_edited_there() -> None:
    pages, shown, _ = made()
    assert (shown * 2).tolist() == [4.0] * 3 and float(shown.norm()) == pytest.approx(12**0.5)
    assert shown.mul_(3) is shown and shown.tolist() == [6.0] * 3
    assert shown.fetched_values is not None and shown.fetched_values.tolist() == [6.0] * 3 and pages.reads == 1


def test_copies_are_ordinary_tensors() -> None:
    _, shown, _ = made()
    file = io.BytesIO()
    torch.save(shown, file)
    file.seek(0)
    for each in (copy.deepcopy(shown), torch.load(file), shown.clone()):
        assert type(each) is Tensor and each.tolist() == [2.0] * 3
    copy.deepcopy(shown).zero_()
    assert shown.tolist() == [2.0] * 3 and repr(shown) == "tensor([2., 2., 2.])"


def test_a_retired_one_keeps_what_was_fetched_and_nothing_else() -> None:
    def refuse() -> Tensor:
        raise RuntimeError("used")

    for looked in (True, False):
        _, shown, _ = made()
        if looked:
            shown.tolist()
        shown.retire(refuse)
        if looked:
            assert shown.tolist() == [2.0] * 3
        else:
            with pytest.raises(RuntimeError, match="used"):
                shown.tolist()
