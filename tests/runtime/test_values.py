"""Whole values into pages and out of them, on one rank, wherever the pages are. Several ranks: tests/ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from drawn_by_hand import PAGE, LaidOut, Net, adam, drawn, laid_out
from plain_loop import TrainModule, make_trainer, vectors
from torch import Tensor, nn

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.closed import ClosedParameter
from lightning_ptm.storage.index import PARAMETERS
from lightning_ptm.terms import Tier

PLACES: dict[str, dict[str, Any]] = {
    "ram": {},
    "host": {"device_memory": "4MiB", "parameter_home": "host", "master_home": "host"},
    "masters on disk": {"master_home": "disk", "disk_path": "/d"},
    "all on disk": {"parameter_home": "disk", "master_home": "disk", "disk_path": "/d"},
}
MIXED = {"compute": torch.bfloat16, "mixed": True}


class Odd(Net):
    """With parameters whose ends are no pages', and one that is transposed."""

    def __init__(self) -> None:
        super().__init__(2)
        self.bias = nn.Parameter(torch.randn(77))
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.frozen = nn.Parameter(torch.randn(9), requires_grad=False)


@contextmanager
def run_of(module: nn.Module, disk: Path, place: str = "ram", **options: Any) -> Iterator[LaidOut]:
    found = drawn(
        module, lambda parameters: adam([each for each in parameters if each.requires_grad]), **PLACES[place], **options
    )
    with laid_out(found, [disk]) as made:
        yield made


def copies(module: nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.named_parameters()}


def values_of(made: LaidOut) -> dict[str, Tensor]:
    return {name: value.clone() for name, _, value in made.values.parameters()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) and found[name].dtype is value.dtype, name


def ids(module: nn.Module, values: dict[str, Tensor]) -> dict[int, Tensor]:
    return {id(dict(module.named_parameters())[name]): value for name, value in values.items()}


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("options", [{}, MIXED])
def test_values_go_in_and_come_out(disk: Path, place: str, options: dict[str, Any]) -> None:
    """The precise ones: a frozen parameter has no master, so it is rounded unless the user's tensor is kept."""
    module = Odd()
    before, parameters = copies(module), dict(module.named_parameters())
    seen: list[int] = []
    with run_of(module, disk, place, **options) as made:
        made.take_over(keep_frozen=True, seen=seen.append)
        assert sum(seen) == made.values.bytes_to_lay()
        assert_equal(values_of(made), before)
        assert dict(made.values.names()) == parameters
        resident = all(store.resident for store in made.stores)
        assert resident == (place in ("ram", "masters on disk"))
        made.values.restore()
        assert_equal(copies(module), before)
        assert dict(module.named_parameters()) == parameters
        assert module.turned.stride() == (1, 3)
    assert_equal(copies(module), before)  # storage of their own


@pytest.mark.parametrize(
    ("options", "rounded"), [({}, True), ({"keep_frozen": True}, False), ({"keep_originals": True}, False)]
)
def test_what_is_kept_beside_rounded_pages(disk: Path, options: dict[str, bool], rounded: bool) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk, **MIXED) as made:
        made.take_over(**options)
        frozen = values_of(made)["frozen"].float()
        assert torch.equal(frozen, before["frozen"].bfloat16().float()) is rounded
        assert torch.equal(frozen, before["frozen"]) is not rounded


@pytest.mark.parametrize("place", list(PLACES))
def test_values_of_files_take_the_place_of_those_there_are(disk: Path, place: str) -> None:
    module = Odd()
    expected = copies(module)
    given = {}
    for name in ("blocks.1.weight", "turned", "frozen"):
        expected[name] = torch.randn(expected[name].shape)
        given[id(dict(module.named_parameters())[name])] = lambda value=expected[name]: value
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(given=given, keep_frozen=True)
        assert_equal(values_of(made), expected)


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("options", [{}, MIXED])
def test_loaded_values(disk: Path, place: str, options: dict[str, Any]) -> None:
    module = Odd()
    with run_of(module, disk, place, **options) as made:
        made.take_over(keep_frozen=True)
        expected = values_of(made)
        loaded = {name: torch.randn(expected[name].shape) for name in ("head", "turned", "frozen")}
        made.values.load_parameters(ids(module, loaded))
        assert_equal(values_of(made), expected | loaded)
        # What computes is the same, rounded.
        with made.values.gathered({0}, write=False):
            assert torch.equal(module.turned, loaded["turned"])
        flat = made.stores[0].flats[0]
        assert torch.equal(made.values.read(flat.home), made.values.precise(flat).to(flat.binding.dtype))


def test_values_of_another_shape_change_nothing(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        before = values_of(made)
        wrong = ids(module, {"head": torch.zeros(PAGE // 4), "turned": torch.zeros(5, 3)})
        with pytest.raises(ConfigError, match=r"turned has shape \(3, 5\) here and \(5, 3\) in what is loaded"):
            made.values.load_parameters(wrong)
        assert_equal(values_of(made), before)


# -- by hand ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("write", [False, True])
def test_edits_are_kept_where_they_are_to_be(disk: Path, place: str, write: bool) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(keep_frozen=True)
        with made.values.gathered({0, 2}, write=write):
            assert torch.equal(module.head, before["head"])
            assert isinstance(module.blocks[0].weight, ClosedParameter)  # nobody asked for it
            with torch.no_grad():
                module.head[3] = 5.0
                module.blocks[1].weight.data = torch.ones(2, PAGE // 4)  # replaces the view
                module.frozen.zero_()
        expected = before
        if write:
            expected["head"][3] = 5.0
            expected["blocks.1.weight"] = torch.ones(2, PAGE // 4)
            expected["frozen"] = torch.zeros(9)
        assert_equal(values_of(made), expected)
        assert made.values.written() == ()


def test_edits_are_dropped_where_a_rank_is_gone(disk: Path) -> None:
    module = Odd()
    before = copies(module)
    with run_of(module, disk) as made:
        made.take_over()
        with made.values.gathered({0}, write=True, may_write=lambda: False), torch.no_grad():
            module.head.zero_()
        assert_equal(values_of(made), before)


def test_blocks_may_be_nested(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        with made.values.gathered({0}, write=True), torch.no_grad():
            module.head[0] = 5.0
            with made.values.gathered({0, 1}, write=False):
                assert module.head[0] == 5.0
                module.head[1] = 6.0
                module.blocks[0].weight.zero_()
            assert module.head[1] == 6.0
        assert values_of(made)["head"][:2].tolist() == [5.0, 6.0]
        assert values_of(made)["blocks.0.weight"].any()
        with made.values.gathered({0}, write=True):
            pass
        with made.values.gathered({0}, write=False):
            with (
                pytest.raises(
                    UsageError, match=r"gathered\(write=True\) inside of .*: edits of the root would be lost"
                ),
                made.values.gathered({0, 1}, write=True),
            ):
                pass
            with made.values.gathered({1}, write=True), torch.no_grad():
                module.blocks[0].weight.zero_()
        assert not values_of(made)["blocks.0.weight"].any()
        with made.values.gathered({0}, write=True):
            pass


def test_a_block_that_fails_keeps_its_edits_and_ends(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        with pytest.raises(ValueError, match="mine"), made.values.gathered({0}, write=True), torch.no_grad():
            module.head.zero_()
            raise ValueError("mine")
        assert not any(store.lent for store in made.stores)
        assert not values_of(made)["head"].any()


def test_ram_that_is_lent(disk: Path) -> None:
    module = Net(2)
    with run_of(module, disk, "host") as made:
        made.take_over()
        assert made.values.bytes_to_lend(()) == 0
        assert made.values.bytes_to_lend({1}) == 2 * PAGE
        assert made.values.bytes_to_lend({0, 1, 2}) == (1 + 1 + 2 + 2) * PAGE
        with made.values.gathered({2}, write=False):
            assert made.values.bytes_to_lend({0, 1, 2}) == (1 + 1 + 1) * PAGE


def test_values_are_lent_for_a_checkpoint(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "host") as made:
        made.take_over()
        given = {name: torch.randn(value.shape) for name, value in values_of(made).items()}
        with made.values.lent(ids(module, given)):
            assert_equal(copies(module), given)
        with made.values.lent(None):
            assert all(each.isnan().all() for each in module.parameters())
        assert all(isinstance(each, ClosedParameter) for each in module.parameters())
        with (
            made.values.gathered({1}, write=False),
            pytest.raises(UsageError, match="a checkpoint cannot be made inside"),
            made.values.lent(None),
        ):
            pass


def test_parameters_that_are_let_go_are_unknown_to_the_next_run(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        made.values.check_known()
        before = values_of(made)
        made.values.let_go()
        with pytest.raises(UsageError, match="its values ended with its run"):
            module.head.sum()
    with run_of(module, disk) as made:
        made.take_over()
        assert set(made.values.unknown) == set(before)
        with pytest.raises(UsageError, match=r"the values of .*\.\.\. ended with an earlier run"):
            made.values.check_known()
        rest = before.pop("turned")
        made.values.load_parameters(ids(module, before))
        assert made.values.unknown == ("turned",)
        made.values.load_parameters(ids(module, {"turned": rest}))
        made.values.check_known()
        assert_equal(values_of(made), before | {"turned": rest})


# -- states of optimizers ---------------------------------------------------------------------------------------------


def states_for(module: nn.Module, *names: str) -> dict[int, dict[str, Any]]:
    parameters = dict(module.named_parameters())
    return {
        id(parameters[name]): {
            "step": torch.tensor(float(len(name))),
            "exp_avg": torch.randn(parameters[name].shape),
            "exp_avg_sq": torch.rand(parameters[name].shape),
        }
        for name in names
    }


@pytest.mark.parametrize("place", list(PLACES))
def test_states_go_in_and_come_out(disk: Path, place: str) -> None:
    module = Odd()
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over()
        assert list(made.values.optimizer_states(0)) == [] and not made.values.has_optimizer_states(0)
        given = states_for(module, "head", "turned", "blocks.1.weight")
        made.values.load_optimizer_states(0, given)
        assert made.values.has_optimizer_states(0) and not made.values.has_optimizer_states(1)
        found = {id(parameter): state for parameter, state in made.values.optimizer_states(0)}
        assert found.keys() == given.keys()
        for key, state in given.items():
            assert found[key].keys() == state.keys()
            assert all(torch.equal(found[key][name], value) for name, value in state.items())
        order = [module.blocks[1].weight, module.bias, module.turned, module.head]
        scalars = made.values.optimizer_scalars(0, order)
        assert {at: state["step"].item() for at, state in scalars.items()} == {0: 15.0, 2: 6.0, 3: 4.0}
        assert list(scalars) == [0, 2, 3]
        # What is told is nobody else's.
        scalars[0]["step"].fill_(99.0)
        assert made.values.optimizer_scalars(0, order)[0]["step"] == 15.0
        made.values.load_optimizer_states(0, states_for(module, "bias"))
        moments = [made.values.read(flat.states.slots["exp_avg"]) for flats in made.flats for flat in flats]
        assert sum(int(each.count_nonzero()) for each in moments) == 77  # the others start afresh
        assert [parameter is module.bias for parameter, _ in made.values.optimizer_states(0)] == [True]


def test_states_of_another_model(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        wrong = {id(module.bias): {"step": 1.0, "exp_avg": torch.zeros(76), "exp_avg_sq": torch.zeros(77)}}
        with pytest.raises(ConfigError, match=r"exp_avg of bias has shape \(76,\).* the parameter \(77,\)"):
            made.values.load_optimizer_states(0, wrong)


# -- this rank's own --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["ram", "all on disk"])
def test_kinds_cover_every_element_once(disk: Path, place: str) -> None:
    module = Odd()
    with run_of(module, disk, place, **MIXED) as made:
        made.take_over(keep_frozen=True)
        made.values.load_optimizer_states(0, states_for(module, "head", "bias", "blocks.0.weight"))
        kinds = made.values.kinds(optimizers=True)
        assert [(kind.unit, kind.kind) for kind in kinds] == [
            (unit, kind) for unit in ("", "blocks.0", "blocks.1") for kind in (PARAMETERS, "exp_avg", "exp_avg_sq")
        ]
        assert [kind.kind for kind in made.values.kinds(optimizers=False)] == [PARAMETERS] * 3
        whole = {PARAMETERS: values_of(made), "exp_avg": {}, "exp_avg_sq": {}}
        for parameter, state in made.values.optimizer_states(0):
            name = next(name for name, each in module.named_parameters() if each is parameter)
            for slot in ("exp_avg", "exp_avg_sq"):
                whole[slot][name] = state[slot]
        told: dict[str, set[str]] = {PARAMETERS: set(), "exp_avg": set(), "exp_avg_sq": set()}
        for kind in kinds:
            covered = {name: torch.full((torch.Size(shape).numel(),), torch.nan) for name, _, shape in kind.tensors}
            told[kind.kind] |= covered.keys()
            for flat in kind.flats:
                elements = made.values.read(flat.paged)
                for part in flat.segments:
                    target = covered[flat.parameters[part.parameter].name][part.parameter_start :][: part.numel]
                    assert target.isnan().all()
                    target.copy_(elements[part.start : part.stop])
                for spec, start, values in flat.outside:
                    assert spec.name == "frozen" and kind.kind == PARAMETERS
                    covered[spec.name][start : start + values.numel()] = values
            for name, dtype, shape in kind.tensors:
                expected = whole[kind.kind][name]
                # In the order of memory, as a flat holds it.
                expected = expected.t().reshape(-1) if name == "turned" else expected.reshape(-1)
                assert torch.equal(covered[name], expected) and dtype is torch.float32, (kind.kind, name)
                assert torch.Size(shape) == whole[kind.kind][name].shape
        assert told == {kind: set(values) for kind, values in whole.items()}


def test_masters_are_the_homes_that_count(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk, "masters on disk", **MIXED) as made:
        made.take_over()
        flat = next(flat for flat in made.stores[1].flats)
        assert flat.home.tier is Tier.DEVICE and flat.home.dtype is torch.bfloat16
        assert made.values.precise(flat).dtype is torch.float32
        (update,) = made.flats[1]
        assert made.values.segments(flat) is update.states.segments


class Wide(TrainModule):
    """16 units of 4 MiB of weights each."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(16))

    def loss(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()


class MemoryOfTheEnd(L.Callback):
    """What is resident when the run's end begins; the most that is from then on."""

    before = 0

    def on_train_end(self, *_: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        self.before = self.now("VmHWM")

    @staticmethod
    def now(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_what_is_given_back_at_the_end_does_not_lie_in_ram_twice(strategy_at: Any, precision: str) -> None:
    memory = MemoryOfTheEnd()
    strategy = strategy_at("ram", page_size="1MiB", poison=False)
    module = Wide()
    trainer = make_trainer(strategy, precision, max_epochs=1, callbacks=[memory])
    trainer.fit(module, vectors(2, 4, 1024).loader())
    grown = memory.now("VmHWM") - memory.before
    assert len(trainer.optimizers[0].state) == 16
    assert grown < (96 << 20), f"{grown >> 20} MiB: the weights have 64, and with the optimizer's states 192"
