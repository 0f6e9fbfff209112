"""Programs of users around a run, on a fake CUDA device: the bits of a plain Trainer on a CPU, and no race, in several
orders. `users_program.py` describes them. LooksAside is for gradients in pages: reading others in this way breaks
torch's own rules.

`users_program.py` says what they do. LooksAside is for gradients in pages: who looks at others so breaks torch's own rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from fake_process import ORDERS, need_fake_device, on_fake

pytestmark = pytest.mark.timeout(600)
SEEDS = (1, 2, 3)
KINDS = [
    *(
        "ChangesAside",
        "AssignsAside",
        "HooksAside",
        "UnitsAside",
        "StepsAside",
        "GoesOnAside",
        "PassesOfOneGraph",
        "TwoGraphs",
    ),
    *(
        "AllAside",
        "LeavesAside",
        "ReadsWeightsAside",
        "FitsAside",
        "LoadsAndSkips",
        "Breaks in the forward",
        "Breaks in the backward",
    ),
    *("Breaks behind the backward", "Breaks before the step", "Breaks behind the step"),
]
HOMES = ("device", "masters in RAM", "host", "masters on disk", "all on disk")
QUICK = [
    "LooksAside:all on disk",
    "AssignsAside:all on disk",
    "AllAside:host",
    "LeavesAside:device",
    "StepsAside:all on disk:host",
    "Breaks behind the backward:host",
    "LoadsAndSkips:device",
]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    need_fake_device()


def check(cases: Sequence[str], folder: Path, **variables: str) -> None:
    done = on_fake(str(Path(__file__).with_name("users_program.py")), str(folder), *cases, limit_s=580, **variables)
    expected = "".join(f"{case}: ok\n" for case in cases)
    assert done.returncode == 0 and done.stdout == expected, done.stdout + done.stderr[-6000:]


def test_few_users_have_the_bits_of_a_cpu_and_no_race(tmp_path: Path) -> None:
    check(QUICK, tmp_path, **ORDERS["late"])


@pytest.mark.slow
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("seed", SEEDS)
def test_users_have_the_bits_of_a_cpu_and_no_race(seed: int, home: str, tmp_path: Path) -> None:
    kinds = KINDS if home == "device" else ["LooksAside", *KINDS]
    check([f"{kind}:{home}" for kind in kinds], tmp_path, FAKE_CUDA_DEFER="rand", FAKE_CUDA_SEED=str(seed))


@pytest.mark.slow
@pytest.mark.parametrize("home", ["device", "host", "all on disk"])
@pytest.mark.parametrize("activations", ["host", "recomputed"])
def test_users_with_activations_in_ram_have_them_too(activations: str, home: str, tmp_path: Path) -> None:
    check([f"{kind}:{home}:{activations}" for kind in KINDS], tmp_path, **ORDERS["random"])


@pytest.mark.slow
def test_users_of_lock_free_updates_without_staleness_have_them_too(tmp_path: Path) -> None:
    check([f"{kind}:host:lock-free" for kind in KINDS], tmp_path, **ORDERS["random"])
