"""The report of `plan` agrees with itself: its tables, text and JSON, and seconds of links next to those of compute."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from test_plan import config, cpu_file

from lightning_ptm.commands import plan as planning
from lightning_ptm.commands.plan import Where, _round, forecast, forecast_config
from lightning_ptm.forecasting.prediction import Prediction, render
from lightning_ptm.forecasting.rates import LinkUse, Stall, Timing
from lightning_ptm.memory.endurance import WRITES_OF_ITS_SIZE, DiskLife
from lightning_ptm.planning.mesh import Mesh
from lightning_ptm.terms import Link, Operation

MIB = 1 << 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Prediction:
    folder = tmp_path_factory.mktemp("plan")
    path = config(folder, {"page_size": "64KiB", "offload_optimizer": "disk", "disk_path": str(folder)})
    return forecast(path, cpu_file(folder))[0]


@pytest.mark.parametrize(
    ("link", "busy_s", "waits_s", "words"),
    [
        (Link.DISK_READ, 11.0, 9.7, "disk read 11 s for 1 MiB, at least 9.7 s of it while nothing computes"),
        (Link.DISK_WRITE, 1.4, 0.0, "disk write 1.4 s for 1 MiB, at least 0.1 s of it while nothing computes"),
        (Link.DISK_READ, 1.3, 0.0, "disk read 1.3 s for 1 MiB"),
        (Link.DISK_READ, 0.5, 0.0, "disk read 0.5 s for 1 MiB"),
        (Link.DISK_READ, 0.5, 0.2, "disk read 0.5 s for 1 MiB"),
        (Link.HOST_TO_DEVICE, 2.0, 0.7, "at least 0.7 s of it while nothing computes"),
        (Link.DEVICE_TO_HOST, 1.0, 0.0, "device to host 1 s for 1 MiB"),
        (Link.UPDATE_HOST, 5.0, 0.0, "at least 3.7 s of it while nothing computes"),
        (Link.EXCHANGE, 0.5, 0.0, "while nothing computes"),
        (Link.TENSOR_EXCHANGE, 5.0, 0.0, "while nothing computes"),
    ],
)
def test_a_link_is_not_busy_beside_compute_for_longer_than_that_takes(
    found: Prediction, link: Link, busy_s: float, waits_s: float, words: str
) -> None:
    """All but exchanges were said to be busy while it computes."""
    timing = Timing(20.0, 1.3, (LinkUse(link, MIB, busy_s),), (Stall(Operation.UPDATE, waits_s),))
    text = render(dataclasses.replace(found, timing=timing, seconds=20.0))
    line = next(line for line in text.splitlines() if line.startswith(f"  {link.value.replace('_', ' ')} {busy_s:.4g}"))
    assert line.endswith(words)


def test_waiting_for_the_staleness_limit_is_counted_and_passes_are_said_to_be_passes(found: Prediction) -> None:
    """Seconds of a pass over the states stood beside those of a step, and the wait was in none of the lines."""
    timing = Timing(1.5, 1.3, (LinkUse(Link.DISK_READ, MIB, 44.0), LinkUse(Link.HOST_TO_DEVICE, MIB, 0.1)), ())
    late = dataclasses.replace(found, timing=timing, seconds=2.75, lock_free_s=1.25, steps_per_pass=16)
    text = render(late)
    assert "\n  disk read 44 s for 1 MiB in each pass over the states\n" in text
    assert "\n  compute waits 1.25 s for lock-free updates: a pass over the states serves up to 16 steps (" in text
    assert "lock-free" not in render(dataclasses.replace(late, steps_per_pass=None, lock_free_s=0.0))


@pytest.mark.parametrize(
    "settings", [{}, {"offload_optimizer": "disk"}, {"offload_optimizer": "disk", "lock_free": True}]
)
@pytest.mark.parametrize("hardware", ["cpu", "rtx4090"])
def test_the_sentence_and_the_lines_add_up(tmp_path: Path, settings: dict[str, Any], hardware: str) -> None:
    """On cores that also update, the sentence counted as waits whatever was not compute."""
    path = config(tmp_path, {"page_size": "64KiB", "disk_path": str(tmp_path), **settings})
    file = cpu_file(tmp_path, step_s=0.001, unit_s=0.0001) if hardware == "cpu" else hardware
    text = str(forecast(path, file)[0])
    (step,) = re.findall(r"^a step: (\S+) s$", text, re.MULTILINE)
    (compute,) = re.findall(r"^  compute (\S+) s", text, re.MULTILINE)
    waits = [float(each) for each in re.findall(r"^  compute waits (\S+) s", text, re.MULTILINE)]
    waits += [float(each) for each in re.findall(r"^  .* among ranks (\S+) s", text, re.MULTILINE)]
    other = [float(each) for each in re.findall(r"^  other work of the CPU (\S+) s", text, re.MULTILINE)]
    said = re.findall(r"; (\S+) s a step(?:, of which compute waits (\S+) s for|;|$)", text.splitlines()[0])
    assert said == [(step, said[0][1])] and float(said[0][1] or 0) == pytest.approx(sum(waits), rel=1e-3, abs=1e-8)
    assert float(compute) + sum(waits) + sum(other) == pytest.approx(float(step), rel=1e-3)


def test_bytes_written_are_said_by_step_by_folder_and_by_token(found: Prediction) -> None:
    written = dataclasses.replace(
        found, disk_written_bytes=(MIB, 3 * MIB), tokens=1024, accumulate=2, mesh=Mesh({}), disk_life=None
    )
    text = "4 MiB a step, 2 KiB a token (1 MiB, 3 MiB to the folders of disk_path)"
    assert f"\n  written to disk: {text}\n" in render(written)
    assert written.to_dict()["disk_written_bytes_per_step_and_rank"] == [MIB, 3 * MIB]
    lock_free = dataclasses.replace(written, disk_written_bytes=(MIB,), tokens=None, steps_per_pass=1)
    assert "\n  written to disk: at most 1 MiB a step\n" in render(lock_free)
    assert "written to disk" not in render(dataclasses.replace(found, disk_written_bytes=()))


def test_a_disk_that_lasts_less_than_a_month_is_in_the_first_line(found: Prediction) -> None:
    life = DiskLife(written_bytes=10**9, rated_bytes=600 * 10**12, given=True)
    written = dataclasses.replace(found, disk_written_bytes=(10**9,), disk_life=life, seconds=4.0)
    first, *others = render(written).splitlines()
    assert first.endswith("; the disk lasts 28 days of training")
    assert any(line.endswith("a token; 600 TB (disk_tbw) last 600,000 steps, 28 days") for line in others)
    assert written.to_dict()["disk_lasts_steps"] == 600_000 and written.to_dict()["disk_lasts_s"] == 2_400_000
    assert "lasts" not in render(dataclasses.replace(written, seconds=5.0)).splitlines()[0]
    assert found.to_dict()["disk_rated_bytes"] == 600 << 40  # the hardware file's disk of 1 TiB


def test_pages_of_the_table_add_up_to_all_pages(found: Prediction) -> None:
    """`pages` and `pages for` were of other pages."""
    text = render(found)
    assert "pages in use   all pages" in text and "pages by use" in text and "available" in text
    for name, tier in found.tiers.items():
        assert sum(found.pages[name].values()) == tier.reserved_bytes >= tier.page_bytes


def test_text_and_json_are_of_the_same_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Free memory changes from one command to the next by some megabytes, which do not matter."""
    path = config(tmp_path, {"page_size": "64KiB"})
    texts = iter(Path(cpu_file(tmp_path, host_memory=free)).read_text() for free in (1001 * MIB, 1022 * MIB))
    monkeypatch.setattr(planning, "quick_measure", lambda paths: next(texts))
    first, second = forecast(path, None)[0], forecast(path, None)[0]
    assert first.looked_at == second.looked_at and "992 MiB of RAM free" in first.looked_at
    assert f"looked at now: {first.looked_at}" in render(first)
    assert second.to_dict()["looked_at"] == first.looked_at
    of_text = re.search(r"^device +.* ([\d.]+ \w+)$", render(first), re.MULTILINE)
    assert of_text is not None and of_text[1] == "992 MiB"
    assert second.to_dict()["tiers_bytes_per_rank"]["device"]["have_bytes"] == 992 * MIB


def test_another_machine_is_as_its_file_says(found: Prediction) -> None:
    assert not found.looked_at and "looked at" not in render(found) and found.to_dict()["looked_at"] == ""


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000, 123_456_789, 24 << 30, (24 << 30) - 1])
def test_round_numbers(size: int) -> None:
    assert size * 15 / 16 <= _round(size) <= size and _round(_round(size)) == _round(size)


def test_a_tiny_model_takes_as_long_as_its_kernels_are_launched(tmp_path: Path) -> None:
    """Its arithmetic takes a GPU microseconds."""
    found, _ = forecast(config(tmp_path, {}), "rtx4090")
    assert found.timing is not None and found.launch_s == pytest.approx(found.timing.compute_s)
    launched = found.timing.compute_s / 10e-6 / 3  # a backward takes as long as two forwards
    assert 30 < launched < 60  # a dozen or two in each of two blocks
    assert "in units whose kernels are launched for longer than they compute" in str(found)
    assert "bottleneck: launches of kernels, busy" in str(found)
    on_cpu, _ = forecast(config(tmp_path, {}), cpu_file(tmp_path))
    assert on_cpu.launch_s == 0 and "launched" not in str(on_cpu)


_SIZES = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "TB": 10**12}
_SECONDS = {"minutes": 60, "hours": 3600, "days": 86_400, "years": 365 * 86_400}
_UNIT = r"%|[KMGT]iB|TB|B\b|[GT]FLOP/s|GB/s|minutes|hours|days|years"
_NUMBER = r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?"


def numbers_in(value: Any) -> set[float]:
    """All numbers of a JSON value, those in its texts included."""
    if isinstance(value, dict):
        return {number for name, part in value.items() for number in (*numbers_in(part), *numbers_in(name))}
    if isinstance(value, list):
        return {number for part in value for number in numbers_in(part)}
    if isinstance(value, str):
        return {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", value)}
    return set() if value is None or isinstance(value, bool) else {float(value)}


@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("optimizer", ["auto", "disk"])
@pytest.mark.usefixtures("proposes")
def test_every_number_of_the_text_is_one_of_the_json(tmp_path: Path, optimizer: str, fits: bool) -> None:
    """Sizes, seconds, counts and rates. Of a refusal because of the batch, and of one because of states."""
    settings = {"page_size": "64KiB", "offload_optimizer": optimizer, "disk_path": str(tmp_path)}
    if not fits and optimizer == "disk":
        settings["host_memory"] = "128KiB"
    found, _ = forecast_config(config(tmp_path, settings), Where(cpu_file(tmp_path)), 2 if fits else 1 << 30)
    assert found.fits is fits and (fits or found.proposals or optimizer == "disk")
    known = numbers_in(found.to_dict())
    known.add(round(100 * (found.to_dict()["share_of_matrix_rate"] or 0)))
    known.add(WRITES_OF_ITS_SIZE)
    known |= {use.busy_s - found.timing.compute_s for use in found.timing.links} if found.timing else set()
    for line in str(found).splitlines():
        for match in re.finditer(rf"({_NUMBER})(?: of [\d.]+)? ?({_UNIT})?", line):
            unit = match[2] or ""
            scale = (_SIZES | _SECONDS).get(unit) or {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "GB/s": 1e9}.get(unit, 1)
            rounded = 0.05 if unit in _SECONDS else 0.006
            number = float(match[1].replace(",", ""))  # with its unit in a number of the JSON, or as it is in a text
            near = any(abs(number * scale - each) <= rounded * abs(each) for each in known)
            assert near or number in known, (line, match[0])
