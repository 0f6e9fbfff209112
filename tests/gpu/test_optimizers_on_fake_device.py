"""An optimizer is tried where its updates run: what works on a device alone, or in RAM alone, is refused elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_process import need_fake_device, on_fake

PROGRAM = Path(__file__).with_name("optimizers_program.py")
NEEDS_DEVICE = ("device", "counts", "asserts", "capturable")
NEEDS_DEVICE_WITHOUT_STATES = ("stateless", "whole")
TO_DEVICE = (
    ". Updates run on the CPU here, since master weights and optimizer states are in RAM or on disk; if the class needs "
    "tensors on cuda:0, set "
)
TO_RAM = (
    ". Updates run on cuda:0 here, where master weights and optimizer states are; if the class needs tensors in RAM, set "
    "offload_optimizer='host'"
)


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], str]:
    """Returns the outcome of each run, by class and homes."""
    need_fake_device()
    done = on_fake(str(PROGRAM), str(tmp_path_factory.mktemp("pages")), FAKE_CUDA_DEFER="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        case, _, what = line.partition(": ")
        name, _, home = case.partition(", ")
        found[name, home] = what
    return found


@pytest.mark.parametrize("name", NEEDS_DEVICE)
def test_classes_that_need_a_device(became: dict[tuple[str, str], str], name: str) -> None:
    assert became[name, "device"] == "trained"
    assert became[name, "auto, with room"] == "trained"
    for home in ("host", "disk"):
        assert became[name, home].startswith("refused, weights kept: "), became[name, home]
        assert f"{TO_DEVICE}offload_optimizer='device'" in became[name, home]
    assert f"{TO_DEVICE}lock_free=False and offload_optimizer='device'" in became[name, "lock-free"]
    where_little_fits = became[name, "auto, without"]
    assert where_little_fits == "trained" or "refused, weights kept: " in where_little_fits


@pytest.mark.parametrize("name", NEEDS_DEVICE_WITHOUT_STATES)
def test_classes_without_states_are_updated_where_parameters_are(became: dict[tuple[str, str], str], name: str) -> None:
    for home in ("device", "host", "disk", "auto, with room"):
        assert became[name, home] == "trained" or TO_DEVICE in became[name, home], (home, became[name, home])
    assert became[name, "device"] == became[name, "auto, with room"] == "trained"
    assert f"{TO_DEVICE}lock_free=False and offload_optimizer='device'" in became[name, "lock-free"]


def test_a_class_that_needs_ram(became: dict[tuple[str, str], str]) -> None:
    """Where the choice is open, masters are in RAM."""
    for home in ("host", "disk", "lock-free", "auto, with room", "auto, without"):
        assert became["ram", home] == "trained", home
    assert became["ram", "device"].startswith("refused, weights kept: ") and TO_RAM in became["ram", "device"]


def test_a_class_that_works_anywhere(became: dict[tuple[str, str], str]) -> None:
    assert {what for (name, _), what in became.items() if name == "anywhere"} == {"trained"}
