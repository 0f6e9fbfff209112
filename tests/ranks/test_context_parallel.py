"""Context parallelism: ranks that have parts of each sequence learn what one rank learns from whole ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from kit.ranks.context_models import ContextOutcome, ContextRun, train
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import BATCH, STEPS, assert_same_learning


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> ContextOutcome:
    """Returns the outcome of one rank with whole sequences."""
    return run_ranks(train, 1, ContextRun("gpt"), tmp_path_factory.mktemp("disk"))[0]


WAYS = ("gather", "ulysses", "ring")
RECOMPUTED = {"recompute": "all"}
CASES = {
    "gathered keys, recomputed in the least memory": ContextRun(
        "gpt", 2, 2, "gather", tier="tight", settings=RECOMPUTED
    ),
    "heads, with lock-free updates": ContextRun("gpt", 2, 2, "ulysses", tier="lock_free"),
    "ring of four, on disk": ContextRun("gpt", 4, 4, "ring", tier="all_on_disk"),
    "with data": ContextRun("gpt", 4, 2, tier="masters_on_disk"),
    "with tensor parallelism": ContextRun("gpt", 4, 2, tensor=2, tier="tight"),
    "heads of four ranks, recomputed": ContextRun("gpt", 4, 4, "ulysses", settings=RECOMPUTED),
    "ring in the least memory": ContextRun("gpt", 2, 2, "ring", tier="tight"),
    "ring with tensor parallelism, recomputed": ContextRun("gpt", 4, 2, "ring", tensor=2, settings=RECOMPUTED),
    "activations on disk": ContextRun("gpt", 2, 2, "ring", tier="tight", settings={"offload_activations": "disk"}),
    "recomputed or offloaded as units need it": ContextRun(
        "gpt", 4, 2, tensor=2, tier="tight", settings={"recompute": "auto", "offload_activations": "auto"}
    ),
}
SLOW = ("heads of four", "ring in", "ring with", "activations", "recomputed or")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name.startswith(SLOW) else name for name in CASES]
)
def test_it_learns_what_one_rank_learns(name: str, whole: ContextOutcome, disk: Path) -> None:
    how = CASES[name]
    assert_same_learning(run_ranks(train, how.ranks, how, disk, limit_s=240), whole)


@pytest.mark.parametrize(
    "model",
    [
        "dynamic",
        "mistral",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("llama", "qwen3", "mixtral", "gemma", "gpt2", "longrope")
        ),
    ],
)
@pytest.mark.parametrize("way", ["gather", pytest.param("ring", marks=pytest.mark.slow)])
def test_models_of_transformers_need_no_change(model: str, way: str, disk: Path) -> None:
    """With grouped keys, sliding windows, rotary positions by the length of the text, and labels of which one rank ignores
    more than the other."""
    (whole,) = run_ranks(train, 1, ContextRun(model, in_double=True), disk)
    how = ContextRun(model, 2, 2, way, tier="tight", in_double=True)
    assert_same_learning(run_ranks(train, 2, how, disk), whole)


@pytest.mark.parametrize(
    ("model", "way"),
    [
        ("llama", "gather"),
        ("mistral", "ulysses"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("llama", "ring"), ("qwen3", "ulysses"), ("gpt2", "ring"))
        ),
    ],
)
def test_padding_of_texts_is_seen_by_no_token(model: str, way: str, disk: Path) -> None:
    (whole,) = run_ranks(train, 1, ContextRun(model, padded=True), disk)
    how = ContextRun(model, 2, 2, way, padded=True, settings=RECOMPUTED)
    assert_same_learning(run_ranks(train, 2, how, disk), whole, losses=2e-6)


@pytest.mark.parametrize(
    ("model", "ranks", "context", "tensor"),
    [
        pytest.param(model, *mesh, marks=[] if (model, mesh) == ("llama", (4, 2, 2)) else pytest.mark.slow)
        for model in ("llama", "qwen3", "mistral", "mixtral", "gemma", "gpt2")
        for mesh in ((4, 4, 1), (4, 2, 1), (4, 2, 2))
        if (model, mesh[-1]) != ("gpt2", 2)  # Transformers has no plan to cut it
    ],
)
def test_models_of_transformers_are_divided_along_other_axes_too(
    model: str, ranks: int, context: int, tensor: int, disk: Path
) -> None:
    (whole,) = run_ranks(train, 1, ContextRun(model, in_double=True), disk)
    how = ContextRun(model, ranks, context, "gather", tensor=tensor, tier="tight", in_double=True)
    assert_same_learning(run_ranks(train, ranks, how, disk, limit_s=240), whole)


EXPERTS = {"expert_parallel_size": 2}


@pytest.mark.parametrize(
    ("ranks", "tier", "settings", "sizes"),
    [
        (4, "tight", EXPERTS, {}),
        pytest.param(4, "three_tiers", EXPERTS, {}, marks=pytest.mark.slow),
        pytest.param(4, "lock_free", EXPERTS, {}, marks=pytest.mark.slow),
        pytest.param(4, "ram", {**EXPERTS, "recompute": "all"}, {"experts": 5}, marks=pytest.mark.slow),
        pytest.param(4, "all_on_disk", {**EXPERTS, "units": ["MixtureBlock", "Expert"]}, {}, marks=pytest.mark.slow),
        (2, "tight", {}, {"balance": 0.1}),
        pytest.param(2, "ram", {"recompute": "all"}, {"balance": 0.1}, marks=pytest.mark.slow),
    ],
)
def test_experts_get_tokens_of_parts(
    ranks: int, tier: str, settings: dict[str, Any], sizes: dict[str, Any], disk: Path
) -> None:
    """Ranks that divide experts have parts of other texts; a balance loss counts the tokens of whole texts."""
    steps = 3 if tier == "tight" else STEPS
    (whole,) = run_ranks(train, 1, ContextRun("moe", sizes=sizes, steps=steps), disk)
    how = ContextRun("moe", ranks, 2, tier=tier, settings=settings, sizes=sizes, steps=steps)
    assert_same_learning(run_ranks(train, ranks, how, disk, limit_s=240), whole)


@pytest.mark.slow
def test_a_balance_of_divided_experts_is_that_of_whole_texts(disk: Path) -> None:
    sizes, steps = {"balance": 0.1}, 4
    whole = run_ranks(train, 2, ContextRun("moe", 2, 1, sizes=sizes, steps=steps, settings=EXPERTS), disk)
    how = ContextRun("moe", 4, 2, sizes=sizes, steps=steps, settings=EXPERTS)
    found = run_ranks(train, 4, how, disk, limit_s=240)
    for first in (0, 2):  # ranks with the same texts
        assert_same_learning(found[first : first + 2], whole[first // 2])


@pytest.mark.parametrize(
    ("way", "tier", "tensor", "slices"),
    [
        ("gather", "tight", 1, 2),
        pytest.param("ring", "ram", 1, {"blocks.*": 3}, marks=pytest.mark.slow),
        pytest.param(
            "ulysses", "all_on_disk", 1, {"blocks.*": 4, "*.feed_forward": ("tokens", 2)}, marks=pytest.mark.slow
        ),
        pytest.param("gather", "tight", 1, {"*.feed_forward": ("tokens", 3)}, marks=pytest.mark.slow),
        pytest.param("gather", "ram", 1, {"auto": ("tokens", 2)}, marks=pytest.mark.slow),
        pytest.param("gather", "tight", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_slices_of_the_batch_exchange_one_after_another(
    way: str, tier: str, tensor: int, slices: Any, whole: ContextOutcome, disk: Path
) -> None:
    ranks = 2 * tensor
    how = ContextRun("gpt", ranks, 2, way, tensor=tensor, tier=tier, settings={"slices": slices})
    assert_same_learning(run_ranks(train, ranks, how, disk, limit_s=240), whole)


def test_it_is_clipped_by_one_ranks_norm(disk: Path) -> None:
    clipped = {"gradient_clip_val": 0.3, "accumulate_grad_batches": 2, "max_steps": STEPS // 2}
    (whole,) = run_ranks(train, 1, ContextRun("gpt", trainer=clipped), disk)
    assert_same_learning(run_ranks(train, 2, ContextRun("gpt", 2, 2, trainer=clipped), disk), whole)


def train_each(hows: list[ContextRun], disk: Path) -> list[ContextOutcome]:
    return [train(how, disk) for how in hows]


def test_mixed_precision_differs_by_less_than_one_rounding(disk: Path) -> None:
    """Losses differ from one rank's by less than bf16's rounding (2**-8), and weights by less than that of the largest."""
    runs = [ContextRun("gpt", 2, 2, way, precision="bf16-mixed", tier="tight", steps=6) for way in WAYS]
    (whole,) = run_ranks(train, 1, dataclasses.replace(runs[0], ranks=1, context=1, way="auto"), disk)
    for outcomes in zip(*run_ranks(train_each, 2, runs, disk), strict=True):
        largest = max(float(each.abs().max()) for each in whole.weights.values())
        assert_same_learning(list(outcomes), whole, losses=2**-8 * min(whole.losses), weights=2**-8 * largest)


@pytest.mark.parametrize(("way", "of_block"), [("gather", 3), ("ulysses", 4), ("ring", 4)])
def test_recomputing_exchanges_nothing_again(way: str, of_block: int, disk: Path) -> None:
    """A step has these exchanges of a block, forward and backward; a check has two forwards and two losses."""
    plain = run_ranks(train, 2, ContextRun("gpt", 2, 2, way, steps=2), disk)
    recomputed = run_ranks(train, 2, ContextRun("gpt", 2, 2, way, steps=2, settings=RECOMPUTED), disk)
    of_check = 2 if way == "ulysses" else 1
    checks = plain[0].exchanges - 2 * 2 * of_block
    assert checks > 0 and checks % (2 * (2 * of_check + 1)) == 0
    assert [each.exchanges for each in recomputed] == [each.exchanges for each in plain]


@pytest.mark.parametrize(
    "kind", ["full", *(pytest.param(each, marks=pytest.mark.slow) for each in ("sharded", "async"))]
)
def test_a_checkpoint_goes_on_with_other_sizes(kind: str, tmp_path: Path) -> None:
    checkpoints = {"state_dict_type": "full" if kind == "full" else "sharded", "async_save": kind == "async"}
    epochs = ContextRun("gpt", tier="masters_on_disk", settings={"checkpoints": checkpoints}, texts=4 * BATCH)

    def last(folder: Path, *sizes: tuple[int, int]) -> list[ContextOutcome]:
        folder.mkdir()
        resumed = None
        for epoch, (ranks, context) in enumerate(sizes, 1):
            how = dataclasses.replace(epochs, ranks=ranks, context=context, steps=4 * epoch, saved_to=f"{epoch}.ckpt")
            outcomes = run_ranks(train, ranks, dataclasses.replace(how, resumed_from=resumed), folder, limit_s=240)
            resumed = str(folder / f"{epoch}.ckpt")
        return outcomes

    (whole,) = last(tmp_path / "whole", (1, 1), (1, 1), (1, 1))
    assert_same_learning(last(tmp_path / "divided", (2, 2), (1, 1), (4, 4)), whole)
