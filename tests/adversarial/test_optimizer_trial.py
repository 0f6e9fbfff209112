"""Whatever an optimizer does, it trains bit for bit as without the strategy, or is refused with the property that it lacks;
and finding that out writes into nothing of the user's."""

from __future__ import annotations

import contextlib
import copy
import random
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
from kit import optimizers as own
from kit.fits import fit
from kit.optimizers import SEEN, Logs
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.update.shadow import snapshot
from lightning_ptm.update.trial.probe import probe, try_out

SHAPES = [(8, 3, 3, 3), (8,), (9, 70), (9,), (8, 8), ()]


def parameters(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(shape)) for shape in shapes or SHAPES]


def groups() -> list[dict[str, Any]]:
    return [{"params": parameters()}, {"params": parameters(), "lr": 0.01}]


class Net(L.LightningModule):
    """A convolution, a norm, matrices, a bias and a number; more than one page of a matrix."""

    def __init__(self, make: Callable[[Any], Any], *, two_groups: bool = False, skip: int | None = None) -> None:
        super().__init__()
        self.make, self.two_groups, self.skip = make, two_groups, skip
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.wide, self.last = nn.Linear(8 * 4 * 4, 149), nn.Linear(149, 5)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        x, y = batch
        hidden = torch.tanh(self.norm(self.conv(x))).flatten(1)
        hidden = torch.relu(self.wide(hidden))
        if index == self.skip:
            hidden = hidden.detach()
        return ((self.last(hidden) * self.scale - y) ** 2).mean()

    def configure_optimizers(self) -> Any:
        if not self.two_groups:
            return self.make(self.parameters())
        several = [[p for p in self.parameters() if (p.dim() > 1) == large] for large in (True, False)]
        return self.make([{"params": several[0]}, {"params": several[1], "lr": 0.01}])


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4, 3, 6, 6, generator=generator), torch.randn(4, 5, generator=generator) * size)
        for size in (1, 200, 1, 0.01)
    ]


def trained(module: Net, **trainer: Any) -> dict[str, torch.Tensor]:
    fit(module, DataLoader(batches(), batch_size=None), max_epochs=1, **trainer)
    return {name: value.clone() for name, value in module.state_dict().items()}


def net(make: Callable[[Any], Any], **options: Any) -> Net:
    torch.manual_seed(0)
    return Net(make, **options)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert all(value.isfinite().all() for value in theirs.values())
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


REFUSED: list[tuple[Callable[[], Optimizer], str]] = [
    (lambda: own.ClipsByItself(parameters()), "the update of one of its parameters depends on the others"),
    (lambda: own.ClipsByItself(parameters((9, 70))), "depends on"),
    (lambda: own.OfGroups(groups()), "depends on"),
    (lambda: own.Remembers(groups()), "one of its parameter groups depends on the others"),
    (lambda: own.CountsOnClass(parameters()), r"changes CountsOnClass\.steps, outside of the optimizer"),
    (lambda: own.CountsInModule(parameters()), r"changes kit\.optimizers\.CALLS, outside of the optimizer"),
    (
        lambda: own.LogsInModule(parameters()),
        r"changes kit\.optimizers\.SEEN, outside .* other data .* attributes of the object",
    ),
    (lambda: own.LogsOnClass(parameters()), r"changes LogsOnClass\.log, outside"),
    (lambda: own.logs_in_a_closure(parameters()), r"changes count \(around logs_in_a_closure.*\.step\), outside"),
    (lambda: own.WithFunction(parameters()), r"in its attribute 'rule' a function .* Make it a method"),
    (lambda: own.Noisy(parameters()), "draws random numbers"),
    (lambda: own.NoisyInPython(parameters()), "draws random numbers"),
    (lambda: own.WithLoss(parameters()), "depends on the loss"),
    (lambda: own.Sharpness(parameters()), "evaluates the model again, at other weights"),
    (lambda: own.Switched(parameters()), r"in its train\(\) and eval\(\)"),
    (lambda: own.Ahead(optim.SGD(parameters(), lr=0.1)), "wraps another optimizer, SGD .*return the SGD"),
    (
        lambda: own.OfAList(parameters()),
        r"reaches parameters by its attribute 'all' .* and not only by its param_groups",
    ),
    (lambda: own.OfTheModel(nn.Linear(2, 2)), r"attribute 'model' \(Linear\)"),
    (lambda: own.OwnRate(parameters()), "its own learning rate"),
    (lambda: own.KeepsStateOfNoParameter(parameters()), "'steps' in its state, which belongs to no parameter"),
    (lambda: own.LateState(parameters()), "its state slow in step 3"),
]

WHOLE: list[tuple[Callable[[], Optimizer], str]] = [
    (lambda: own.Projected(parameters()), "4-D parameter .* otherwise than the same numbers in a row"),
    (lambda: own.Projected(parameters((9, 70), (9,))), "2-D parameter .* otherwise than the same numbers in a row"),
    (lambda: own.Factored(parameters((256, 200), (8,))), r"shape \(149, 149\) it keeps 'rows' of shape \(149, 1\)"),
    (lambda: own.Filters(parameters()), "4-D parameter .* otherwise"),
    (lambda: own.NoDecayOfVectors(parameters()), "D parameter .* otherwise"),
    (lambda: own.SkipsEmpty(parameters()), "element depends on others of its parameter"),
    (lambda: own.SkipsBroken(parameters()), "an inf or NaN in one element"),
    (lambda: own.EveryFifth(parameters()), "element depends on others of its parameter"),
    (lambda: own.Quantized(parameters((8, 8), (8, 8))), "element depends on others of its parameter"),
    (lambda: own.Quantized(parameters((300, 200))), "element depends on others of its parameter"),
    (lambda: own.Projected(parameters(), lr=0.0), "otherwise than the same numbers in a row"),
    (lambda: own.Projected(parameters(), lr=1e-12), "otherwise than the same numbers in a row"),
]


@pytest.mark.parametrize(("make", "reason"), REFUSED)
def test_refused_with_the_property_that_it_lacks(make: Callable[[], Optimizer], reason: str) -> None:
    optimizer = make()
    with pytest.raises(ConfigError, match=reason) as caught:
        probe(optimizer)
    assert type(optimizer).__name__ in str(caught.value)
    assert "what works: " in str(caught.value)


@pytest.mark.parametrize(("make", "reason"), WHOLE)
def test_updated_by_whole_parameters_with_the_property_that_elements_lack(
    make: Callable[[], Optimizer], reason: str
) -> None:
    assert re.search(reason, probe(make()).whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_not_element_wise_in_any_precision(dtype: torch.dtype) -> None:
    """A small learning rate is lost in the rounding of 16 bit, and what an optimizer does with it."""
    assert "otherwise than the same numbers in a row" in probe(own.Projected(parameters(), lr=1e-5), dtype=dtype).whole


def test_a_mark_on_parameters_that_pages_do_not_have() -> None:
    marked = parameters()
    probe(own.Marked(marked))
    for parameter in marked[1::2]:
        parameter.no_decay = True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"looks at attributes of a parameter .no_decay"):
        probe(own.Marked(marked))


def test_a_map_by_identity_of_parameters() -> None:
    optimizer = own.ByParameter(parameters())
    optimizer.names = {id(p): "weight" for p in optimizer.param_groups[0]["params"]}  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="attribute 'names'"):
        probe(optimizer)


def test_a_step_that_is_bound_to_the_users_object() -> None:
    optimizer = own.OnObject(parameters(), sign=True)
    value = optimizer.param_groups[0]["params"][2].clone()
    probe(optimizer)
    assert torch.equal(optimizer.param_groups[0]["params"][2], value)


RIGHT: list[Callable[[Any], Optimizer]] = [
    own.GroupStep,
    lambda ps: own.OnObject(ps, sign=True),
    own.NewTensors,
    own.ScratchGradient,
    own.LastGradient,
    own.WantsClosure,
    own.Named,
    own.NormedDecay,
    own.SkipsEmpty.__base__,
    lambda ps: Logs(ps, lr=0.01, fused=True),
    lambda ps: optim.AdamW(ps, lr=0.01, fused=True, amsgrad=True),
    lambda ps: optim.Adagrad(ps, lr=0.01, fused=True),
    lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True, fused=True),
]


@pytest.mark.diagonal
@pytest.mark.parametrize("make", RIGHT)
@pytest.mark.parametrize("tier", ["ram", "masters_on_disk"])
def test_trains_as_without_the_strategy(make: Callable[[Any], Any], tier: str, strategy_at: Any) -> None:
    plain = trained(net(make, two_groups=True))
    assert_same(trained(net(make, two_groups=True), strategy=strategy_at(tier)), plain)


@pytest.mark.diagonal
@pytest.mark.parametrize("tier", ["three_tiers", "lock_free"])
@pytest.mark.parametrize("make", [own.GroupStep, own.NewTensors, own.Named])
def test_trains_as_without_the_strategy_in_other_homes(make: Any, tier: str, strategy_at: Any) -> None:
    assert_same(trained(net(make), strategy=strategy_at(tier)), trained(net(make)))


def test_group_steps_with_accumulation_and_clipping(strategy_at: Any) -> None:
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    ours = trained(net(own.GroupStep), strategy=strategy_at("masters_on_disk"), **options)
    assert_same(ours, trained(net(own.GroupStep), **options))


def test_a_learning_rate_that_starts_at_zero(strategy_at: Any) -> None:
    def make(ps: Any) -> Any:
        optimizer = own.GroupStep(ps)
        schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    assert_same(trained(net(make), strategy=strategy_at("ram")), trained(net(make)))


def test_a_parameter_without_a_gradient_where_the_class_does_not_care(strategy_at: Any) -> None:
    assert_same(
        trained(net(own.LastGradient, skip=1), strategy=strategy_at("ram")), trained(net(own.LastGradient, skip=1))
    )


def test_a_parameter_without_a_gradient_where_the_class_does_care(strategy_at: Any) -> None:
    """The optimizer's list holds what it computed for another parameter, at another learning rate."""

    def make(ps: Any) -> Any:
        optimizer = own.Remembers(ps)
        schedule = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with pytest.raises(
        UsageError, match=r"has no gradient in this step, and .*Remembers needs a gradient for every parameter"
    ):
        trained(net(make, skip=1), strategy=strategy_at("ram"))
    assert_same(trained(net(make), strategy=strategy_at("ram")), trained(net(make)))


def test_a_setting_that_would_make_it_look_at_norms_is_refused_when_it_is_switched_on(strategy_at: Any) -> None:
    class Scheduled(L.Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * (trainer.global_step >= 2)

    with pytest.raises(UsageError, match=r"weight_decay of .*NormedDecay was 0 .* depends on others of its parameter"):
        trained(net(own.NormedDecay), strategy=strategy_at("ram"), callbacks=[Scheduled()])
    assert "element depends on others" in probe(own.NormedDecay(parameters(), weight_decay=0.1)).whole


# -- nothing is written -----------------------------------------------------------------------------------------------


@pytest.fixture
def counters() -> Iterator[None]:
    def clear() -> None:
        own.CountsOnClass.steps, own.CALLS["steps"] = 0, 0
        SEEN.clear()
        Logs.cache.clear()

    clear()
    yield
    clear()


@pytest.mark.usefixtures("counters")
@pytest.mark.parametrize(
    "make",
    [
        *(make for make, _ in REFUSED),
        own.Remembers,
        own.GroupStep,
        own.OnObject,
        own.NewTensors,
        Logs,
        lambda ps: optim.Adafactor(ps),
    ],
)
def test_a_trial_writes_nothing(make: Callable[..., Optimizer]) -> None:
    try:
        optimizer = make()
    except TypeError:
        optimizer = make(parameters())
    cls = type(optimizer)
    inner = getattr(optimizer, "inner", optimizer)
    values = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
    plain = [{k: copy.deepcopy(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    kept = {k: copy.deepcopy(v) for k, v in vars(optimizer).items() if isinstance(v, int | float | list | str)}
    kept.pop("param_groups")
    kept = {k: v for k, v in kept.items() if not (isinstance(v, list) and any(isinstance(x, torch.Tensor) for x in v))}
    of_class, of_module = dict(vars(cls)), dict(vars(own))
    calls = dict(own.CALLS)
    generators = torch.random.get_rng_state(), random.getstate()
    subclasses = cls.__subclasses__()
    with contextlib.suppress(ConfigError):
        probe(optimizer)
    now = [p for group in optimizer.param_groups for p in group["params"]]
    assert all(torch.equal(before, after) and after.grad is None for before, after in zip(values, now, strict=True))
    assert [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups] == plain
    assert {k: v for k, v in vars(optimizer).items() if k in kept} == kept
    assert not optimizer.state
    assert not inner.state
    assert dict(vars(cls)) == of_class
    assert dict(vars(own)) == of_module
    assert calls == own.CALLS
    assert SEEN == []
    assert Logs.cache == {}
    assert not hasattr(optimizer, "counted") or optimizer.counted() == 0
    assert torch.equal(generators[0], torch.random.get_rng_state())
    assert generators[1] == random.getstate()
    assert cls.__subclasses__() == subclasses


def test_pages_do_not_count_as_steps(strategy_at: Any) -> None:
    """A class that records its steps on the object records no pages."""
    module = net(lambda ps: Logs(ps, lr=0.01))
    made: list[Logs] = []
    module.make = lambda ps: made.append(Logs(ps, lr=0.01)) or made[0]  # type: ignore[func-returns-value]
    trained(module, strategy=strategy_at("masters_on_disk"))
    assert made[0].log == list(range(1, len(batches()) + 1))


@pytest.mark.usefixtures("counters")
@pytest.mark.parametrize("make", [own.CountsOnClass, own.CountsInModule])
def test_counts_outside_of_the_object_are_those_of_training_where_it_steps_by_itself(
    make: Any, strategy_at: Any
) -> None:
    plain = trained(net(make))
    own.CountsOnClass.steps, own.CALLS["steps"] = 0, 0
    assert_same(trained(net(make), strategy=strategy_at("ram")), plain)
    assert own.CountsOnClass.steps + own.CALLS["steps"] == len(batches())


def test_a_list_in_a_group_stays_as_it_is(strategy_at: Any) -> None:
    module = net(own.Remembers)
    made: list[Any] = []
    module.make = lambda ps: made.append(own.Remembers(ps)) or made[0]  # type: ignore[func-returns-value]
    trained(module, strategy=strategy_at("ram"))
    assert made[0].param_groups[0]["buffer"] == made[0].defaults["buffer"]


def test_snapshots_advance_keys_that_the_first_step_makes() -> None:
    optimizer = own.GroupStep(groups())
    traits = probe(optimizer)
    assert traits.group_slots == ("step",)
    assert [snapshot(optimizer, traits).groups[1].get("step", 0) for _ in range(3)] == [0, 1, 2]
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]


def test_classes_of_torchs_name_are_not_taken_for_torchs() -> None:
    from lightning_ptm.update.weight_prediction import can_predict_weights

    assert can_predict_weights(probe(optim.SGD(parameters(), lr=0.1)))
    traits = probe(own.Named(parameters(), lr=0.1))
    assert traits.name.endswith(".SGD")
    assert not can_predict_weights(traits)


def test_many_groups_are_tried_by_kind() -> None:
    many = [{"params": parameters((8, 8), (8,)), "lr": 0.1 / (1 + k), "name": f"layer {k}"} for k in range(60)]
    traits = probe(own.GroupStep(many))
    assert len(traits.groups) == 60
    assert {slot.name for slot in traits.groups[59].slots} == {"moment"}


def test_a_trial_is_quick() -> None:
    """Set-up runs it each time."""
    began = time.process_time()
    for _ in range(10):
        probe(optim.AdamW(parameters()))
    assert time.process_time() - began < 0.1
    probe(own.GroupStep(groups()))
    began = time.process_time()
    probe(own.GroupStep(groups()))
    assert time.process_time() - began < 1.0


def test_tried_classes_of_torch_are_not_changed_either() -> None:
    optimizer = optim.RAdam(parameters())
    step = optim.RAdam.step
    try_out(optimizer, dtype=torch.float32, device=torch.device("cpu"))
    assert optim.RAdam.step is step
    assert not optimizer.state
