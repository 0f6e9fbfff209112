"""Tensor parallelism with batches in two halves: it learns what two micro-batches learn, bit for bit, in every home."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from kit.fits import quiet_trainer
from kit.memory import strategy_with
from kit.ranks import tensor_models
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import BATCH, LENGTH, VOCABULARY, Outcome, PreciseGPT, Run, Unbounded, train
from kit.ranks.training import PLACES
from kit.settings import merged
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMPrecision, AngelPTMStrategy, TensorParallel
from lightning_ptm.comm.process_group import ProcessGroupCommunicator
from lightning_ptm.errors import CapacityError, ConfigError
from lightning_ptm.update.loss_scale import LossScale

HALVES = {"tensor_parallel": {"overlap": "two_batches"}}
STEPS = 4


def in_order(how: Run, disk: Path, size: int) -> Outcome:
    """One rank's part, with batches of so many rows in their order: those of a half are those of a micro-batch."""
    rows = torch.randint(3, VOCABULARY, (how.steps * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    made, tensor_models.batches = tensor_models.batches, lambda how: DataLoader(rows, size)  # type: ignore[assignment, arg-type]
    try:
        return train(how, disk)
    finally:
        tensor_models.batches = made


def both(how: Run, disk: Path) -> tuple[list[Outcome], list[Outcome]]:
    """Outcomes of two halves of each batch, and of two micro-batches."""
    halves = dataclasses.replace(how, settings={**how.settings, **HALVES})
    trainer = {"accumulate_grad_batches": 2, "max_steps": how.steps, **how.trainer}
    micro = dataclasses.replace(how, trainer=trainer)
    return run_ranks(in_order, 2, halves, disk, BATCH), run_ranks(in_order, 2, micro, disk, BATCH // 2)


CLIPPED = {"gradient_clip_val": 0.5}
RUNS = {
    "in RAM": Run("gpt", 2, 2, steps=STEPS, norms=True),
    "masters on disk, clipped": Run("gpt", 2, 2, "masters_on_disk", steps=STEPS, norms=True, trainer=CLIPPED),
    "three tiers, recomputed": Run("gpt", 2, 2, "three_tiers", steps=STEPS, settings={"recompute": "all"}),
    "activations on disk": Run("gpt", 2, 2, "three_tiers", steps=STEPS, settings={"offload_activations": "disk"}),
    "over gloo": Run("gpt", 2, 2, "all_on_disk", steps=STEPS, way="gloo"),
    "units given up": Run("gpt", 2, 2, "all_on_disk", steps=STEPS, evictions=0),
    "lock-free": Run("gpt", 2, 2, "lock_free", steps=STEPS),
    "of Transformers": Run("llama", 2, 2, "masters_on_disk", steps=STEPS, settings={"recompute": "every 2nd"}),
}
QUICK = ("masters on disk, clipped", "three tiers, recomputed", "over gloo", "of Transformers")


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in RUNS]
)
def test_it_learns_what_two_micro_batches_learn_bit_for_bit(name: str, disk: Path) -> None:
    halves, micro = both(RUNS[name], disk)
    for one, other in zip(halves, micro, strict=True):
        assert one.losses == other.losses and one.norms == other.norms
        for key, value in other.weights.items():
            assert torch.equal(one.weights[key], value), key


def test_weights_of_several_layers_differ_by_rounding(disk: Path) -> None:
    """A T5's embedding gets three gradients from each half, in another order than from two micro-batches."""
    halves, micro = both(Run("t5", 2, 2, steps=STEPS), disk)
    for one, other in zip(halves, micro, strict=True):
        for key, value in other.weights.items():
            torch.testing.assert_close(one.weights[key], value, rtol=0, atol=1e-12, msg=key)


@pytest.mark.slow
def test_in_16_bits_gradients_of_the_halves_are_added_in_16_bits(disk: Path) -> None:
    """Those of two micro-batches are added in fp32."""
    halves, micro = both(Run("llama", 2, 2, steps=STEPS, precision="bf16-mixed"), disk)
    for one, other in zip(halves, micro, strict=True):
        assert one.losses[:2] == other.losses[:2]
        assert one.losses == pytest.approx(other.losses, rel=2e-3)


MARK = 2
"""A token that no other row has."""


class OverflowsInOneHalf(PreciseGPT):
    """The half with a marked row has gradients without bound."""

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        return Unbounded.apply(loss) if bool((batch == MARK).any()) else loss  # type: ignore[no-any-return, no-untyped-call]


def overflow(disk: Path, steps: int) -> tuple[float, dict[str, Tensor]]:
    """The loss scale and the weights after so many batches, of which the second has a marked row in its second half."""
    torch.manual_seed(0)
    module = OverflowsInOneHalf()
    rows = torch.randint(3, VOCABULARY, (3 * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    rows[2 * BATCH - 1, 3] = MARK
    scale = LossScale(2.0**10)
    settings = merged({"disk_path": str(disk), "page_size": "64KiB"}, PLACES["tight"], HALVES)
    strategy = strategy_with(tensor_parallel_size=2, **settings)
    plugins = [AngelPTMPrecision("16-mixed", scale)]  # as a plugin: Lightning makes bf16-mixed of it on a CPU
    trainer = quiet_trainer(
        strategy, devices=2, precision=None, plugins=plugins, max_steps=-1, max_epochs=1, use_distributed_sampler=False
    )
    trainer.fit(module, DataLoader(rows[: steps * BATCH], BATCH))  # type: ignore[arg-type]
    return scale.value, {name: each.detach().clone() for name, each in module.named_parameters()}


def overflows(disk: Path) -> list[tuple[float, dict[str, Tensor]]]:
    return [overflow(disk, steps) for steps in (1, 2, 3)]


def test_in_fp16_an_overflow_of_one_half_skips_the_step_on_all_ranks(disk: Path) -> None:
    for (_, before), (scale, skipped), (after, trained) in run_ranks(overflows, 2, disk):
        assert scale == after == 2.0**9
        assert all(torch.equal(skipped[name], value) for name, value in before.items())
        assert any(not torch.equal(trained[name], value) for name, value in before.items())
        assert all(value.isfinite().all() for value in trained.values())


# -- resuming ---------------------------------------------------------------------------------------------------------


class SavesAfterOneEpoch(L.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def fit_two_epochs(disk: Path, resume: Path | None, *callbacks: L.Callback) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = PreciseGPT(dropout=0.3)
    rows = torch.randint(3, VOCABULARY, (2 * BATCH, LENGTH), generator=torch.Generator().manual_seed(5))
    settings = merged({"disk_path": str(disk), "page_size": "64KiB", "recompute": "all"}, PLACES["tight"], HALVES)
    trainer = quiet_trainer(
        strategy_with(tensor_parallel_size=2, **settings),
        devices=2,
        precision="64-true",
        max_epochs=2,
        use_distributed_sampler=False,
        callbacks=list(callbacks),
    )
    # With a generator of its own, since a loader's iterator draws a number, and a resumed run makes one more.
    data: DataLoader[Any] = DataLoader(rows, BATCH, generator=torch.Generator())  # type: ignore[arg-type]
    trainer.fit(module, data, ckpt_path=resume)
    return vars(module)["losses"][-2:], {name: each.detach().clone() for name, each in module.named_parameters()}


def go_on(disk: Path, path: Path) -> list[tuple[list[float], dict[str, Tensor]]]:
    whole = fit_two_epochs(disk, None, SavesAfterOneEpoch(path))
    return [whole, fit_two_epochs(disk, path)]


def test_a_resumed_run_learns_what_the_whole_one_learns_with_the_same_random_numbers(
    disk: Path, tmp_path: Path
) -> None:
    """Losses are those of the halves of the last batch."""
    for (losses, weights), (again, resumed) in run_ranks(go_on, 2, disk, tmp_path / "one.ckpt"):
        assert again == losses
        assert all(torch.equal(resumed[name], value) for name, value in weights.items())


# -- the least memory -------------------------------------------------------------------------------------------------


class Begins(L.Callback):
    began = False

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.began = True


def least_pages(how: Run, disk: Path, first: int, last: int) -> int:
    """The least pages of device memory, with everything on disk, that are not refused at the start; trains with them."""
    for pages in range(first, last + 1):
        begins = Begins()
        memory = {"device_memory": pages << 16, "host_memory": "64MiB"}
        homes = {"offload_parameters": "disk", "offload_optimizer": "disk"}
        try:
            train(dataclasses.replace(how, settings={**how.settings, **memory, **homes}), disk, begins)
        except CapacityError:
            assert not begins.began
        else:
            return pages
    raise AssertionError("all are refused")


def test_the_least_device_memory_that_is_accepted_suffices(disk: Path) -> None:
    """Two blocks are in use at once, one by each half: that is planned for."""
    how = Run("gpt", 2, 2, steps=2, sizes={"width": 64, "layers": 3}, settings={**HALVES, "recompute": "all"})
    assert run_ranks(least_pages, 2, how, disk, 19, 20) == [20, 20]


# -- what is computed, logged and drawn -------------------------------------------------------------------------------


class Logging(PreciseGPT):
    """Logs its loss; drops out in and between divided layers."""

    def __init__(self, rate: float) -> None:
        super().__init__(dropout=rate)
        self.rows: list[tuple[str, int]] = []
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:  # type: ignore[override]
        self.rows.append(("train", len(batch)))
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("rows", float(len(batch)), reduce_fx="sum", on_step=True, on_epoch=False)
        self.log("last", batch[-1, 0].double(), reduce_fx=max, on_step=True, on_epoch=False)
        return {"loss": loss, "first": batch[:, 0], "of half": loss.detach()}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.rows.append(("validate", len(batch)))
        self.log("val_loss", self.loss(batch))

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        assert torch.equal(outputs["first"], batch[:, 0])
        assert float(outputs["loss"]) == float(outputs["of half"])
        found = self.trainer.callback_metrics
        self.steps.append({name: float(found[name]) for name in ("loss_step", "rows", "last")})


def log(disk: Path, rate: float, settings: dict[str, Any], rows: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = Logging(rate)
    strategy = AngelPTMStrategy(
        page_size="64KiB", tensor_parallel_size=2, tensor_parallel=TensorParallel(overlap="two_batches"), **settings
    )
    data = torch.randint(3, VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(5))
    loader: DataLoader[Any] = DataLoader(data, rows)  # type: ignore[arg-type]
    trainer = quiet_trainer(
        strategy, devices=2, precision="64-true", max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0
    )
    trainer.fit(module, loader, DataLoader(data, rows))  # type: ignore[arg-type]
    weights = {name: each.detach().clone() for name, each in module.named_parameters()}
    return module.rows, module.steps, float(trainer.callback_metrics["loss_epoch"]), weights, torch.get_rng_state()


def test_logging_and_results_are_those_of_the_whole_batch(disk: Path) -> None:
    data = torch.randint(3, VOCABULARY, (12, LENGTH), generator=torch.Generator().manual_seed(5))
    for seen, steps, of_epoch, *_ in run_ranks(log, 2, disk, 0.0, {}, 5):
        assert seen[:6] == [("train", each) for each in (3, 2, 3, 2, 1, 1)]
        assert seen[6:] == [("validate", each) for each in (5, 5, 2)]
        assert [each["rows"] for each in steps] == [5, 5, 2]
        assert [each["last"] for each in steps] == [
            max(float(data[at, 0]) for at in pair) for pair in ((2, 4), (7, 9), (10, 11))
        ]
        weighted = sum(each["loss_step"] * size for each, size in zip(steps, (5, 5, 2), strict=True)) / 12
        assert of_epoch == pytest.approx(weighted, rel=1e-6)


def test_halves_draw_random_numbers_of_their_own_which_recomputing_repeats(disk: Path) -> None:
    kept = run_ranks(log, 2, disk, 0.3, {}, 4)
    recomputed = run_ranks(log, 2, disk, 0.3, {"recompute": "all"}, 4)
    whole, other = run_ranks(log, 2, disk, 0.0, {}, 4)
    assert torch.equal(kept[0][4], kept[1][4]) and torch.equal(kept[0][4], recomputed[0][4])
    for one, again in zip(kept, recomputed, strict=True):
        assert one[1] == again[1]
        assert all(torch.equal(one[3][name], value) for name, value in again[3].items())
    assert kept[0][1] != whole[1]
    assert whole[1] == other[1]


class Twins(PreciseGPT):
    """Both halves of its batch have the same rows; notes what each of them computes."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        vars(self).setdefault("losses", []).append(float(loss))
        return loss


def compute_twins(disk: Path) -> list[float]:
    torch.manual_seed(0)
    module = Twins(dropout=0.3)
    row = torch.arange(LENGTH).remainder(VOCABULARY).repeat(4, 1)
    strategy = AngelPTMStrategy(tensor_parallel_size=2, tensor_parallel={"overlap": "two_batches"})
    trainer = quiet_trainer(strategy, devices=2, precision="64-true", max_steps=1, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(row, 4))  # type: ignore[arg-type]
    losses: list[float] = vars(module)["losses"]
    return losses


def test_halves_do_not_draw_the_same_numbers(disk: Path) -> None:
    found = run_ranks(compute_twins, 2, disk)
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


# -- samples that meet ------------------------------------------------------------------------------------------------


class Meeting(PreciseGPT):
    """Has a loss of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def loss(self, batch: Tensor) -> Tensor:
        logits, targets = self(batch[:, :-1]), batch[:, 1:]
        if self.kind == "pairs":
            found = logits.mean((1, 2))
            return super().loss(batch) + (found[:, None] - found).square().mean() * 1e4
        if self.kind == "sum":
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)  # padded


def train_meeting(disk: Path, kind: str) -> tuple[str, list[str]]:
    import warnings

    torch.manual_seed(0)
    module = Meeting(kind)
    rows = torch.randint(3, VOCABULARY, (4, LENGTH), generator=torch.Generator().manual_seed(5))
    rows[0, 4:] = 0
    strategy = AngelPTMStrategy(tensor_parallel_size=2, tensor_parallel={"overlap": "two_batches"})
    trainer = quiet_trainer(strategy, devices=2, precision="64-true", max_steps=1, use_distributed_sampler=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer.fit(module, DataLoader(rows, 4))  # type: ignore[arg-type]
        except ConfigError as error:
            return str(error), []
    return "", [str(each.message) for each in caught if "two_batches" in str(each.message)]


@pytest.mark.parametrize("kind", ["pairs", "sum", "padded"])
def test_losses_that_are_no_means_over_samples_are_refused(kind: str, disk: Path) -> None:
    """But where halves have unequally many tokens, which is as with micro-batches, and gives a warning on the first rank."""
    first, second = run_ranks(train_meeting, 2, disk, kind)
    if kind == "padded":
        assert not first[0] and not second[0]
        told = [each for each in first[1] if "unequally many of what the loss is a mean over" in each]
        assert len(told) == 1
        return
    for refused, _ in (first, second):
        assert "would train something else than Meeting does with whole batches: the loss of a batch is" in refused
        assert "so the samples of a batch meet, the loss is a sum over samples, or" in refused


def train_padded(settings: dict[str, Any], tier: str, disk: Path) -> tuple[list[float], dict[str, Tensor]]:
    """Trains on batches of which one half, or none, has no tokens that count."""
    torch.manual_seed(0)
    module = Meeting("padded")
    rows = torch.randint(3, VOCABULARY, (16, LENGTH), generator=torch.Generator().manual_seed(5))
    rows[2:4, 1:] = rows[4:6, 1:] = 0
    strategy = strategy_with(**merged({"disk_path": str(disk), "page_size": "64KiB"}, PLACES[tier], settings))
    devices = settings.get("tensor_parallel_size", 1)
    trainer = quiet_trainer(strategy, devices=devices, precision="64-true", max_epochs=1, use_distributed_sampler=False)
    seen = SeesLosses()
    trainer.callbacks.append(seen)  # type: ignore[attr-defined]
    trainer.fit(module, DataLoader(rows, 4))  # type: ignore[arg-type]
    return seen.losses, {name: each.detach().clone() for name, each in module.named_parameters()}


class SeesLosses(L.Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))


@pytest.mark.parametrize("tier", ["ram", "three_tiers"])
def test_a_half_trains_alone_where_nothing_of_the_other_one_counts(tier: str, disk: Path) -> None:
    ((losses, weights),) = run_ranks(train_padded, 1, {}, tier, disk)
    for seen, found in run_ranks(train_padded, 2, {"tensor_parallel_size": 2, **HALVES}, tier, disk):
        assert seen == pytest.approx(losses, abs=1e-12)
        for name, value in weights.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9, msg=name)


def test_cpus_of_one_machine_are_warned_that_halves_do_not_pay(disk: Path) -> None:
    first, _ = run_ranks(train_meeting, 2, disk, "padded")
    assert sum("does not pay here: tensor ranks on the CPUs of one machine" in each for each in first[1]) == 1


# -- what passes meanwhile --------------------------------------------------------------------------------------------


def count_meetings(how: Run, disk: Path) -> tuple[int, int, int]:
    """Exchanges that were started, those that were waited for at once, and gatherings of the group before them; without the
    check of batches."""
    from lightning_ptm.runtime.ranks.barriers import Barriers
    from lightning_ptm.trainer.two_batch_steps import TwoBatchSteps

    counts = {"start": 0, "issue": 0, "meet": 0}

    def counted(owner: type, method: str, name: str) -> None:
        original = getattr(owner, method)

        def call(*args: Any, **named: Any) -> Any:
            counts[name] += 1
            return original(*args, **named)

        setattr(owner, method, call)

    kept = ProcessGroupCommunicator.start, ProcessGroupCommunicator.issue, Barriers.meet_group
    check = TwoBatchSteps.batch_starts
    TwoBatchSteps.batch_starts = lambda *args: None  # type: ignore[method-assign, assignment]
    counted(ProcessGroupCommunicator, "start", "start")
    counted(ProcessGroupCommunicator, "issue", "issue")
    counted(Barriers, "meet_group", "meet")
    try:
        train(how, disk)
    finally:
        ProcessGroupCommunicator.start, ProcessGroupCommunicator.issue, Barriers.meet_group = kept  # type: ignore[method-assign]
        TwoBatchSteps.batch_starts = check  # type: ignore[method-assign]
    return counts["start"], counts["issue"], counts["meet"]


def test_all_sums_of_blocks_are_started_and_recomputing_repeats_none(disk: Path) -> None:
    how = Run("gpt", 2, 2, steps=3, settings={**HALVES, "recompute": "all"})
    found = run_ranks(count_meetings, 2, how, disk)
    assert found[0] == found[1]
    started, at_once, met = found[0]
    layers, halves = 2, 2
    # Of each half: two sums of a block each way, and those of the embedding and of the gradient of the head's input.
    assert started == how.steps * halves * (4 * layers + 2)
    # The loss of divided logits, and once the check of a block.
    assert at_once < started // 2 + 8
    assert met <= 3 * started
