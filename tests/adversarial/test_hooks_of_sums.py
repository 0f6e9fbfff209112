"""Hooks behind the accumulation of a gradient find the sum in `.grad`, as in plain training, or the run ends."""

from __future__ import annotations

import pytest
from kit.judged import Judged, MakeStrategy, judge, run

from lightning_ptm import UsageError


class ReadsSums(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.register_post_accumulate_grad_hook(lambda weight: self.note(weight.grad))


def test_a_gradient_of_one_pass_is_read(tier: str, strategy_at: MakeStrategy) -> None:
    judge(ReadsSums, strategy_at(tier))


def test_a_sum_is_read_where_it_is_in_grad(strategy_at: MakeStrategy) -> None:
    judge(ReadsSums, strategy_at("ram"), accumulate_grad_batches=2)


@pytest.mark.parametrize("where", ["three_tiers", "all_on_disk"])
def test_a_part_of_a_sum_is_not_read_as_the_whole(where: str, strategy_at: MakeStrategy) -> None:
    with pytest.raises(
        UsageError, match=r"head.weight has a hook of register_post_accumulate_grad_hook.*register_hook"
    ):
        run(ReadsSums, strategy_at(where), accumulate_grad_batches=2)
