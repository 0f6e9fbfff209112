"""ModelPruning, and pruning by hand, of weights in pages: as with a plain Trainer."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.judged import Judged, MakeStrategy, assert_alike, batches, judge, run, trainer
from lightning.pytorch.callbacks import Callback, ModelPruning
from torch.nn.utils import prune

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.sharded import load
from lightning_ptm.trainer.pruning import refuse_pruning

PRUNED: dict[str, dict[str, Any]] = {
    "globally": {"pruning_fn": "l1_unstructured", "amount": 0.3},
    "rewound often": {"pruning_fn": "l1_unstructured", "parameter_names": ["weight", "bias"], "amount": 0.2},
    "rewound once": {
        "pruning_fn": "l1_unstructured",
        "amount": lambda epoch: 0.1 * epoch,
        "use_lottery_ticket_hypothesis": lambda epoch: epoch == 1,
    },
    "rewound anew": {"pruning_fn": "random_unstructured", "amount": 3, "resample_parameters": True},
    "by structure": {
        "pruning_fn": "ln_structured",
        "use_global_unstructured": False,
        "amount": 0.2,
        "pruning_dim": 0,
        "pruning_norm": 2,
        "parameter_names": ["weight"],
        "use_lottery_ticket_hypothesis": False,
    },
    "behind evaluations": {"pruning_fn": "l1_unstructured", "amount": 0.2, "prune_on_train_epoch_end": False},
}


class Validated(Judged):
    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self.loss(batch)


def pruned(strategy: Any, how: dict[str, Any], build: type[Judged] = Validated, **options: Any) -> Judged:
    torch.manual_seed(0)
    module = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit = trainer(strategy, callbacks=[ModelPruning(**how)], max_epochs=4, **options)
        fit.fit(module, batches(), batches(2))
    for _, value in sorted(module.state_dict().items()):
        module.note(value)
    return module


@pytest.mark.slow_unless(
    "masters_on_disk-rewound anew-True", "three_tiers-behind evaluations-True", "lock_free_three_tiers-globally-True"
)
@pytest.mark.parametrize("permanent", [True, False])
@pytest.mark.parametrize("how", PRUNED)
@pytest.mark.parametrize("place", ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free_three_tiers"])
def test_it_prunes_as_with_a_plain_trainer(strategy_at: MakeStrategy, place: str, how: str, permanent: bool) -> None:
    options = {**PRUNED[how], "make_pruning_permanent": permanent}
    assert_alike(pruned(strategy_at(place), options), pruned(None, options))


@pytest.mark.slow_unless("masters_on_disk-globally", "masters_on_disk-rewound often", "three_tiers-by structure")
@pytest.mark.parametrize("how", PRUNED)
@pytest.mark.parametrize("place", ["masters_on_disk", "three_tiers"])
def test_masters_are_pruned_alike_wherever_they_are(strategy_at: MakeStrategy, place: str, how: str) -> None:
    in_ram = pruned(strategy_at("ram"), PRUNED[how], precision="bf16-mixed")
    assert_alike(pruned(strategy_at(place), PRUNED[how], precision="bf16-mixed"), in_ram)
    masks = [value for name, value in in_ram.state_dict().items() if name.endswith("_mask")]
    assert not masks or any((mask == 0).any() for mask in masks)


class ByHand(Judged):
    """Prunes, gives other data, and ends pruning for good, inside of `gathered`."""

    def on_train_epoch_start(self) -> None:
        gathered = getattr(self.trainer.strategy, "gathered", nullcontext)
        first, last = self.blocks[0].inner[0], self.blocks[1].inner[2]
        with gathered():
            if self.current_epoch == 1:
                prune.l1_unstructured(first, "weight", 0.3)
                prune.ln_structured(last, "weight", 0.3, 2, 0)
                prune.random_unstructured(self.head, "bias", 2)
            elif self.current_epoch == 2:
                prune.remove(first, "weight")
                self.blocks[1].scale.data = self.blocks[1].scale.detach() * 2
                prune.l1_unstructured(last, "weight", 0.2)


@pytest.mark.slow_unless(
    "ram",
    "masters_on_disk-settings0",
    "all_on_disk-settings1",
    "three_tiers",
    "lock_free-settings0",
    "lock_free_three_tiers-settings1",
    "tight",
    "tight_recomputed-settings0",
)
@pytest.mark.parametrize("settings", [{}, {"recompute": "all"}])
def test_manual_optimization(strategy_at: MakeStrategy, tier: str, settings: dict[str, Any]) -> None:
    judge(ByHand, strategy_at(tier, **settings), max_epochs=4)


def test_pruning_outside_of_gathered_is_refused(strategy_at: MakeStrategy) -> None:
    class Alone(Judged):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                prune.l1_unstructured(self.blocks[0].inner[0], "weight", 0.3)

    with pytest.raises(UsageError, match=r"blocks.0.inner.0.weight was read or written .*strategy.gathered\(module\)"):
        run(Alone, strategy_at("masters_on_disk"), max_epochs=2)


@pytest.mark.parametrize(("kind", "permanent"), [("full", True), ("full", False), ("sharded", False)])
def test_checkpoints(strategy_at: MakeStrategy, tmp_path: Path, kind: str, permanent: bool) -> None:
    def saved(strategy: Any, name: str) -> dict[str, Any]:
        how = {**PRUNED["rewound often"], "make_pruning_permanent": permanent}
        folder = tmp_path / name
        pruned(strategy, how, enable_checkpointing=True, default_root_dir=folder)
        (path,) = folder.rglob("epoch=3*.ckpt")
        found: dict[str, Any] = load(path) if path.is_dir() else torch.load(path, weights_only=False)
        return found

    ours = saved(strategy_at("masters_on_disk", checkpoints={"state_dict_type": kind}), "ours")
    theirs = saved(None, "theirs")
    assert ours["state_dict"].keys() == theirs["state_dict"].keys()
    assert any("_mask" in name for name in theirs["state_dict"]) is not permanent
    assert all(torch.equal(ours["state_dict"][name], value) for name, value in theirs["state_dict"].items())
    states, known = (each["optimizer_states"][0]["state"] for each in (ours, theirs))
    assert all(torch.equal(states[at]["exp_avg"], state["exp_avg"]) for at, state in known.items())


@pytest.mark.parametrize(("sharded", "divided"), [(False, True), (True, True)])
def test_parts_are_not_pruned(sharded: bool, divided: bool) -> None:
    with pytest.raises(
        ConfigError, match=r"ModelPruning prunes .* without tensor_parallel_size and expert_parallel_size"
    ):
        refuse_pruning([ModelPruning("l1_unstructured")], sharded=sharded, divided=divided)
    refuse_pruning([ModelPruning("l1_unstructured")], sharded=False, divided=False)
    refuse_pruning([Callback()], sharded=sharded, divided=divided)


def test_masked_weights_are_not_written_as_shards(strategy_at: MakeStrategy) -> None:
    with pytest.raises(ConfigError, match=r"ModelPruning puts masked weights .* make_pruning_permanent=False"):
        pruned(strategy_at("masters_on_disk", checkpoints={"state_dict_type": "sharded"}), PRUNED["globally"])


class Unfrozen(Validated):
    """A block trains from the third epoch on: what had been rewound before stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 2:
            self.blocks[1].requires_grad_(True)


def test_laid_out_anew_meanwhile(strategy_at: MakeStrategy) -> None:
    how = {**PRUNED["rewound often"], "make_pruning_permanent": False}
    ours = pruned(strategy_at("masters_on_disk"), how, build=Unfrozen)
    assert_alike(ours, pruned(None, how, build=Unfrozen))
