"""Several runs of one module, evaluation within and between them, and weights read and edited by hand."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from kit.outcomes import Outcome
from kit.plain_loop import PlainLoop, make_trainer, outcome_of, tokens
from kit.stacks import VOCABULARY, WIDTH, Stack
from torch import Tensor, nn

from lightning_ptm import UsageError
from lightning_ptm.runtime.machine import machine
from lightning_ptm.runtime.machine.heap import Freed

BATCHES = tokens(6)
UNSEEN = tokens(3, seed=2)


class Evaluated(Stack):
    """Records the loss of every evaluation batch."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[Tensor] = []

    def validation_step(self, batch: Tensor, index: int) -> None:
        loss = self.loss(batch, index)
        assert loss is not None
        self.evaluated.append(loss.clone())

    def test_step(self, batch: Tensor, index: int) -> None:
        self.validation_step(batch, index)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self.head(self.norm(self.middle(self.embedding(batch), index)))  # type: ignore[no-any-return]


def make() -> Evaluated:
    torch.manual_seed(0)
    return Evaluated()


def with_weights(weights: dict[str, Tensor]) -> Evaluated:
    module = make()
    module.load_state_dict(weights)
    return module


@torch.no_grad()
def plainly_evaluated(weights: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses and predictions of a bf16 copy of the weights."""
    module = with_weights(weights).eval()
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        for index, batch in enumerate(UNSEEN.items):
            module.validation_step(batch, index)
        predictions = [module.predict_step(batch, index) for index, batch in enumerate(UNSEEN.items)]
    return module.evaluated, predictions


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_fit_twice(strategy_at, tier) -> None:
    module = make()
    make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    first = outcome_of(module)
    first.assert_equal(PlainLoop(Evaluated).run(BATCHES))
    module.losses = []
    make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    outcome_of(module).assert_equal(PlainLoop(lambda: with_weights(first.weights)).run(BATCHES))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_the_same_trainer_goes_on(strategy_at, tier) -> None:
    """`max_epochs` raised between two calls of fit: the second starts with a new optimizer, as in Lightning."""
    module = make()
    trainer = make_trainer(strategy_at(tier))
    trainer.fit(module, BATCHES.loader())
    first = outcome_of(module)
    module.losses = []
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, BATCHES.loader())
    outcome_of(module).assert_equal(PlainLoop(lambda: with_weights(first.weights)).run(BATCHES))


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_every_kind_of_run_in_turn(strategy_at, tier) -> None:
    """validate, fit, test, predict and validate again; evaluation changes no weight, and each run sees the last one's."""
    module = make()
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    trainer = make_trainer(strategy_at(tier))
    trainer.validate(module, UNSEEN.loader(), verbose=False)
    assert same(module.evaluated, plainly_evaluated(start)[0])
    for name, parameter in module.named_parameters():
        assert parameter.dtype is torch.float32 and torch.equal(parameter, start[name]), name
    trainer.fit(module, BATCHES.loader())
    trained = outcome_of(module)
    trained.assert_equal(PlainLoop(Evaluated).run(BATCHES))
    assert all(parameter.dtype is torch.float32 for parameter in module.parameters())
    losses, predictions = plainly_evaluated(trained.weights)
    for run in (trainer.test, trainer.validate):
        module.evaluated = []
        run(module, UNSEEN.loader(), verbose=False)
        assert same(module.evaluated, losses)
    assert same(trainer.predict(module, UNSEEN.loader()), predictions)  # type: ignore[arg-type]
    outcome_of(module).assert_equal(trained)


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_weights_are_ordinary_after_fit(strategy_at, tier) -> None:
    """Weights after fit can be trained on, copied, pickled and moved by plain torch."""
    module = make()
    make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in module.parameters())
    storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert len(storages) == len(list(module.parameters())), "parameters share storage"
    twin = copy.deepcopy(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    loss = module.loss(BATCHES.items[0], 0)
    assert loss is not None
    loss.backward()
    optimizer.step()
    assert not torch.equal(module.head.weight, twin.head.weight)


@pytest.mark.slow_unless("all_on_disk-2", "lock_free_three_tiers-1")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_evaluation_in_the_middle_of_an_epoch(strategy_at, tier, accumulate) -> None:
    """Training goes on as if nothing had been, also within an accumulation."""
    module = make()
    trainer = make_trainer(strategy_at(tier), val_check_interval=3, accumulate_grad_batches=accumulate)
    trainer.fit(module, BATCHES.loader(), UNSEEN.loader())
    ours = outcome_of(module)
    ours.assert_equal(PlainLoop(Evaluated, accumulate=accumulate).run(BATCHES))
    assert len(module.evaluated) == 2 * len(UNSEEN)
    assert same(module.evaluated[len(UNSEEN) :], plainly_evaluated(ours.weights)[0])


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_sanity_check_before_training(strategy_at, tier) -> None:
    module = make()
    make_trainer(strategy_at(tier), num_sanity_val_steps=2).fit(module, BATCHES.loader(), UNSEEN.loader())
    outcome_of(module).assert_equal(PlainLoop(Evaluated).run(BATCHES))


class Editing(L.Callback):
    """Calls `act` in the hook named, once `steps` batches are done."""

    def __init__(self, hook: str, act: Callable[[Any, Evaluated], None], steps: int = 3) -> None:
        self._act = act
        self._steps = steps
        setattr(self, hook, self._called)

    def _called(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        if len(module.losses) == self._steps:
            self._act(trainer.strategy, module)


def edited_plainly(step: int, masters: dict[str, Tensor]) -> None:
    if step == 3:
        masters["blocks.1.up.weight"].mul_(0.5)
        masters["head.bias"].add_(1.0)


def edit(strategy: Any, module: Evaluated) -> None:
    with strategy.gathered(module.blocks[1], module.head):
        assert module.blocks[1].up.weight.dtype is torch.float32
        assert module.blocks[1].up.weight.shape == (4 * WIDTH, WIDTH)
        with torch.no_grad():
            module.blocks[1].up.weight.mul_(0.5)
            module.head.bias.add_(1.0)


def replace(strategy: Any, module: Evaluated) -> None:
    """The edit by assignment to `.data`."""
    with strategy.gathered():
        module.blocks[1].up.weight.data = module.blocks[1].up.weight.data * 0.5
        module.head.bias.data = module.head.bias.data + 1.0


@pytest.mark.slow_unless("all_on_disk-all-edit", "lock_free_three_tiers-none-replace")
@pytest.mark.parametrize("act", [edit, replace])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_an_edit_counts_in_the_next_step(strategy_at, tier, act, recompute) -> None:
    module = make()
    callbacks = [Editing("on_train_batch_end", act)]
    make_trainer(strategy_at(tier, recompute=recompute), callbacks=callbacks).fit(module, BATCHES.loader())
    ours = outcome_of(module)
    ours.assert_equal(PlainLoop(Evaluated, on_step=edited_plainly).run(BATCHES))
    with pytest.raises(AssertionError):
        ours.assert_equal(PlainLoop(Evaluated).run(BATCHES))


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_gathered_parameters_are_masters_and_reading_changes_nothing(strategy_at, tier) -> None:
    seen: dict[str, Tensor] = {}

    def read(strategy: Any, module: Evaluated) -> None:
        with strategy.gathered(write=False):
            seen.update({name: parameter.detach().clone() for name, parameter in module.named_parameters()})

    module = make()
    make_trainer(strategy_at(tier), callbacks=[Editing("on_train_batch_end", read)]).fit(module, BATCHES.loader())
    outcome_of(module).assert_equal(PlainLoop(Evaluated).run(BATCHES))
    masters: dict[str, Tensor] = {}

    def remember(step: int, values: dict[str, Tensor]) -> None:
        if step == 3:
            masters.update({name: value.detach().clone() for name, value in values.items()})

    PlainLoop(Evaluated, on_step=remember).run(BATCHES)
    Outcome([], seen).assert_equal(Outcome([], masters))


class ReadsInTheStep(Evaluated):
    """Gathers in the middle of training_step, while the root is in use."""

    def middle(self, x: Tensor, index: int) -> Tensor:
        if self.training:
            with torch.no_grad(), self.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
                self.sizes = [float(parameter.norm()) for parameter in self.parameters()]
        return super().middle(x, index)


@pytest.mark.slow_unless("all_on_disk", "lock_free_three_tiers")
def test_gathered_parameters_inside_the_step(strategy_at, tier) -> None:
    torch.manual_seed(0)
    module = ReadsInTheStep()
    make_trainer(strategy_at(tier)).fit(module, BATCHES.loader())
    assert torch.isfinite(torch.tensor(module.sizes)).all()
    outcome_of(module).assert_equal(PlainLoop(Evaluated).run(BATCHES))


class Speaking(L.Callback):
    """Uses the model outside of any step, as one that shows samples does."""

    def __init__(self) -> None:
        self.said: list[Tensor] = []

    @torch.no_grad()
    def _speak(self, module: Evaluated) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            self.said.append(module.predict_step(UNSEEN.items[0], 0))

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *args: Any) -> None:
        self._speak(module)

    def on_train_epoch_end(self, trainer: L.Trainer, module: Any) -> None:
        self._speak(module)


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_a_callback_that_runs_the_model_between_steps(strategy_at, tier) -> None:
    module = make()
    speaking = Speaking()
    make_trainer(strategy_at(tier), callbacks=[speaking]).fit(module, BATCHES.loader())
    ours = outcome_of(module)
    ours.assert_equal(PlainLoop(Evaluated).run(BATCHES))
    assert all(torch.isfinite(said).all() for said in speaking.said)
    assert torch.equal(speaking.said[-1], plainly_evaluated(ours.weights)[1][0])


def test_released_parameters_refuse(strategy_at) -> None:
    """Outside its unit a released parameter cannot be read or written; its shape stays."""
    found: list[nn.Parameter] = []

    def look(strategy: Any, module: Evaluated) -> None:
        weight = module.blocks[2].up.weight
        found.append(weight)
        assert weight.shape == (4 * WIDTH, WIDTH)
        with pytest.raises(
            UsageError, match=r"blocks.2.up.weight was read or written .* in pages and not gathered; .*gathered"
        ):
            weight.isnan()
        with torch.no_grad(), pytest.raises(UsageError, match=r"blocks.2.up.weight was read or written"):
            weight.mul_(0.5)

    module = make()
    callbacks = [Editing("on_train_start", look, 0)]
    make_trainer(strategy_at("all_on_disk"), callbacks=callbacks).fit(module, BATCHES.loader())
    assert found[0] is module.blocks[2].up.weight, "identity stays"
    outcome_of(module).assert_equal(PlainLoop(Evaluated).run(BATCHES))


@pytest.mark.parametrize("tier", ["all_on_disk", "three_tiers"])
def test_zeroing_a_released_parameter_is_an_error(strategy_at, tier) -> None:
    def zero(strategy: Any, module: Evaluated) -> None:
        nn.init.zeros_(module.blocks[2].up.weight)

    callbacks = [Editing("on_train_start", zero, 0)]
    with pytest.raises(UsageError, match=r"blocks.2.up.weight was read or written .* trainer.strategy.gathered"):
        make_trainer(strategy_at(tier), callbacks=callbacks).fit(make(), BATCHES.loader())


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps])
@pytest.mark.parametrize("tier", ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free"])
def test_a_copy_of_what_is_in_pages_alone_is_refused(strategy_at, tier, copies) -> None:
    def act(strategy: Any, module: Evaluated) -> None:
        copies([module.blocks[2].up.weight])

    module = make()
    with pytest.raises(UsageError, match="cannot be copied or pickled while a run is in progress"):
        make_trainer(strategy_at(tier), callbacks=[Editing("on_train_start", act, 0)]).fit(module, BATCHES.loader())
    copies(module.blocks[2])


@pytest.mark.parametrize("tier", ["all_on_disk", "three_tiers"])
def test_a_trace_of_released_weights_is_refused(strategy_at, tier) -> None:
    def act(strategy: Any, module: Evaluated) -> None:
        torch.jit.trace(module.blocks[2], torch.zeros(2, WIDTH))

    with pytest.raises(UsageError, match=r"blocks.2 is traced .* log_graph"):
        make_trainer(strategy_at(tier), callbacks=[Editing("on_train_start", act, 0)]).fit(make(), BATCHES.loader())


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_an_error_before_the_pages_is_not_hidden(strategy_at, tier) -> None:
    class Broken(Evaluated):
        def setup(self, stage: str) -> None:
            self.register_buffer("shadow", torch.empty(3, device="meta"))
            raise RuntimeError("the user's own")

    with pytest.raises(RuntimeError, match="the user's own"):
        make_trainer(strategy_at(tier)).fit(Broken(), BATCHES.loader())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_no_run_no_engine(strategy_at, tier) -> None:
    strategy = strategy_at(tier)
    module = make()
    make_trainer(strategy).fit(module, BATCHES.loader())
    with pytest.raises(UsageError, match="needs a run in progress"):
        _ = strategy.engine
    with strategy.gathered(module):  # the parameters are whole anyway
        assert torch.isfinite(module.head.weight).all() and module.head.out_features == VOCABULARY
    assert not [thread for thread in threading.enumerate() if "lightning_ptm" in thread.name]


class _Kept(L.Callback):
    """Records the run's policy for freed memory."""

    freed: Freed | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.freed = trainer.strategy.engine.blueprint.freed_memory  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("tier", "precision", "freed", "kept"),
    [
        ("ram", "32-true", "auto", Freed.SMALL_STAYS),
        ("ram", "bf16-mixed", "auto", Freed.STAYS),
        ("ram", "bf16-true", "auto", Freed.SMALL_STAYS),
        ("ram", "32-true", "keep", Freed.STAYS),
        ("ram", "bf16-mixed", "return", Freed.LEAVES),
        ("masters_on_disk", "32-true", "auto", Freed.STAYS),
        ("masters_on_disk", "bf16-mixed", "return", Freed.LEAVES),
    ],
)
def test_freed_memory_is_kept_where_there_is_enough(strategy_at, tier, precision, freed, kept) -> None:
    seen = _Kept()
    make_trainer(strategy_at(tier, tuning={"freed_memory": freed}), precision=precision, callbacks=[seen]).fit(
        make(), BATCHES.loader()
    )
    assert seen.freed is kept


@pytest.mark.parametrize(
    ("tier", "freed", "kept"), [("masters_on_disk", "auto", Freed.LEAVES), ("masters_on_disk", "keep", Freed.STAYS)]
)
def test_freed_memory_goes_back_where_ram_is_short(strategy_at, monkeypatch, tier, freed, kept) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 8 << 20)
    seen = _Kept()
    strategy = strategy_at(tier, tuning={"freed_memory": freed}, host_memory="64MiB")
    make_trainer(strategy, callbacks=[seen]).fit(make(), BATCHES.loader())
    assert seen.freed is kept
