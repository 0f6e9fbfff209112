"""Weights that are streamed to a consumer: all of them, equal to the state dict, with one flat of them in RAM at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import xxhash
from kit.fits import fit, quiet_trainer
from kit.models import Linears
from safetensors.torch import save_file
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


class Wider(L.LightningModule):
    """1.2 billion parameters in 24 units of 96 MiB in 16 bits, on the meta device; it never computes."""

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            with torch.device("meta"):
                self.blocks = nn.ModuleList(nn.Linear(4096, 12288, bias=False) for _ in range(24))

    def validation_step(self, batch: Tensor, index: int) -> None:
        """Computes nothing."""


class FakeEngine(L.Callback):
    """A fake inference engine: it keeps the checksums of what it receives, and no tensor."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}
        self.grown = 0

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmHWM")
        for name, value in trainer.strategy.stream_weights():
            assert value.dtype is torch.bfloat16
            self.checksums[name] = _checksum(value)
            del value
        self.grown = _status_bytes("VmHWM") - before


def _checksum(value: Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(value.view(torch.uint8).numpy())


@pytest.mark.slow
def test_a_fake_engine_gets_a_billion_weights_from_disk_with_a_unit_of_ram(strategy_at: Any, tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    written: dict[str, str] = {}
    for index in range(24):
        name = f"blocks.{index}.weight"
        value = torch.randn(12288, 4096, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(index))
        written[name] = _checksum(value)
        save_file({name: value}, weights / f"{index:02}.safetensors")
    del value
    files = {f"blocks.{index}.weight": f"{index:02}.safetensors" for index in range(24)}
    (weights / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    engine = FakeEngine()
    settings = {"page_size": "4MiB", "debug": {"poison": False}, "weights": weights, "host_memory": "1GiB"}
    trainer = quiet_trainer(strategy_at("all_on_disk", **settings), precision="bf16-true", callbacks=[engine])
    trainer.validate(Wider(), DataLoader(torch.zeros(1, 1)), verbose=False)
    assert engine.checksums == written
    unit = 2 * 4096 * 12288
    assert engine.grown < 1.25 * unit, f"{engine.grown / unit:.2f} units of {unit >> 20} MiB"
