"""Whole parameters into pages and out of them, on one rank, wherever the pages are. Several ranks: tests/ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from decided_by_hand import PAGE
from kit.plain_loop import TrainModule, make_trainer, vectors
from torch import nn
from values_by_hand import MIXED, PLACES, Odd, assert_equal, copies, ids, run_of, values_of

from lightning_ptm.errors import ConfigError, UsageError


@pytest.mark.parametrize("place", list(PLACES))
@pytest.mark.parametrize("options", [{}, MIXED])
def test_values_go_in_and_come_out(disk: Path, place: str, options: dict[str, Any]) -> None:
    """The precise ones: a frozen parameter has no master, so it is rounded unless the user's tensor is kept."""
    module = Odd()
    before, parameters = copies(module), dict(module.named_parameters())
    seen: list[int] = []
    with run_of(module, disk, place, **options) as made:
        made.take_over(keep_frozen=True, seen=seen.append)
        flats = [flat for store in made.gathered_flats.stores for flat in store.flats]
        assert sum(seen) == sum(map(made.gathered_flats.bytes_of_homes, flats))
        assert_equal(values_of(made), before)
        assert dict(made.gathered_flats.names()) == parameters
        resident = all(store.resident for store in made.stores)
        assert resident == (place in ("ram", "masters on disk"))
        made.gathered_parameters.restore()
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
        with made.gathered_parameters.gathered({0}, write=False):
            assert torch.equal(module.turned, loaded["turned"])
        flat = made.stores[0].flats[0]
        assert torch.equal(made.gathered_flats.read(flat.home), made.values.precise(flat).to(flat.binding.dtype))


def test_values_of_another_shape_change_nothing(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        before = values_of(made)
        wrong = ids(module, {"head": torch.zeros(PAGE // 4), "turned": torch.zeros(5, 3)})
        with pytest.raises(ConfigError, match=r"turned has shape \(3, 5\) here and \(5, 3\) in the loaded state"):
            made.values.load_parameters(wrong)
        assert_equal(values_of(made), before)


def test_parameters_that_are_let_go_are_unknown_to_the_next_run(disk: Path) -> None:
    module = Odd()
    with run_of(module, disk) as made:
        made.take_over()
        made.values.check_known()
        before = values_of(made)
        made.gathered_parameters.detach()
        with pytest.raises(UsageError, match="its values ended with its run"):
            module.head.sum()
    with run_of(module, disk) as made:
        made.take_over()
        assert set(made.values.unknown.values()) == set(before)
        with pytest.raises(UsageError, match=r"the values of .*\.\.\. ended with an earlier run"):
            made.values.check_known()
        rest = before.pop("turned")
        made.values.load_parameters(ids(module, before))
        assert [*made.values.unknown.values()] == ["turned"]
        made.values.load_parameters(ids(module, {"turned": rest}))
        made.values.check_known()
        assert_equal(values_of(made), before | {"turned": rest})


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
    """Records the resident memory when the run's end begins, and the most from then on."""

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
    strategy = strategy_at("ram", page_size="1MiB", debug={"poison": False})
    module = Wide()
    trainer = make_trainer(strategy, precision, max_epochs=1, callbacks=[memory])
    trainer.fit(module, vectors(2, 4, 1024).loader())
    grown = memory.now("VmHWM") - memory.before
    assert len(trainer.optimizers[0].state) == 16
    assert grown < (96 << 20), f"{grown >> 20} MiB: the weights have 64, and with the optimizer's states 192"
