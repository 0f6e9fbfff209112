"""First values of what is built on the meta device, one unit at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.full_params.first_values import FirstValues, Given
from lightning_ptm.runtime.units.discovery import Unit, discover


class Layer(nn.Module):
    """Says in `log` that it was initialised, and puts 1 into its own parameters."""

    log: ClassVar[list[str]]

    def __init__(self, name: str = "") -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.empty(3))
        self.bias = nn.Parameter(torch.empty(2), requires_grad=False)

    def reset_parameters(self) -> None:
        self.log.append(self.name)
        self.weight.fill_(1.0)
        self.bias.fill_(1.0)


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.inner = Layer(name)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block("first")
        self.second = Block("second")


@pytest.fixture(autouse=True)
def log() -> list[str]:
    Layer.log = []
    return Layer.log


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def units_of(model: nn.Module) -> list[Unit]:
    return list(discover(model, ["Block"]))


def root_alone(model: nn.Module, given: Given | None = None) -> nn.Module:
    """Initialises a model that is one unit."""
    values = FirstValues(model, given or Given())
    values.buffers()
    values.parameters(discover(model, "auto")[0])
    values.fill_buffers()
    values.check()
    return model


# -- I1: a unit's own, and no others ----------------------------------------------------------------------------------


def test_one_unit_at_a_time_and_parameters_stay_who_they_are(log: list[str]) -> None:
    model = on_meta(Model)
    before = {name: (each, each.requires_grad) for name, each in model.named_parameters()}
    values, (_, first, second) = FirstValues(model, Given()), units_of(model)
    values.parameters(second)
    assert log == ["second"]
    assert [name for name, each in model.named_parameters() if each.is_meta] == [
        "first.inner.weight",
        "first.inner.bias",
    ]
    values.parameters(first)
    values.parameters(first)
    assert log == ["second", "first"]
    for name, each in model.named_parameters():
        assert each is before[name][0] and each.requires_grad is before[name][1]
        assert isinstance(each, nn.Parameter) and bool((each == 1).all())


def test_what_exists_already_is_not_initialised_again(log: list[str]) -> None:
    model = Model()
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(7.0)
    values = FirstValues(model, Given())
    for unit in units_of(model):
        values.parameters(unit)
    assert log == [] and all(bool((each == 7).all()) for each in model.parameters())


def test_a_weight_tied_to_another_units_is_not_written(log: list[str]) -> None:
    model = on_meta(Model)
    model.second.inner.weight = nn.Parameter(torch.full((3,), 7.0))
    model.first.inner.weight = model.second.inner.weight  # of both: the root's
    tied = model.first.inner.weight
    values, (root, first, second) = FirstValues(model, Given()), units_of(model)
    for unit in (root, first, second):
        values.parameters(unit)
    assert model.first.inner.weight is model.second.inner.weight is tied
    assert log == ["first", "second"]  # for their biases
    assert tied.tolist() == [7.0] * 3 and model.second.inner.bias.tolist() == [1.0] * 2


# -- who initialises --------------------------------------------------------------------------------------------------


def to(value: float) -> Callable[..., None]:
    def init(self: nn.Module, module: nn.Module) -> None:
        for each in module.parameters(recurse=False):
            each.fill_(value)

    return init


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block("inner")


def not_for_modules(self: nn.Module) -> None:
    raise AssertionError("is for the whole model")


@pytest.mark.parametrize(
    ("methods", "value"),
    [
        ({}, 1.0),
        ({Outer: {"init_weights": to(2.0)}}, 2.0),
        ({Outer: {"_init_weights": to(3.0)}}, 3.0),
        ({Outer: {"init_weights": to(2.0), "_init_weights": to(3.0)}}, 2.0),
        ({Outer: {"init_weights": to(2.0)}, Block: {"_init_weights": to(4.0)}}, 4.0),
        ({Outer: {"init_weights": to(2.0)}, Layer: {"init_weights": to(5.0)}}, 5.0),
        ({Outer: {"init_weights": not_for_modules}}, 1.0),
        ({Outer: {"init_weights": not_for_modules, "_init_weights": to(3.0)}}, 3.0),
    ],
)
def test_the_nearest_that_says_how_is_asked(
    methods: dict[type, dict[str, Callable[..., None]]], value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner, of_owner in methods.items():
        for name, method in of_owner.items():
            monkeypatch.setattr(owner, name, method, raising=False)
    model = root_alone(on_meta(Outer))
    assert {each for parameter in model.parameters() for each in parameter.tolist()} == {value}


def test_a_private_reset_counts_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "_reset_parameters", Layer.reset_parameters, raising=False)
    monkeypatch.delattr(Layer, "reset_parameters")
    assert root_alone(on_meta(Outer)).block.inner.weight.tolist() == [1.0] * 3


def test_an_apply_sees_inner_modules_first_and_those_around_last() -> None:
    seen: list[str] = []

    class Applied(Outer):
        def _init_weights(self, module: nn.Module) -> None:
            seen.append(type(module).__name__)
            to(2.0)(self, module)
            if isinstance(module, Block):
                module.inner.weight.fill_(9.0)

    model = root_alone(on_meta(Applied))
    assert seen == ["Layer", "Block", "Applied"]
    assert (model.block.inner.weight[0], model.block.inner.bias[0]) == (9.0, 2.0)


READS = [
    lambda values: values.tolist(),
    lambda values: torch.empty(3).copy_(values),
    lambda values: float(values.sum()),
]


@pytest.mark.parametrize("read", READS)
def test_an_apply_that_reads_other_units_is_refused(read: Callable[[Tensor], object]) -> None:
    class Reads(Model):
        def _init_weights(self, module: nn.Module) -> None:
            to(2.0)(self, module)
            if module is self:
                read(self.second.inner.weight)

    model = on_meta(Reads)
    with pytest.raises(ConfigError, match="of a Reads on the meta device reads weights of several units"):
        FirstValues(model, Given()).parameters(units_of(model)[1])


def test_what_an_initialisation_leaves_out_has_what_its_module_gives() -> None:
    class WeightsAlone(Outer):
        def init_weights(self, module: nn.Module) -> None:
            if isinstance(module, Layer):
                module.weight.fill_(6.0)

    inner = root_alone(on_meta(WeightsAlone)).block.inner
    assert (inner.weight.tolist(), inner.bias.tolist()) == ([6.0] * 3, [1.0] * 2)


def test_a_recurrent_layer_computes_with_its_new_weights() -> None:
    layer = root_alone(on_meta(lambda: nn.LSTM(3, 4)))
    assert not any(each.isnan().any() for each in layer(torch.ones(1, 1, 3))[0])


# -- I2: what has no value is refused ---------------------------------------------------------------------------------


def nothing(self: nn.Module) -> None: ...


def test_a_parameter_that_nobody_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "reset_parameters", lambda self: self.bias.fill_(1.0))
    with pytest.raises(ConfigError, match=r"parameter block.inner.weight of a Layer was built.*\(1 such in its unit\)"):
        root_alone(on_meta(Outer))


def test_infinities_are_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def reset(self: Layer) -> None:
        self.weight.copy_(torch.tensor([torch.inf, -torch.inf, 0.0]))
        self.bias.zero_()

    monkeypatch.setattr(Layer, "reset_parameters", reset)
    root_alone(on_meta(Outer))


def test_a_module_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Layer, "reset_parameters")
    with pytest.raises(ConfigError, match="a Layer was built on the meta device and has no way to initialise"):
        root_alone(on_meta(Outer))


def test_an_adapter_of_pefts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "reset_lora_parameters", nothing, raising=False)
    with pytest.raises(ConfigError, match=r"an adapter of peft \(Block\)"):
        root_alone(on_meta(Outer))


def test_somebody_holds_a_weak_reference() -> None:
    model = on_meta(Outer)
    kept = weakref.ref(model.block.inner.weight)
    with pytest.raises(ConfigError, match=r"parameter block.inner.weight .* a weak reference to it exists"):
        root_alone(model)
    assert kept() is not None


class Buffered(nn.Module):
    """No parameters. `values` are what its initialisation puts into its buffers, by name."""

    def __init__(self, **values: Tensor | None) -> None:
        super().__init__()
        self.values = values
        for name, value in values.items():
            self.register_buffer(name, torch.empty(4, dtype=torch.float32 if value is None else value.dtype))

    def reset_parameters(self) -> None:
        for name, value in self.values.items():
            if value is not None:
                getattr(self, name).copy_(value)


VALUES = [
    torch.arange(4.0),
    torch.tensor([1.0, 2.0, 3.0, torch.nan]),
    torch.arange(4),
    torch.zeros(4, dtype=torch.bool),
    torch.arange(4).to(torch.complex64),
    torch.arange(4, dtype=torch.uint8),
    torch.zeros(4, dtype=torch.uint8),
]


@pytest.mark.parametrize("value", VALUES)
def test_buffers_have_values_too(value: Tensor) -> None:
    module = root_alone(on_meta(lambda: nn.Sequential(Buffered(one=value))))
    assert torch.equal(module[0].one.nan_to_num(9.0), value.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int8, torch.complex64])
def test_a_buffer_that_nobody_sets(dtype: torch.dtype) -> None:
    def build() -> nn.Module:
        module = Buffered()
        module.register_buffer("lacking", torch.empty(4, dtype=dtype))
        return nn.Sequential(module)

    with pytest.raises(ConfigError, match=r"buffer 0\.lacking of a Buffered was built on the meta device"):
        root_alone(on_meta(build))


def test_buffers_without_elements_lack_nothing() -> None:
    module = on_meta(lambda: Buffered(one=None))
    module.one = torch.empty(0, device="meta")
    root_alone(module)


# -- I3: files --------------------------------------------------------------------------------------------------------


def test_what_files_provide_whole_draws_no_random_numbers() -> None:
    model = on_meta(lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    given = {id(each): (lambda: pytest.fail("is read later")) for each in model[0].parameters()}
    before = torch.get_rng_state()
    values = FirstValues(model, Given(given))
    (unit,) = discover(model, "auto")
    values.parameters(unit)
    assert not model[0].weight.is_meta and not model[1].weight.isnan().any()
    torch.set_rng_state(before)
    expected = nn.Linear(4, 5)
    assert torch.equal(model[1].weight, expected.weight) and torch.equal(model[1].bias, expected.bias)


def test_of_a_module_that_files_provide_in_part_the_rest_is_initialised(log: list[str]) -> None:
    model = on_meta(Outer)
    inner = model.block.inner
    root_alone(model, Given({id(inner.weight): lambda: pytest.fail("is read later")}))
    assert log == ["inner"] and inner.bias.tolist() == [1.0] * 2


def test_buffers_of_files_are_read_behind_all_initialisation() -> None:
    values = {"one": torch.arange(4.0), "two": torch.arange(4.0)}
    model = on_meta(lambda: nn.Sequential(Buffered(**values)))
    given = Given(buffers={(id(model[0]), "one"): lambda: torch.full((4,), 5.0)})
    root_alone(model, given)
    assert model[0].one.tolist() == [5.0] * 4 and model[0].two.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_buffers_that_files_provide_need_nobody() -> None:
    model = on_meta(lambda: nn.Sequential(Buffered(one=torch.zeros(4))))
    model[0].reset_parameters = None  # type: ignore[assignment]
    given = Given(buffers={(id(model[0]), "one"): lambda: torch.full((4,), 5.0)})
    assert root_alone(model, given)[0].one.tolist() == [5.0] * 4


def test_what_a_checkpoint_has_is_not_asked_of_files() -> None:
    def read() -> Tensor:
        return torch.zeros(1)

    given = Given({1: read, 2: read}, {(1, "a"): read, (1, "b"): read})
    assert given.without({2, (1, "a")}) == Given({1: read}, {(1, "b"): read})
    assert given.without(()) == given
