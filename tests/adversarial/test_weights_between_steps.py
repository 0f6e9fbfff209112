"""Weights that are read between steps without asking the strategy: `state_dict()` tells what a plain Trainer's would, at
every hook and wherever weights are at home; any other read or write is right or an error, never an old or a rounded number.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Block
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from lightning_ptm import CapacityError, UsageError
from lightning_ptm.runtime.full_params import gathered_parameters

TIERS = ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "lock_free_three_tiers"]
CLOSED = [
    ("ram", "bf16-mixed"),
    ("masters_on_disk", "32-true"),
    ("all_on_disk", "32-true"),
    ("three_tiers", "32-true"),
    ("lock_free", "32-true"),
    ("lock_free_three_tiers", "bf16-mixed"),
]
"""Where nobody may read weights between steps without asking. (RAM under 32-true is not among them.)"""

State = dict[str, Tensor]


class Net(L.LightningModule):
    """Blocks between weights of the root. `looks` are called at the hooks of their names."""

    def __init__(self, **looks: Callable[[Net], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(48, 48)
        self.blocks = nn.ModuleList(Block(48) for _ in range(3))
        self.norm = nn.BatchNorm1d(48)
        self.scale = nn.Parameter(torch.ones(48))
        self.first.weight.tag = "mine"  # type: ignore[attr-defined]
        self.looks = looks

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) * self.scale

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self._look("training_step")
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("loss", self(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)

    def _look(self, hook: str) -> None:
        if hook in self.looks:
            self.looks[hook](self)

    def on_train_start(self) -> None:
        self._look("on_train_start")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self._look("on_before_zero_grad")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._look("on_before_optimizer_step")

    def on_train_batch_end(self, *args: Any) -> None:
        self._look("on_train_batch_end")

    def on_validation_epoch_end(self) -> None:
        self._look("on_validation_epoch_end")

    def on_train_epoch_end(self) -> None:
        self._look("on_train_epoch_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._look("on_save_checkpoint")

    def on_train_end(self) -> None:
        self._look("on_train_end")

    def on_fit_end(self) -> None:
        self._look("on_fit_end")


def batches(count: int = 3) -> DataLoader[Any]:
    rows = torch.randn(4 * count, 48, generator=torch.Generator().manual_seed(1))
    return DataLoader(rows, batch_size=4)  # type: ignore[arg-type]


def trainer_with(strategy: Any, precision: Any = "32-true", **options: Any) -> L.Trainer:
    return quiet_trainer(strategy, precision=precision, **{"num_sanity_val_steps": 0, "max_epochs": 1, **options})


def cloned(state: Any) -> State:
    return {name: value.detach().clone() for name, value in state.items()}


def kept_open(module: nn.Module) -> bool:
    """Whether nothing of ours is left on the module."""
    wrapped = [each for each in module.modules() if "state_dict" in vars(each)]
    return not wrapped and all(type(parameter) is nn.Parameter for parameter in module.parameters())


def assert_same(ours: State, theirs: State) -> None:
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype is value.dtype and torch.equal(ours[name], value), name


# -- state_dict at every hook ------------------------------------------------------------------------------------------

HOOKS = [
    "on_train_start",
    "on_train_batch_end",
    "on_before_optimizer_step",
    "on_validation_epoch_end",
    "on_train_epoch_end",
    "on_save_checkpoint",
    "on_train_end",
    "on_fit_end",
]


def _noted(strategy: Any) -> list[tuple[str, State]]:
    """Returns `state_dict()` at every hook of a training with an evaluation and a checkpoint in it."""
    notes: list[tuple[str, State]] = []

    def note(hook: str, module: Net) -> None:
        notes.append((hook, cloned(module.state_dict())))

    module = Net(**{hook: partial(note, hook) for hook in HOOKS})
    trainer_with(strategy, callbacks=[_Saving()], val_check_interval=2).fit(module, batches(), batches(1))
    notes.append(("afterwards", cloned(module.state_dict())))
    return notes


class _Saving(L.Callback):
    """Makes the checkpoint of the second step."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if index == 1:
            trainer._checkpoint_connector.dump_checkpoint()


@lru_cache(maxsize=1)
def _noted_plainly() -> list[tuple[str, State]]:
    return _noted("auto")


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_state_dict_is_true_at_every_hook(strategy_at: Any, tier: str) -> None:
    ours, theirs = _noted(strategy_at(tier)), _noted_plainly()
    assert [hook for hook, _ in ours] == [hook for hook, _ in theirs]
    for (_, mine), (_, plain) in zip(ours, theirs, strict=True):
        assert_same(mine, plain)
    assert ours[0][1]["first.weight"].dtype is torch.float32


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_a_state_dict_is_precise_under_mixed_precision(strategy_at: Any, tier: str) -> None:
    """fp32 masters, as `gathered` shows them, and what the run leaves at its end."""
    seen: list[State] = []

    def look(module: Net) -> None:
        seen.append(cloned(module.state_dict()))
        with module.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
            seen.append(cloned(dict(module.named_parameters())))

    module = Net(on_train_batch_end=look, on_train_end=look)
    trainer_with(strategy_at(tier), "bf16-mixed").fit(module, batches())
    for state, whole in zip(seen[::2], seen[1::2], strict=True):
        assert_same({name: state[name] for name in whole}, whole)
    assert_same(seen[-2], cloned(module.state_dict()))
    assert not torch.equal(seen[0]["first.weight"], seen[0]["first.weight"].bfloat16().float())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_a_state_dict_keeps_its_values_when_training_goes_on(strategy_at: Any, tier: str) -> None:
    kept: list[Any] = []
    trainer_with(strategy_at(tier)).fit(
        Net(on_train_batch_end=lambda module: kept.append((module.state_dict(), cloned(module.state_dict())))),
        batches(2),
    )
    theirs: list[Any] = []
    trainer_with("auto").fit(Net(on_train_batch_end=lambda m: theirs.append(cloned(m.state_dict()))), batches(2))
    for (_, ours), plain in zip(kept, theirs, strict=True):
        assert_same(ours, plain)
    if tier != "ram":  # there, as with a plain Trainer, it is the parameters themselves
        assert_same(
            {name: value for name, value in kept[0][0].items() if "norm" not in name},
            {name: value for name, value in theirs[0].items() if "norm" not in name},
        )


class Halved(Net):
    """Module whose state dict is changed by its own hooks, and by a method of one of its parts."""

    def __init__(self, **looks: Any) -> None:
        super().__init__(**looks)
        self.blocks[1]._register_state_dict_hook(self._halve)
        inherited = self.first.state_dict
        self.first.__class__ = _Renaming
        assert inherited() is not None

    @staticmethod
    def _halve(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        for name in list(state):
            if name.startswith(prefix):
                state[name] = state[name].half()


class _Renaming(nn.Linear):
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", "")
        state[f"{prefix}total"] = state[f"{prefix}weight"].detach().sum()
        return state

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        state.pop(f"{prefix}total", None)
        super()._load_from_state_dict(state, prefix, *args)


def _halved(make: Callable[[], Any], path: Any) -> tuple[State, State, State]:
    """Inside the run, in its checkpoint, and after a training that goes on from that."""
    inside: list[State] = []

    def look(module: Net) -> None:
        inside.append(cloned(module.state_dict()))
        module.trainer.save_checkpoint(path)

    trainer_with(make()).fit(Halved(on_train_end=look), batches())
    later = Halved()
    trainer_with(make(), max_epochs=2).fit(later, batches(), ckpt_path=path, weights_only=True)
    return inside[0], cloned(torch.load(path)["state_dict"]), cloned(later.state_dict())


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_hooks_on_state_dicts_see_true_values(strategy_at: Any, tier: str, tmp_path: Any) -> None:
    ours = _halved(lambda: strategy_at(tier), tmp_path / "ours.ckpt")
    theirs = _halved(lambda: "auto", tmp_path / "plain.ckpt")
    for mine, plain in zip(ours, theirs, strict=True):
        assert_same(mine, plain)


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_parts_of_a_module_have_state_dicts(strategy_at: Any, tier: str) -> None:
    def look(module: Net) -> None:
        block = module.blocks[1]
        whole = cloned(module.state_dict())
        own = block.up.state_dict(prefix="a.")
        assert_same(cloned(own), {f"a.{name}": whole[f"blocks.1.up.{name}"] for name in ("weight", "bias")})
        given: dict[str, Any] = {}
        block.state_dict(destination=given, prefix="b.")
        assert_same(cloned(given), {f"b.{n[9:]}": v for n, v in whole.items() if n.startswith("blocks.1.")})
        assert block.state_dict(keep_vars=True)["up.weight"] is block.up.weight
        buffer = io.BytesIO()
        torch.save(module.state_dict(), buffer)
        buffer.seek(0)
        assert_same(torch.load(buffer), whole)
        looked.append(whole)

    looked: list[State] = []
    module = Net(on_train_batch_end=look)
    trainer_with(strategy_at(tier)).fit(module, batches(2))
    assert len(looked) == 2 and kept_open(module)


def test_a_state_dict_that_does_not_fit_is_an_error(strategy_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(module: Net) -> None:
        monkeypatch.setattr(gathered_parameters, "free_host_bytes", lambda: 100_000)
        assert len(module.blocks[0].state_dict()) == 4
        with pytest.raises(
            CapacityError, match=r"the full weights of Net take .* of RAM .* gather one block at a time"
        ):
            module.state_dict()
        monkeypatch.undo()

    trainer_with(strategy_at("all_on_disk")).fit(Net(on_train_batch_end=look), batches())


class Tied(Net):
    def __init__(self, **looks: Any) -> None:
        super().__init__(**looks)
        self.blocks[0].up.weight.requires_grad_(False)
        self.last = nn.Linear(48, 48, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(super().forward(x))


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_tied_and_frozen_weights_in_a_state_dict(strategy_at: Any, tier: str, precision: str) -> None:
    before = cloned(Tied().state_dict())
    found: list[bool] = []

    def look(module: Tied) -> None:
        state = module.state_dict()
        assert state["last.weight"].data_ptr() == state["first.weight"].data_ptr()
        assert torch.equal(state["blocks.0.up.weight"], before["blocks.0.up.weight"])
        found.append(state["blocks.0.up.weight"].dtype is torch.float32)

    trainer_with(strategy_at(tier), precision).fit(Tied(on_train_batch_end=look), batches(2))
    assert found == [True, True]


# -- reads and writes without asking -----------------------------------------------------------------------------------

TOUCHES: dict[str, Callable[[nn.Parameter], object]] = {
    "clone": lambda p: p.detach().clone(),
    "data": lambda p: p.data.norm(),
    "norm": lambda p: p.norm(),
    "norms": lambda p: torch._foreach_norm([p]),
    "total": lambda p: nn.utils.get_total_norm([p]),
    "histogram": lambda p: torch.histc(p, 10),
    "item": lambda p: p[0, 0].item(),
    "number": lambda p: float(p.sum()),
    "average": lambda p: torch.zeros(48, 48).mul_(0.9).add_(p, alpha=0.1),
    "lerp": lambda p: torch.zeros(48, 48).lerp_(p, 0.1),
    "sum": lambda p: torch.zeros(48, 48) + p,
    "copy": lambda p: torch.zeros(48, 48).copy_(p),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "numpy": lambda p: p.detach().cpu().numpy(),
    "list": lambda p: p.tolist(),
    "rows": lambda p: list(p),
    "transposed": lambda p: p.T,
    "compared": lambda p: torch.equal(p, p),
    "operator": lambda p: torch.ops.aten.sum(p),
    "product": lambda p: torch.ones(2, 48) @ p,
    "linear": lambda p: nn.functional.linear(torch.ones(2, 48), p),
    "cast": lambda p: p.to(torch.float64),
    "storage": lambda p: p.untyped_storage(),
    "zeroed": nn.init.zeros_,
    "scaled": lambda p: torch.no_grad()(p.mul_)(0.5),
    "assigned": lambda p: setattr(p, "data", torch.zeros(48, 48)),
    "through data": lambda p: p.data.zero_(),
}


@pytest.mark.parametrize(("home", "precision"), CLOSED)
def test_weights_that_are_touched_between_steps_are_an_error(strategy_at: Any, home: str, precision: str) -> None:
    """Touching weights between steps raises, and the training has the plain numbers nevertheless."""
    tried: list[str] = []

    def touch(module: Net) -> None:
        for weight, name in ((module.first.weight, "first.weight"), (module.blocks[1].up.weight, "blocks.1.up.weight")):
            for kind, act in TOUCHES.items():
                with pytest.raises(UsageError, match=f"{name} was read or written") as caught:
                    act(weight)
                assert "gathered(module)" in str(caught.value) and "state_dict()" in str(caught.value), kind
            tried.append(name)

    looks = dict.fromkeys(("on_train_start", "on_before_zero_grad", "on_train_batch_end", "on_train_end"), touch)
    module = Net(**looks)
    trainer_with(strategy_at(home), precision).fit(module, batches())
    untouched = Net()
    trainer_with(strategy_at(home), precision).fit(untouched, batches())
    assert_same(cloned(module.state_dict()), cloned(untouched.state_dict()))
    assert len(tried) == 2 * (1 + 3 + 3 + 1) and kept_open(module)


@pytest.mark.parametrize(("home", "precision"), CLOSED)
def test_facts_about_a_weight_are_no_reads(strategy_at: Any, home: str, precision: str) -> None:
    asked: list[int] = []

    def ask(module: Net) -> None:
        first = module.first.weight
        assert isinstance(first, nn.Parameter) and first.tag == "mine" and first.is_leaf and first.requires_grad
        assert (
            first.shape == (48, 48) and first.numel() == 48 * 48 and len(first) == 48 and first.dim() == first.ndim == 2
        )
        assert first.device.type == "cpu" and first.is_floating_point() and not first.is_meta and first.grad_fn is None
        assert torch.zeros_like(first).eq(0).all() and first.new_ones(3).sum() == 3
        assert "cannot be read now" in repr(first) and "(48, 48)" in f"{first}" and "Linear" in repr(module)
        assert first in {first} and dict(module.named_parameters())["first.weight"] is first
        assert first.grad is None or first.grad.shape == (48, 48)
        first.register_hook(lambda gradient: None).remove()
        first.requires_grad_(True)
        assert L.pytorch.utilities.model_summary.summarize(module).trainable_parameters == sum(
            parameter.numel() for parameter in module.parameters()
        )
        torch.optim.SGD(module.parameters(), lr=0.1).zero_grad()
        asked.append(1)

    trainer_with(strategy_at(home), precision).fit(Net(on_train_batch_end=ask), batches())
    assert len(asked) == 3


def _averaged(strategy: Any, read: Callable[[Net], State]) -> State:
    """An exponential moving average that the user has written."""
    averages: State = {}

    @torch.no_grad()
    def average(module: Net) -> None:
        for name, value in read(module).items():
            averages.setdefault(name, torch.zeros_like(value)).lerp_(value, 0.1)

    trainer_with(strategy).fit(Net(on_train_batch_end=average), batches())
    return averages


def _by_parameters(module: Net) -> State:
    return dict(module.named_parameters())


def _by_state_dict(module: Net) -> State:
    return {name: value for name, value in module.state_dict().items() if "norm" not in name}


def test_an_average_that_a_callback_computes_in_ram_is_the_plain_one(strategy_at: Any) -> None:
    """Where all weights are in RAM and in no other place, they are ordinary parameters throughout."""
    types: set[type] = set()

    def read(module: Net) -> State:
        types.update(type(parameter) for parameter in module.parameters())
        assert kept_open(module)
        return _by_parameters(module)

    assert_same(_averaged(strategy_at("ram"), read), _averaged("auto", _by_parameters))
    assert types == {nn.Parameter}


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_an_average_that_a_callback_computes_of_state_dicts(strategy_at: Any, tier: str) -> None:
    assert_same(_averaged(strategy_at(tier), _by_state_dict), _averaged("auto", _by_state_dict))


@pytest.mark.parametrize(
    "home", ["masters_on_disk", "all_on_disk", "three_tiers", "lock_free", "lock_free_three_tiers"]
)
def test_an_average_that_a_callback_computes_elsewhere_is_an_error(strategy_at: Any, home: str) -> None:
    with pytest.raises(UsageError, match=r"was read or written outside of its module's forward"):
        _averaged(strategy_at(home), _by_parameters)


def test_what_lock_free_updates_lack_is_in_a_state_dict(strategy_at: Any) -> None:
    """All gradients so far, whatever compute lacks or forecasts."""
    audits: list[bool] = []

    def look(module: Net) -> None:
        strategy: Any = module.trainer.strategy
        state = cloned(module.state_dict())
        audits.append(all(flat.pending == 0 and flat.produced == flat.applied for flat in strategy.update_audit()))
        assert_same(state, cloned(module.state_dict()))
        with pytest.raises(UsageError):
            module.first.weight.sum()
        state = cloned(module.state_dict())
        with strategy.gathered(write=False):
            assert torch.equal(state["blocks.2.up.weight"], module.blocks[2].up.weight)

    trainer_with(strategy_at("lock_free", lock_free={"max_staleness": 4})).fit(Net(on_train_batch_end=look), batches(6))
    assert audits == [True] * 6


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_weights_in_an_evaluation(strategy_at: Any, tier: str, precision: str) -> None:
    """A state dict has the user's own tensors' values, bit for bit."""
    module = Net()
    before = cloned(module.state_dict())
    touched: list[bool] = []

    def look(module: Net) -> None:
        assert_same(cloned(module.state_dict()), before)
        try:
            touched.append(torch.equal(module.blocks[1].up.weight, before["blocks.1.up.weight"]))
        except UsageError:
            touched.append(True)

    module.looks = {"on_validation_epoch_end": look}
    trainer_with(strategy_at(tier), precision).validate(module, batches(1), verbose=False)
    assert touched == [True] and kept_open(module)


# -- forward passes and `gathered` between steps -------------------------------------------------------------------------


def _spoken(strategy: Any, *, inside: bool) -> tuple[list[Tensor], State]:
    """Returns the model's outputs between steps, in a block of `gathered` or outside of any."""
    said: list[Tensor] = []
    batch = torch.randn(4, 48, generator=torch.Generator().manual_seed(2))

    @torch.no_grad()
    def speak(module: Net) -> None:
        module.eval()
        if inside and strategy != "auto":
            with module.trainer.strategy.gathered():  # type: ignore[attr-defined]
                said.extend((module(batch), module.blocks[1](batch), module.first(batch)))
                module.blocks[1].up.bias.add_(0.5)
                said.append(module(batch))
        else:
            said.extend((module(batch), module.blocks[1](batch), module.first(batch)))
            if inside:
                module.blocks[1].up.bias.add_(0.5)
                said.append(module(batch))
        module.train()

    module = Net(on_train_batch_end=speak)
    trainer_with(strategy).fit(module, batches())
    return said, cloned(module.state_dict())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
@pytest.mark.parametrize("inside", [False, True])
def test_a_forward_between_steps(strategy_at: Any, tier: str, inside: bool) -> None:
    """Inside of `gathered` it computes with what is there, edits included, and the edits stay."""
    said, weights = _spoken(strategy_at(tier), inside=inside)
    plainly, theirs = _spoken("auto", inside=inside)
    assert all(torch.equal(mine, plain) for mine, plain in zip(said, plainly, strict=True))
    assert_same(weights, theirs)


@pytest.mark.parametrize(("home", "precision"), CLOSED)
def test_weights_are_closed_again_behind_a_forward(strategy_at: Any, home: str, precision: str) -> None:
    def look(module: Net) -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision != "32-true"):
            module(torch.ones(4, 48))
            module.first(torch.ones(4, 48))
            module.blocks[2].down(torch.ones(4, 96))
        for parameter in module.parameters():
            if precision == "32-true" or parameter.dtype is not torch.float32:
                with pytest.raises(UsageError):
                    parameter.sum()

    trainer_with(strategy_at(home), precision).fit(Net(on_train_batch_end=look), batches())


@pytest.mark.slow_unless("masters_on_disk", "lock_free", "tight_recomputed")
def test_gathered_inside_of_gathered(strategy_at: Any, tier: str) -> None:
    def look(module: Net) -> None:
        strategy: Any = module.trainer.strategy
        with torch.no_grad(), strategy.gathered():
            module.first.weight.fill_(1.0)
            with strategy.gathered(module.first, module.blocks[0], write=False):
                assert module.first.weight.eq(1).all()
            with strategy.gathered(module.first):
                module.first.weight[0] = 2.0
            assert module.state_dict()["first.weight"][0].eq(2).all()
            assert module.first.weight[1:].eq(1).all() and module.blocks[0].up.weight.isfinite().all()
        state = module.state_dict()["first.weight"]
        assert state[0].eq(2).all() and state[1:].eq(1).all()
        with strategy.gathered(module.first, write=False):
            with pytest.raises(UsageError, match="edits of the root would be lost"), strategy.gathered():
                pass
            assert module.first.weight[0].eq(2).all()

    trainer_with(strategy_at(tier)).fit(Net(on_train_batch_end=look), batches())


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_step_inside_of_gathered_is_an_error(strategy_at: Any, tier: str) -> None:
    def look(module: Net) -> None:
        with module.trainer.strategy.gathered(write=False):  # type: ignore[attr-defined]
            module.trainer.strategy.validation_step(torch.ones(4, 48), 0)

    with pytest.raises(UsageError, match=r"a step begins inside `with strategy.gathered"):
        trainer_with(strategy_at(tier)).fit(Net(on_train_batch_end=look), batches())


# -- inside of a step ------------------------------------------------------------------------------------------------------


class ByHand(Net):
    """Two optimizer steps in one training step, and a look at the weights behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.seen: list[State] = []

    def training_step(self, batch: Tensor, index: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for _ in range(2):
            optimizer.zero_grad()
            self.manual_backward(self(batch).square().mean())
            optimizer.step()
            self.seen.append(cloned(self.state_dict()))


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_a_state_dict_after_a_step_of_manual_optimization(strategy_at: Any, tier: str) -> None:
    modules = [ByHand(), ByHand()]
    for module, strategy in zip(modules, (strategy_at(tier), "auto"), strict=True):
        trainer_with(strategy).fit(module, batches())
    for mine, plain in zip(modules[0].seen, modules[1].seen, strict=True):
        assert_same(mine, plain)


# -- the end ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow_unless("ram", "three_tiers", "tight")
def test_weights_are_open_after_a_run_that_failed(strategy_at: Any, tier: str) -> None:
    def fail(module: Net) -> None:
        raise ValueError("of the user's")

    module = Net(on_before_zero_grad=fail)
    before = cloned(module.state_dict())
    with pytest.raises(ValueError, match="of the user's"):
        trainer_with(strategy_at(tier)).fit(module, batches())
    assert kept_open(module)
    parameters = {name for name, _ in module.named_parameters()}
    assert_same(
        {n: v for n, v in cloned(module.state_dict()).items() if n in parameters},
        {name: value for name, value in before.items() if name in parameters},
    )


# -- inference mode --------------------------------------------------------------------------------------------------------


@pytest.mark.slow_unless(
    "all_on_disk-on_train_batch_end",
    "lock_free_three_tiers-on_train_start",
    "lock_free_three_tiers-on_before_zero_grad",
)
@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_before_zero_grad"])
def test_inference_mode_between_steps(strategy_at: Any, tier: str, hook: str) -> None:
    """Pages that are fetched, versions that are adopted, edits and state dicts: none of it stays an inference tensor."""

    @torch.inference_mode()
    def look(module: Net) -> None:
        strategy: Any = module.trainer.strategy
        module.eval()
        module(torch.ones(4, 48))
        module.blocks[1](torch.ones(4, 48))
        module.state_dict()
        if hasattr(strategy, "gathered"):
            with strategy.gathered(module.blocks[2]):
                module.blocks[2].up.bias.add_(0.25)
        else:
            module.blocks[2].up.bias.data.add_(0.25)
        module.train()

    modules = [Net(**{hook: look}), Net(**{hook: look})]
    if tier == "tight_recomputed" and hook == "on_before_zero_grad":  # which is between the forward and the backward
        with pytest.raises(UsageError, match=r"blocks\.2\.up\.bias has changed 1 time since the forward that used it"):
            trainer_with(strategy_at(tier)).fit(modules[0], batches())
        return
    for module, strategy in zip(modules, (strategy_at(tier), "auto"), strict=True):
        trainer_with(strategy).fit(module, batches())
        assert not any(parameter.is_inference() for parameter in module.parameters())
    assert_same(cloned(modules[0].state_dict()), cloned(modules[1].state_dict()))


# -- who else reads what computes ------------------------------------------------------------------------------------------


class _Hidden:
    """Nobody sees the tensor inside."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class _HiddenBlock(Block):
    def forward(self, state: Any) -> Any:  # type: ignore[override]
        return _Hidden(super().forward(state.x))


class Opaque(Net):
    """Units whose backward no hook announces."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_HiddenBlock(48) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        state = _Hidden(self.first(x))
        for block in self.blocks:
            state = block(state)
        return self.norm(state.x) * self.scale


class _Counting(TorchDispatchMode):
    """Calls every operator again from Python, with the tensors that autograd has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


class Watched(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        with _Counting() as counting:
            super().backward(loss, *args, **kwargs)
        assert counting.calls


class WatchedOpaque(Watched, Opaque):
    pass


@pytest.mark.slow_unless(
    "all_on_disk-all-Opaque", "lock_free_three_tiers-none-Watched", "lock_free_three_tiers-none-WatchedOpaque"
)
@pytest.mark.parametrize("build", [Watched, Opaque, WatchedOpaque])
@pytest.mark.parametrize("recompute", ["none", "all"])
def test_operators_that_are_called_from_python_in_the_backward(
    strategy_at: Any, tier: str, build: type[Net], recompute: str
) -> None:
    """By a dispatch mode of somebody's: what computes is open to it."""
    modules = [build(), build()]
    for module, strategy in zip(modules, (strategy_at(tier, recompute=recompute), "auto"), strict=True):
        trainer_with(strategy).fit(module, batches())
    assert_same(cloned(modules[0].state_dict()), cloned(modules[1].state_dict()))


class Follows(Net):
    """A target network that takes the weights of a block over, inside of the step."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.target = Block(48).requires_grad_(False)
        self.last = last

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        if not self.last or index == 2:
            self.take_over()
        return super().training_step(batch, index) + (self.blocks[0](batch) - self.target(batch) + 1).square().mean()

    def take_over(self) -> None:
        self.target.load_state_dict(self.blocks[0].state_dict())


class FollowsByHand(Follows):
    def take_over(self) -> None:
        with torch.no_grad():
            for name, value in self.blocks[0].state_dict().items():
                self.target.get_parameter(name).copy_(value)


@pytest.mark.parametrize("home", ["ram", "masters_on_disk", "all_on_disk", "three_tiers", "lock_free"])
@pytest.mark.parametrize("last", [False, True])
def test_a_target_network(strategy_at: Any, home: str, last: bool) -> None:
    ours, theirs = Follows(last=last), Follows(last=last)
    trainer_with(strategy_at(home)).fit(ours, batches())
    trainer_with("auto").fit(theirs, batches())
    assert_same(cloned(ours.state_dict()), cloned(theirs.state_dict()))


@pytest.mark.parametrize("home", ["all_on_disk", "three_tiers"])
def test_writes_in_a_step_that_would_be_lost(strategy_at: Any, home: str) -> None:
    """To a copy of pages that are elsewhere: found when the next step begins, or at the end."""
    message = r"target.up.weight.* written to.* it is a copy of values in pages, so that the new values would be lost"
    with pytest.raises(UsageError, match=message):
        trainer_with(strategy_at(home)).fit(FollowsByHand(), batches())
    module, plain = FollowsByHand(last=True), FollowsByHand()
    before = cloned(module.target.state_dict())
    with pytest.raises(UsageError, match=message):
        trainer_with(strategy_at(home)).fit(module, batches())
    assert_same(cloned(module.target.state_dict()), before)
    assert not torch.equal(module.first.weight, plain.first.weight), "what was trained was not given back"
