"""`optimizer_state_dtype`: the same training wherever encoded states live, checkpoints that hold what they stand for,
and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.checkpoint_runs import HALF, Full, fit, same, sharded
from kit.outcomes import Outcome
from kit.plain_loop import make_trainer, tokens
from kit.stacks import ScheduledStack

import lightning_ptm
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.memory.block_codec import BlockCodec
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.engine.inspection import states_at_home

WORDS = ("bf16", "int8")


def trained(strategy: AngelPTMStrategy, build: Any = ScheduledStack, **options: Any) -> tuple[Outcome, Any]:
    torch.manual_seed(0)
    module = build()
    trainer = make_trainer(strategy, "bf16-mixed", **options)
    trainer.fit(module, tokens(6).loader())
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    return Outcome(list(module.losses), weights), trainer


@pytest.fixture(scope="module")
def in_ram() -> dict[str, Outcome]:
    return {
        word: trained(AngelPTMStrategy(page_size="64KiB", optimizer_state_dtype=word))[0] for word in ("auto", *WORDS)
    }


@pytest.mark.slow_unless("masters_on_disk-int8", "all_on_disk-bf16", "lock_free-bf16", "tight_recomputed-int8")
@pytest.mark.parametrize("word", WORDS)
def test_where_states_live_changes_no_bit(strategy_at, tier: str, word: str, in_ram: dict[str, Outcome]) -> None:
    trained(strategy_at(tier, optimizer_state_dtype=word))[0].assert_equal(in_ram[word])


@pytest.mark.parametrize("word", WORDS)
def test_rounded_states_train_almost_as_exact_ones(word: str, in_ram: dict[str, Outcome]) -> None:
    exact, rounded = in_ram["auto"].losses, in_ram[word].losses
    assert rounded != exact
    assert abs(float(rounded[-1]) / float(exact[-1]) - 1) < 0.01


@pytest.mark.slow_unless("ram-sharded-bf16")
@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize("home", ["ram", "masters_on_disk"])
def test_going_on_equals_never_having_stopped(strategy_at, home: str, kind: str, word: str, tmp_path: Path) -> None:
    def strategy() -> AngelPTMStrategy:
        return strategy_at(home, optimizer_state_dtype=word, checkpoints={"state_dict_type": kind})

    never, _ = fit(strategy(), tmp_path / "never")
    again, _ = fit(strategy(), tmp_path / "again", tmp_path / "never" / "epoch=0.ckpt", seed=1)
    again.assert_equal(Outcome(never.losses[HALF:], never.weights))


def states_in(path: Path) -> dict[int, dict[str, Any]]:
    loaded = lightning_ptm.sharded.load(path) if path.is_dir() else torch.load(path, weights_only=False)
    found: dict[int, dict[str, Any]] = loaded["optimizer_states"][0]["state"]
    return found


@pytest.mark.parametrize("word", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_checkpoints_of_any_kind_hold_the_fp32_that_pages_stand_for(strategy_at, word: str, tmp_path: Path) -> None:
    found = []
    for name, settings in {
        "full": {},
        "sharded": {"checkpoints": {"state_dict_type": "sharded"}},
        "behind": {"checkpoints": {"state_dict_type": "sharded", "async_save": True}},
    }.items():
        fit(strategy_at("masters_on_disk", optimizer_state_dtype=word, **settings), tmp_path / name)
        found.append(states_in(tmp_path / name / "epoch=1.ckpt"))
    assert all(same(each, found[0]) for each in found[1:])
    for state in found[0].values():
        for name in ("exp_avg", "exp_avg_sq"):
            values = state[name].reshape(-1)
            assert values.dtype is torch.float32 and values.any()
            if word == "bf16":
                assert torch.equal(values.bfloat16().float(), values)
                continue
            values = torch.nn.functional.pad(values, (0, -values.numel() % 64))
            codes, scales = (
                torch.empty(values.shape, dtype=torch.uint8),
                torch.empty(len(values) // 64, dtype=torch.int16),
            )
            BlockCodec().encode(values, codes, scales)
            again = torch.empty_like(values)
            BlockCodec().decode(codes, scales, again)
            assert torch.equal(again, values)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "sharded"])
@pytest.mark.parametrize(("first", "second"), [("auto", "int8"), ("int8", "auto"), ("bf16", "int8"), ("int8", "bf16")])
def test_a_run_goes_on_from_checkpoints_of_runs_with_other_states(
    strategy_at, first: str, second: str, kind: str, tmp_path: Path
) -> None:
    never, _ = fit(sharded(strategy_at, "ram") if kind == "sharded" else strategy_at("ram"), tmp_path / "never")
    fit(
        strategy_at("masters_on_disk", optimizer_state_dtype=first, checkpoints={"state_dict_type": kind}),
        tmp_path / "first",
    )
    path = tmp_path / "first" / "epoch=0.ckpt"
    again, _ = fit(
        strategy_at("masters_on_disk", optimizer_state_dtype=second, checkpoints={"state_dict_type": kind}),
        tmp_path / "second",
        path,
    )
    for mine, theirs in zip(again.losses, never.losses[HALF:], strict=True):
        assert abs(float(mine) / float(theirs) - 1) < 0.02


def test_the_optimizer_has_after_a_run_what_its_checkpoint_has(strategy_at, tmp_path: Path) -> None:
    _, trainer = fit(strategy_at("ram", optimizer_state_dtype="int8"), tmp_path)
    saved = states_in(tmp_path / "epoch=1.ckpt")
    (optimizer,) = trainer.optimizers
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for place, state in saved.items():
        assert same(dict(optimizer.state[parameters[place]]), state)


def test_only_the_states_that_are_named_are_rounded(strategy_at, tmp_path: Path) -> None:
    fit(strategy_at("ram", optimizer_state_dtype={"exp_avg": "bf16"}), tmp_path)
    states = states_in(tmp_path / "epoch=1.ckpt").values()
    assert all(torch.equal(state["exp_avg"].bfloat16().float(), state["exp_avg"]) for state in states)
    assert not all(torch.equal(state["exp_avg_sq"].bfloat16().float(), state["exp_avg_sq"]) for state in states)


class Unfreezing(Full):
    """Model whose frozen part learns from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_states: list[dict[int, Any]] = []

    def look(self) -> None:
        self.seen_states.append(self.trainer.strategy.optimizer_state(self.trainer.optimizers[0])["state"])

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.look()
            self.frozen.requires_grad_(True)

    def loss(self, batch: torch.Tensor, index: int) -> torch.Tensor | None:
        if self.current_epoch == 1 and index == 0:
            self.look()
        loss = super().loss(batch, index)
        assert loss is not None
        return loss + self.frozen(torch.ones(64)).square().mean()


@pytest.mark.parametrize("word", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_a_run_that_is_laid_out_anew_keeps_its_states(strategy_at, word: str, tmp_path: Path) -> None:
    strategy = strategy_at("masters_on_disk", optimizer_state_dtype=word)
    _, trainer = fit(strategy, tmp_path, build=Unfreezing)
    before, after = trainer.lightning_module.seen_states
    assert before
    assert same(before, after)
    assert len(states_in(tmp_path / "epoch=1.ckpt")) > len(before), "nothing was unfrozen"


def on_disk_bytes(strategy: AngelPTMStrategy) -> tuple[int, int]:
    seen: list[tuple[int, int]] = []

    class Look(ScheduledStack):
        def on_train_batch_end(self, *_: Any) -> None:
            rows = {row.states: row.bytes for row in states_at_home(strategy.engine)}
            seen.append((rows["master parameters"], rows["optimizer states"]))

    trained(strategy, Look)
    return seen[-1]


def test_what_an_element_takes_in_pages(strategy_at) -> None:
    masters, states = on_disk_bytes(strategy_at("masters_on_disk"))
    assert states == 2 * masters
    assert on_disk_bytes(strategy_at("masters_on_disk", optimizer_state_dtype="bf16")) == (masters, masters)
    masters, states = on_disk_bytes(strategy_at("masters_on_disk", optimizer_state_dtype="int8"))
    assert masters / 2 <= states <= masters / 2 * 1.26  # of 64 KiB pages a chunk's scales take a block


@pytest.mark.slow_unless("ram", "three_tiers", "lock_free_three_tiers", "tight")
@pytest.mark.parametrize("word", [pytest.param("bf16", marks=pytest.mark.slow), "int8"])
def test_updates_take_the_buffers_that_the_plan_has(strategy_at, tier: str, word: str) -> None:
    strategy = strategy_at(tier, optimizer_state_dtype=word)
    seen: list[tuple[int, int]] = []

    class Look(ScheduledStack):
        def on_train_batch_end(self, *_: Any) -> None:
            engine = strategy.engine
            names = [tensor.name for tensor in engine.allocator.live_tensors()]
            planned = sum(row.count for row in engine.blueprint.inventory.of(What.STAGING))
            seen.append((sum(name.startswith("update staging") for name in names), planned))

    trained(strategy, Look)
    assert {taken for taken, _ in seen} == {planned for _, planned in seen}
    assert seen[0][0] >= 2, "both moments are decoded somewhere"


REFUSED = {
    "a name that no state has": ({"optimizer_state_dtype": {"momentum": "bf16"}}, "keep exp_avg, exp_avg_sq"),
    "a word that is none": ({"optimizer_state_dtype": "fp8"}, "use 'auto', 'bf16' or 'int8'"),
    "a dictionary of nothing": ({"optimizer_state_dtype": {}}, "use 'auto', 'bf16' or 'int8'"),
    "a dictionary of others": ({"optimizer_state_dtype": {"exp_avg": 8}}, "use 'auto', 'bf16' or 'int8'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_with_what_can(strategy_at, case: str) -> None:
    settings, told = REFUSED[case]
    with pytest.raises(ConfigError, match=told):
        trained(strategy_at("ram", **settings))


class BySgd(ScheduledStack):
    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


def test_a_name_is_refused_where_optimizers_keep_nothing(strategy_at) -> None:
    with pytest.raises(ConfigError, match="keep none; give names among these"):
        trained(strategy_at("ram", optimizer_state_dtype={"exp_avg": "bf16"}), BySgd)


class FrozenForNow(Full):
    """Has an optimizer beside the first whose parameters are all frozen."""

    def configure_optimizers(self) -> Any:
        self.automatic_optimization = False
        others = [each for each in self.parameters() if each.requires_grad]
        return torch.optim.SGD(others, lr=1e-2, momentum=0.9), torch.optim.AdamW(self.frozen.parameters())

    def training_step(self, batch: torch.Tensor, index: int) -> None:
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, index))
        optimizer.step()


def test_states_may_be_named_of_an_optimizer_whose_parameters_are_all_frozen_for_now(strategy_at) -> None:
    names = {"momentum_buffer": "bf16", "exp_avg": "int8"}
    outcome, _ = trained(strategy_at("ram", optimizer_state_dtype=names), FrozenForNow)
    assert len(outcome.losses) == 6


class ByMuon(ScheduledStack):
    def make_optimizer(self) -> torch.optim.Optimizer:
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(parameter.dim() == 2 and "blocks" in name)
        return torch.optim.Muon([each for each in self.parameters() if each.requires_grad], lr=1e-3)

    def make_schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        return None


def test_an_optimizer_of_whole_parameters_is_refused(strategy_at) -> None:
    with pytest.raises(ConfigError, match="optimizer_state_dtype encodes states of element-wise optimizers"):
        trained(strategy_at("ram", optimizer_state_dtype="int8"), ByMuon)


class Centered(ScheduledStack):
    """Model whose optimizer divides by the root of square_avg - grad_avg**2."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(self.parameters(), lr=1e-3, centered=True, momentum=0.9)


@pytest.mark.parametrize("asked", ["bf16", "int8", {"square_avg": "bf16"}, {"grad_avg": "int8"}], ids=str)
def test_states_of_which_an_optimizer_takes_the_difference_are_not_rounded(strategy_at, asked: Any) -> None:
    with pytest.raises(ConfigError, match="which rounding can make negative"):
        trained(strategy_at("ram", optimizer_state_dtype=asked), Centered)


def test_the_momentum_of_a_centered_optimizer_can_be_rounded(strategy_at) -> None:
    outcome, _ = trained(strategy_at("ram", optimizer_state_dtype={"momentum_buffer": "int8"}), Centered)
    assert all(map(torch.isfinite, outcome.losses))


def test_states_that_are_not_computed_in_fp32_are_refused(strategy_at) -> None:
    torch.manual_seed(0)
    with pytest.raises(ConfigError, match="computes exp_avg in bfloat16 in this precision"):
        make_trainer(strategy_at("ram", optimizer_state_dtype="int8"), "bf16-true").fit(
            ScheduledStack(), tokens(2).loader()
        )


def test_a_tier_that_cannot_hold_decoded_states_is_told_of_them(strategy_at) -> None:
    with pytest.raises(
        CapacityError,
        match=r"^optimizer_state_dtype takes 8 MiB .* pages may take 4 MiB in RAM; raise host_memory or lower page_size",
    ):
        trained(strategy_at("ram", optimizer_state_dtype="int8", page_size="4MiB", host_memory="4MiB"))


def test_smaller_states_fit_where_exact_ones_are_refused(strategy_at) -> None:
    def fits(word: str, room: int) -> bool:
        try:
            trained(strategy_at("masters_on_disk", optimizer_state_dtype=word, disk_memory=room))
        except CapacityError:
            return False
        return True

    rooms = range(64 << 10, 4 << 20, 64 << 10)
    enough = next(room for room in rooms if fits("int8", room))
    assert not fits("auto", enough)
