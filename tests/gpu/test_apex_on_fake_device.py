"""Our models with NVIDIA Apex's kernels (a stand-in of them) on the fake device: Apex's AdamW is tried where updates run."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_process import need_fake_device, on_fake

PROGRAM = Path(__file__).with_name("apex_program.py")


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Returns the outcome of each run."""
    need_fake_device()
    done = on_fake(str(PROGRAM), str(tmp_path_factory.mktemp("pages")), FAKE_CUDA_DEFER="1")
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_updates_on_the_device_are_apexs_with_the_numbers_of_a_plain_trainer(became: dict[str, str]) -> None:
    whose = "trained 3 steps; GPT has norms of Apex and an optimizer of Apex (kernels='apex')"
    assert became["plain"] == became["device"] == became["device, masters"] == whose
    assert became["bits"] == "those of the plain Trainer"


@pytest.mark.parametrize("home", ["host", "disk"])
def test_updates_in_ram_are_refused_before_training(became: dict[str, str], home: str) -> None:
    assert became[home].startswith("refused: ") and "FusedAdam" in became[home], became[home]
    assert "set offload_optimizer='device'" in became[home]


def test_other_choices_train_wherever_states_are(became: dict[str, str]) -> None:
    assert became["host, auto"].endswith("GPT has norms of Apex and an optimizer of torch (kernels='auto')")
    assert became["device, torch"].endswith("GPT has norms of torch and an optimizer of torch (kernels='torch')")
