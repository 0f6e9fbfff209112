"""Weights that are streamed to a consumer: all of them, equal to the state dict, with one flat of them in RAM at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.fits import fit
from kit.models import Linears
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.errors import UsageError


class Streams(L.Callback):
    """A consumer of the weights after the second batch, and what the module's state dict has there."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        self.dtype = dtype
        self.received: dict[str, Tensor] = {}
        self.expected: dict[str, Tensor] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            for name, value in trainer.strategy.stream_weights(self.dtype):
                assert name not in self.received
                self.received[name] = value.clone()
            self.expected = {name: value.clone() for name, value in module.state_dict().items()}


class Tied(Linears):
    """Two names for one weight, a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__(seed=1)
        self.blocks[2].weight = self.blocks[0].weight
        self.register_buffer("seen", torch.arange(3.0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def _fit(module: Linears, strategy: Any, callback: L.Callback, width: int = 64, **options: Any) -> None:
    data = DataLoader(torch.randn(6, width), batch_size=2)
    fit(module, data, strategy, callbacks=[callback], **{"max_epochs": 1, **options})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("tier", ["ram", "all_on_disk", "tight", "lock_free_three_tiers"])
def test_the_values_of_the_state_dict(strategy_at: Any, tier: str, precision: Any) -> None:
    streams = Streams()
    _fit(Tied(), strategy_at(tier), streams, precision=precision)
    assert streams.expected.keys() - streams.received.keys() == {"blocks.2.weight"}  # tied, streamed once
    assert streams.received.keys() <= streams.expected.keys()
    for name, value in streams.received.items():
        assert value.dtype is streams.expected[name].dtype and torch.equal(value, streams.expected[name]), name


def test_in_a_dtype(strategy_at: Any) -> None:
    streams = Streams(torch.bfloat16)
    _fit(Linears(seed=1), strategy_at("ram"), streams)
    assert {value.dtype for value in streams.received.values()} == {torch.bfloat16}
    assert all(torch.equal(value, streams.expected[name].bfloat16()) for name, value in streams.received.items())


class Wide(Linears):
    """24 units of 4 MiB in fp32."""

    def __init__(self) -> None:
        super().__init__(width=1024, count=24, seed=1)


class Peak(L.Callback):
    """Measures how much the resident memory grows while an engine takes the weights."""

    grown = 0

    def on_train_end(self, trainer: Any, module: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmHWM")
        assert sum(value.nbytes for _, value in trainer.strategy.stream_weights()) == 24 * 4100 * 1024 + 8 * 4100
        self.grown = _status_bytes("VmHWM") - before


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name))


def test_ram_holds_few_units_at_a_time(strategy_at: Any) -> None:
    peak = Peak()
    strategy = strategy_at("all_on_disk", page_size="1MiB", debug={"poison": False})
    _fit(Wide(), strategy, peak, width=1024, limit_train_batches=1)
    assert peak.grown < 24 << 20, f"{peak.grown >> 20} MiB, of 96 MiB of weights in units of 4"


def _call_the_module(module: nn.Module, strategy: Any) -> None:
    for count, _ in enumerate(strategy.stream_weights()):
        if count == 1:
            with strategy.gathered(module, write=False):
                module(torch.zeros(1, 64))


def _inside_of_gathered(module: nn.Module, strategy: Any) -> None:
    with strategy.gathered(module):
        list(strategy.stream_weights())


@pytest.mark.parametrize(
    ("use", "words"),
    [(_call_the_module, "computed while its weights were streamed"), (_inside_of_gathered, "inside of `with strategy")],
)
def test_what_would_mix_two_steps_is_refused(
    strategy_at: Any, use: Callable[[nn.Module, Any], None], words: str
) -> None:
    class Uses(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            use(module, trainer.strategy)

    with pytest.raises(UsageError, match=words):
        _fit(Linears(seed=1), strategy_at("all_on_disk"), Uses())


def test_it_needs_a_run(strategy_at: Any) -> None:
    with pytest.raises(UsageError, match="needs a run in progress"):
        strategy_at("ram").stream_weights()
