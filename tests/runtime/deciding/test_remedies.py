"""Pages stay within the settings, and a refusal names values with which the plan fits."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from decided_by_hand import PAGE, WORKSTATION, asked, decided

from lightning_ptm.comm import SoloCommunicator
from lightning_ptm.config import LockFree, Settings, Tuning, parse_bytes
from lightning_ptm.errors import CapacityError
from lightning_ptm.planning.inventory import What
from lightning_ptm.runtime.deciding import specs, unpaged_optimizers
from lightning_ptm.runtime.deciding.decide import decide, decide_here
from lightning_ptm.runtime.deciding.remedies import with_remedies
from lightning_ptm.terms import Tier

ON_DISK = {"disk_path": "/d", "offload_optimizer": "disk"}


@pytest.mark.parametrize(
    "settings",
    [ON_DISK, {**ON_DISK, "offload_parameters": "disk"}, {"disk_path": "/d", "lock_free": True}],
    ids=["optimizer", "all", "lock_free"],
)
def test_pages_in_ram_stay_within_host_memory(settings: dict[str, Any]) -> None:
    """Also those through which states on disk are read and saved."""
    fitted = 0
    for pages in range(4, 60):
        try:
            found = decided(host_memory=pages * PAGE, **settings)
        except CapacityError:
            assert not fitted, "more memory is refused than less"
            continue
        fitted += 1
        assert found.inventory.pool_bytes(Tier.DEVICE) <= pages * PAGE
        assert found.inventory.of(What.TRANSIT)
    assert fitted > 10


def test_files_stay_within_disk_memory() -> None:
    with pytest.raises(CapacityError, match="raise disk_memory"):
        decided(disk_memory=PAGE // 2, **ON_DISK)
    least = decided(**ON_DISK).inventory.pool_bytes(Tier.DISK)
    assert decided(disk_memory=least, **ON_DISK).inventory.pool_bytes(Tier.DISK) == least


def test_a_file_of_whole_pages_is_not_longer_than_disk_memory() -> None:
    """States that fit into disk_memory themselves, but not in whole pages."""
    least = decided(**ON_DISK).inventory.pool_bytes(Tier.DISK)
    with pytest.raises(CapacityError, match=r"(raise|take .* on disk).*disk_memory"):
        decided(disk_memory=least - 1, **ON_DISK)


def refusal(settings: dict[str, Any]) -> str:
    request = asked(**settings)
    with pytest.raises(CapacityError) as caught:
        decide(request, WORKSTATION, 1)
    return str(with_remedies(caught.value, request, WORKSTATION, partial(decide, world_size=1)))


def changes(message: str) -> list[dict[str, Any]]:
    """The settings that a refusal proposes."""
    proposed = message.partition("; another plan would fit with ")[2]
    words = {
        name: partial(parse_bytes, name=name) for name in ("device_memory", "host_memory", "disk_memory", "page_size")
    }
    found: list[dict[str, Any]] = [
        {name: words[name](size)} for name, size in re.findall(r"(?:^|with )(\w+)='(\w+)'", proposed) if name in words
    ]
    return found + [{"tuning": eval(each, {"Tuning": Tuning})} for each in re.findall(r"Tuning\(.*?\)", proposed)]


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"host_memory": 4 * PAGE}, {"host_memory"}),
        ({"host_memory": 30 * PAGE, "page_size": 4 * PAGE, **ON_DISK}, {"host_memory", "page_size"}),
        (
            {"host_memory": 60 * PAGE, "page_size": 4 * PAGE, **ON_DISK, "lock_free": LockFree()},
            {"host_memory", "page_size"},
        ),
        ({"disk_memory": PAGE, **ON_DISK}, {"disk_memory"}),
        ({"device_memory": 2 * PAGE, "offload_parameters": "host"}, {"device_memory"}),
    ],
)
def test_a_refusal_names_values_that_fit(settings: dict[str, Any], names: set[str]) -> None:
    message = refusal(settings)
    found = changes(message)
    assert names <= {name for each in found for name in each}, message
    for each in found:
        decided(**{**settings, **each})
    for name in names & {"host_memory", "disk_memory", "device_memory"}:
        assert f"({name})" in message
        (value,) = (each[name] for each in found if name in each)
        page = int(settings.get("page_size", PAGE))
        with pytest.raises(CapacityError):
            decided(**{**settings, name: value - page})


def test_less_staging_is_proposed_where_it_suffices() -> None:
    """Staging of one chunk."""
    for pages in range(8, 40):
        request = asked(host_memory=pages * PAGE, **ON_DISK)
        try:
            decide(request, WORKSTATION, 1)
        except CapacityError:
            message = refusal({"host_memory": pages * PAGE, **ON_DISK})
            if "tuning=" in message:
                break
    else:
        pytest.fail("no refusal proposes less staging")
    (tuning,) = (each["tuning"] for each in changes(message) if "tuning" in each)
    decided(host_memory=pages * PAGE, **ON_DISK, tuning=tuning)


def test_a_run_is_refused_with_them(tmp_path: Path) -> None:
    request = asked()
    settings = Settings(page_size=PAGE, host_memory=2 * PAGE)
    with pytest.raises(
        CapacityError, match=r"Pages may take 128 KiB in RAM \(host_memory\); .* fit with host_memory='"
    ):
        decide_here(dataclasses.replace(request, settings=settings), SoloCommunicator(), 1)


def test_an_optimizer_is_tried_once_for_all_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    probe = specs.probe

    def counted(*args: Any, **how: Any) -> Any:
        tried.append(how)
        return probe(*args, **how)

    monkeypatch.setattr(specs, "probe", counted)
    monkeypatch.setattr(unpaged_optimizers, "probe", counted)
    request = asked(disk_path=str(tmp_path), offload_optimizer="disk", host_memory=2 * PAGE)
    with pytest.raises(CapacityError, match="fit with host_memory='"):
        decide_here(request, SoloCommunicator(), 1)
    assert len(tried) == 1
