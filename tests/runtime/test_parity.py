"""Losses and weights are those of a plain PyTorch loop, bit for bit, wherever the model states live (promise 1)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import Batches, PlainLoop, fit, tokens
from kit.stacks import ScheduledStack, Stack

BATCHES = tokens(8)


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """Kernels cut their work for several threads, also where tests that run side by side have one each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@cache
def plain(precision: str, accumulate: int = 1, clip: float | None = None, by_value: bool = False) -> Outcome:
    loop = PlainLoop(ScheduledStack, precision, accumulate=accumulate, clip=clip, clip_by_value=by_value)
    return loop.run(BATCHES)


@pytest.mark.slow_unless(
    "all_on_disk-bf16-mixed",
    "lock_free_three_tiers-32-true",
    "lock_free_three_tiers-bf16-true",
    "lock_free_three_tiers-64-true",
)
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true", "bf16-true", "64-true"])
def test_precisions(strategy_at, tier, precision) -> None:
    fit(ScheduledStack, BATCHES, strategy_at(tier), precision).assert_equal(plain(precision))


@pytest.mark.slow_unless("masters_on_disk-every 2nd", "lock_free-all", "tight_recomputed-all")
@pytest.mark.parametrize("recompute", ["all", "every 2nd"])
def test_recompute(strategy_at, tier, recompute) -> None:
    fit(ScheduledStack, BATCHES, strategy_at(tier, recompute=recompute)).assert_equal(plain("bf16-mixed"))


@pytest.mark.slow_unless("all_on_disk-all", "lock_free_three_tiers-none")
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_accumulation(strategy_at, tier, recompute) -> None:
    ours = fit(ScheduledStack, BATCHES, strategy_at(tier, recompute=recompute), accumulate_grad_batches=4)
    ours.assert_equal(plain("bf16-mixed", accumulate=4))


@pytest.mark.slow_unless(
    "ram-norm-1", "ram-value-4", "three_tiers-norm-4", "three_tiers-value-1", "tight-norm-4", "tight-value-1"
)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(strategy_at, tier, algorithm, accumulate) -> None:
    bound = 0.5 if algorithm == "norm" else 0.002
    ours = fit(
        ScheduledStack,
        BATCHES,
        strategy_at(tier),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=bound,
        gradient_clip_algorithm=algorithm,
    )
    expected = plain("bf16-mixed", accumulate, bound, algorithm == "value")
    ours.assert_equal(expected)
    # The bound is one that matters.
    unclipped = plain("bf16-mixed", accumulate)
    assert not torch.equal(expected.weights["head.weight"], unclipped.weights["head.weight"])


@pytest.mark.slow_unless("masters_on_disk-bf16-true", "lock_free-32-true", "tight_recomputed-bf16-true")
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_clipping_and_accumulation_in_true_precisions(strategy_at, tier, precision) -> None:
    ours = fit(ScheduledStack, BATCHES, strategy_at(tier), precision, accumulate_grad_batches=4, gradient_clip_val=0.5)
    ours.assert_equal(plain(precision, 4, 0.5))


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_accumulation_that_ends_in_the_middle(strategy_at, tier) -> None:
    """Lightning steps at the end of an epoch with what there is; the next epoch starts afresh."""
    batches = tokens(6)
    ours = fit(Stack, batches, strategy_at(tier), accumulate_grad_batches=4, max_epochs=2)
    ours.assert_equal(PlainLoop(Stack, accumulate=4, epochs=2).run(batches))


@pytest.mark.parametrize("where", ["ram", "three_tiers"])
def test_two_compute_threads(strategy_at, where, monkeypatch) -> None:
    """Pages cut the update at other places than threads cut the whole: still the same bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    torch.set_num_threads(2)
    try:
        batches = tokens(3)
        fit(ScheduledStack, batches, strategy_at(where)).assert_equal(PlainLoop(ScheduledStack).run(batches))
    finally:
        torch.set_num_threads(1)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_no_step_at_all(strategy_at, tier) -> None:
    """A fit without a batch changes nothing, and the weights come back in fp32."""
    ours = fit(Stack, Batches([]), strategy_at(tier))
    torch.manual_seed(0)
    fresh = Stack()
    assert all(torch.equal(ours.weights[name], parameter) for name, parameter in fresh.named_parameters())
