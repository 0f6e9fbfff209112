"""Answers to one question on machines that differ in one number."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from lightning_ptm.commands.plan import forecast

CONFIGS = Path(__file__).parents[2] / "configs"
MIB = 1 << 20


def planned(folder: Path, *, layers: int, clip: float | None, device: int, ram: int) -> tuple[float, int]:
    """Seconds of a step of a small GPT, and the bytes of a device of `device` MiB that it takes, with `ram` MiB of RAM."""
    model = yaml.safe_load((CONFIGS / "gpt.yaml").read_text())
    model["trainer"]["gradient_clip_val"] = clip
    model["model"]["init_args"]["layers"] = layers
    machine = yaml.safe_load((CONFIGS / "hardware" / "laptop.yaml").read_text())
    machine["device_memory"], machine["with_devices"][1]["host_memory"] = device * MIB, ram * MIB
    for name, document in (("model.yaml", model), ("machine.yaml", machine)):
        (folder / name).write_text(yaml.safe_dump(document))
    settings = {"page_size": "64KiB", "disk_path": str(folder)}
    found, _ = forecast(folder / "model.yaml", str(folder / "machine.yaml"), 1, 1, settings)
    assert found.fits and found.seconds is not None
    return found.seconds, found.tiers["device"].taken_bytes


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(("layers", "device"), [(4, 24), (8, 40)])
def test_with_more_ram_a_step_is_never_slower(tmp_path: Path, layers: int, device: int, clip: float | None) -> None:
    """The first step, in the least layout, may keep other gradients in `.grad`; later ones have the same room."""
    found = [planned(tmp_path, layers=layers, clip=clip, device=device, ram=ram)[0] for ram in (8, 16, 32, 64, 256)]
    assert found == sorted(found, reverse=True)


def test_gradients_that_clipping_keeps_on_the_device_are_counted_once(tmp_path: Path) -> None:
    """Where all states fit, they are all there."""
    assert planned(tmp_path, layers=4, clip=1.0, device=40, ram=16) == (
        pytest.approx(planned(tmp_path, layers=4, clip=None, device=40, ram=16)[0]),
        pytest.approx(39 * MIB, rel=0.02),
    )
