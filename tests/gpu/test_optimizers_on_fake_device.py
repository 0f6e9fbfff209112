"""An optimizer is tried where its updates run: what works on a device alone, or in RAM alone, is refused elsewhere."""

from __future__ import annotations

from pathlib import Path

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


Outcomes = dict[tuple[str, str], str]


def test_each_class_is_tried_where_its_updates_run(tmp_path: Path) -> None:
    """In one test, as the runs take a minute and several processes share the tests of a file."""
    became = outcomes(tmp_path)
    for name in NEEDS_DEVICE:
        check_class_that_needs_a_device(became, name)
    for name in NEEDS_DEVICE_WITHOUT_STATES:
        check_class_without_states(became, name)
    check_class_that_needs_ram(became)
    assert {what for (name, _), what in became.items() if name == "anywhere"} == {"trained"}


def outcomes(folder: Path) -> Outcomes:
    """Returns the outcome of each run, by class and homes."""
    need_fake_device()
    done = on_fake(str(PROGRAM), str(folder), FAKE_CUDA_DEFER="1")
    assert done.returncode == 0, done.stderr[-4000:]
    found = {}
    for line in done.stdout.splitlines():
        case, _, what = line.partition(": ")
        name, _, home = case.partition(", ")
        found[name, home] = what
    return found


def check_class_that_needs_a_device(became: Outcomes, name: str) -> None:
    assert became[name, "device"] == "trained"
    assert became[name, "auto, with room"] == "trained"
    for home in ("host", "disk"):
        assert became[name, home].startswith("refused, weights kept: "), became[name, home]
        assert f"{TO_DEVICE}offload_optimizer='device'" in became[name, home]
    assert f"{TO_DEVICE}lock_free=False and offload_optimizer='device'" in became[name, "lock-free"]
    where_little_fits = became[name, "auto, without"]
    assert where_little_fits == "trained" or "refused, weights kept: " in where_little_fits


def check_class_without_states(became: Outcomes, name: str) -> None:
    """It is updated where its parameters are."""
    for home in ("device", "host", "disk", "auto, with room"):
        assert became[name, home] == "trained" or TO_DEVICE in became[name, home], (home, became[name, home])
    assert became[name, "device"] == became[name, "auto, with room"] == "trained"
    assert f"{TO_DEVICE}lock_free=False and offload_optimizer='device'" in became[name, "lock-free"]


def check_class_that_needs_ram(became: Outcomes) -> None:
    """Where the choice is open, masters are in RAM."""
    for home in ("host", "disk", "lock-free", "auto, with room", "auto, without"):
        assert became["ram", home] == "trained", home
    assert became["ram", "device"].startswith("refused, weights kept: ") and TO_RAM in became["ram", "device"]
