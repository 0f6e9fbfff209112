"""Comparisons of numbers of tokens are recorded with what they are for texts of other lengths."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ptm.trainer.text_lengths import LengthComparison, TextLengths, pairs

SAMPLES, TOKENS = 2, 8


def recorded(step: Callable[[Tensor], Any], *shape: int) -> list[LengthComparison]:
    with TextLengths(SAMPLES, TOKENS) as lengths:
        step(torch.zeros(shape or (SAMPLES, TOKENS, 4)))
    return [each for found in lengths.found.values() for each in found]


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: x.shape[1] > 512, "600 > 512"),
        (lambda x: 512 <= x.size(1), "600 >= 512"),  # noqa: SIM300
        (lambda x: x.size(-2) // 2 + 1 == 100, "301 == 100"),
        (lambda x: 2 * x.size()[1] - x.shape[1] != x.size(dim=1), "600 != 600"),
        (lambda x: min(512, x.shape[1]), "600 < 512"),
        (lambda x: x[:, :512], "600 > 512"),
        (lambda x: x[0, -512:], "600 > 512"),
        (lambda x: x[:, : x.shape[1] - 1], "600 > 599"),
        (lambda x: x.shape[1] < 2.5, "600 < 2.5"),
    ],
)
def test_comparisons_are_those_of_the_text(step: Callable[[Tensor], Any], words: str) -> None:
    (found,) = recorded(step)
    assert found.words(600) == words
    assert found.at(600) == eval(words)
    assert found.result == found.at(TOKENS)


def test_other_sizes_and_dimensions_are_plain_numbers() -> None:
    assert recorded(lambda x: (x.shape[0] > 1, x.shape[2] > 9, x[:1], x[..., :9], x.shape[1] % 3 > 1)) == []
    assert recorded(lambda x: x.shape[1] > 9, 5, TOKENS, 4) == []
    assert len(recorded(lambda x: x.shape[2] > 9, SAMPLES, 3, TOKENS, 4)) == 1


def test_they_are_integers_that_can_be_copied_and_pickled() -> None:
    with TextLengths(SAMPLES, TOKENS):
        (_, tokens, width) = torch.zeros(SAMPLES, TOKENS, 4).shape
    for each in (pickle.loads(pickle.dumps(tokens)), copy.deepcopy(tokens)):
        assert type(each) is int and each == TOKENS
    assert torch.zeros(tokens, width).view(width, tokens).shape == (4, TOKENS)
    assert {tokens: 1}[TOKENS] == 1 and list(range(tokens)) == list(range(TOKENS))


def test_comparisons_of_whole_texts_and_parts_are_paired_by_their_line() -> None:
    def step(x: Tensor, *, also: bool) -> None:
        assert not also or x.shape[1] > 3
        assert x.shape[1] < 100

    found = []
    for also in (True, False):
        with TextLengths(SAMPLES, TOKENS) as lengths:
            step(torch.zeros(SAMPLES, TOKENS), also=also)
        found.append(lengths.found)
    ((whole, part),) = pairs(*found)
    assert whole.words(200) == part.words(200) == "200 < 100"


def test_a_quotient_without_a_value_for_another_length_decides_nothing_there() -> None:
    (first, guarded) = recorded(lambda x: x.shape[1] > 4 and x.shape[1] // (x.shape[1] - 4) > 1)
    assert (first.at(4), guarded.at(4), guarded.at(9)) == (False, guarded.result, False)
    assert guarded.words(4) == "'>' of a quotient with divisor 0"
