"""Kinds of adapters of peft, alone and several at a time: where RAM has no room for the base model at the end of a run, all
that a plain Trainer's module would save of those that train is saved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from kit.judged import MakeStrategy
from kit.twins import quietly, trainer, vectors
from safetensors.torch import load_file
from test_little_ram import Net, Ram, Some, build_of, fit, least_room, numbers, ram, room_for_trained  # noqa: F401

from lightning_ptm.errors import UsageError

peft = pytest.importorskip("peft")

BLOCKS = r"blocks\.\d+"


class With(Some):
    """A model with adapters."""

    def __init__(self, kind: str = "Lora", more: Callable[[Any], None] = lambda net: None, **settings: Any) -> None:
        L.LightningModule.__init__(self)
        self.losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = getattr(peft, f"{kind}Config")(**{"target_modules": BLOCKS, **settings})
            self.net = peft.get_peft_model(self.base(), config)
            more(self.net)

    def base(self) -> Any:
        return Net()

    def forward(self, x: Any) -> Any:
        return self.net(x)


def second(net: Any) -> None:
    """Another adapter trains; the first stays as it is."""
    net.add_adapter("second", peft.LoraConfig(r=2, target_modules=BLOCKS))
    net.set_adapter("second")


def both(net: Any) -> None:
    net.add_adapter("second", peft.LoraConfig(r=2, target_modules=BLOCKS))
    net.base_model.set_adapter(["default", "second"])


KINDS: dict[str, Callable[[], Some]] = {
    "two, one of which trains": lambda: With(more=second),
    "two that train": lambda: With(more=both),
    "all biases": lambda: With(bias="all"),
    "biases of adapted layers": lambda: With(bias="lora_only"),
    "with a bias of its own": lambda: With(lora_bias=True),
    "PiSSA": lambda: With(init_lora_weights="pissa"),
    "OLoRA": lambda: With(init_lora_weights="olora"),
    "of rank scale": lambda: With(use_rslora=True),
    "DoRA and a head": lambda: With(use_dora=True, modules_to_save=["head", "stem"]),
    "one layer": lambda: With(target_modules=["blocks.1"]),
    "AdaLoRA": lambda: With("AdaLora", total_step=9, init_r=4, target_r=2),
    "LoHa": lambda: With("LoHa"),
    "LoKr": lambda: With("LoKr"),
    "OFT": lambda: With("OFT", oft_block_size=6),
    "BOFT": lambda: With("BOFT", boft_block_size=6),
    "VeRA": lambda: With("Vera", r=8),
    "FourierFT": lambda: With("FourierFT", n_frequency=10),
    "HRA": lambda: With("HRA"),
    "VBLoRA": lambda: With("VBLoRA", num_vectors=8, vector_length=6),
    "RandLoRA": lambda: With("RandLora", r=8),
    "MiSS": lambda: With("Miss", r=6),
    "layer norms": lambda: With("LNTuning"),
    "C3A": lambda: With("C3A", block_size=6),
    "SHiRA": lambda: With("Shira", r=2),
    "WaveFT": lambda: With("WaveFT", n_frequency=10),
    "RoAd": lambda: With("Road", group_size=2),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_is_saved(
    strategy_at: MakeStrategy,
    ram: Ram,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    tmp_path: Path,
) -> None:
    for name in ("CC", "CXX"):  # peft sets them for BOFT's kernels
        monkeypatch.setenv(name, "gcc")
    build = KINDS[kind]
    expected = build_of(build)
    with quietly():
        trainer(None).fit(expected, vectors())
        expected.net.save_pretrained(tmp_path / "theirs")
    module = build_of(build)
    ram(room_for_trained(module))
    chosen, told = fit(module, strategy_at("all_on_disk"), tmp_path)
    assert any("gets only its trained weights back" in each and "selected_adapters" in each for each in told), told
    trains = [] if kind != "two, one of which trains" else ["second"]
    with quietly():
        if trains:
            with pytest.raises(UsageError, match=r"lora_A.default.*RAM had no room.*make more RAM available"):
                module.net.save_pretrained(tmp_path / "all")
        module.net.save_pretrained(tmp_path / "ours", selected_adapters=trains or None)
    names = [
        str(each.relative_to(tmp_path / "theirs")) for each in sorted((tmp_path / "theirs").rglob("*.safetensors"))
    ]
    names = [name for name in names if not trains or name.startswith("second")]
    assert names
    for name in names:
        ours, theirs = load_file(tmp_path / "ours" / name), load_file(tmp_path / "theirs" / name)
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            assert torch.equal(ours[key], value), (name, key)
    chosen.save_checkpoint(tmp_path / "after.ckpt", weights_only=True)
    saved = torch.load(tmp_path / "after.ckpt")["state_dict"]
    for name, value in numbers(expected, trained=True).items():
        assert torch.equal(saved[name], value), name
