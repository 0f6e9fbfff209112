"""The benchmarks' cases: figures of the docs are those of a case, LOG.md has the last of each, and a case runs."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
import runpy
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import log, race, runner, tables
from benchmarks.case import Case, Figure, Scores, Setup
from benchmarks.cases import (
    CASES,
    OF_README,
    OF_VERSIONS,
    activations,
    checkpoints,
    disk,
    in_memory,
    lock_free,
    long_text,
    parts,
    planner,
    ranking,
    ranks,
    slices,
    stages,
)
from benchmarks.earlier_settings import EARLIER_NAMES, for_version
from benchmarks.race import Race, Score, Side, SideError, SkipCase, Turn
from lightning_ptm.config import Settings
from lightning_ptm.setting_hints import EARLIER

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "benchmarks" / "README.md"]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
FAMILIES = {name.partition("-")[0] for name in CASES}
NAME = re.compile(r"`([a-z_]+(?:-[\w.]+)*)`")
MEASURED = re.compile(
    r"\d(?:\.\d+)? (?:times|x\b)|\d\.\d+ of (?:the|its|one) |\d (?:GB/s|tokens/s|ms)\b|\btook \d|\d (?:Nov|November)\b"
)
"""Text that tells what something took, in time or memory."""
NOT_MEASURED = (
    "was called 1024 times with gradients",  # a limit, in an error
    "10 to 100 times",  # of arithmetic that a processor lacks, in text about the setting
    "times as much |",  # settings.md: counted from bytes a parameter
    "section 4.3 of the paper",
    "The predictions assume 165 TFLOP/s",  # choose_settings.md: what the planner was given
    "7 billion take 28 s each way",  # faq.md: bytes by rate
    "Only speculation could be faster",  # update_overlap_bound.md derives a bound
    "600 times the size of the disk is assumed",  # planner.md: ratings by data sheets
    "600 times its size",  # settings.md: the same
    "GiB, 3 GB/s |",  # clipping_that_waits.md: predictions
    "GiB, 6 GB/s |",  # the same
    "For all states it does not pay",  # the same
)


def paragraphs(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [" ".join(each.split()) for each in re.split(r"\n\s*\n|\n(?=\* |\| )", text)]


def cited(page: Path) -> set[str]:
    """Names in backticks that are of cases by their form, or follow the word."""
    text = " ".join(page.read_text().split())
    found = {name for name in NAME.findall(text) if "-" in name and name.partition("-")[0] in FAMILIES}
    return found | set(re.findall(r"\bcases? `([^`]+)`", text))


# -- pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_cases_that_pages_name_exist(page: Path) -> None:
    assert cited(page) <= CASES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_measured_figures_name_their_case_or_test(page: Path) -> None:
    if page.stem in ("paper", "measured") or page.parent.name == "benchmarks":
        return  # predictions; a table that tables.py makes; bars
    for text in paragraphs(page):
        if MEASURED.search(text) and not any(words in text for words in NOT_MEASURED):
            named = any(name in CASES for name in NAME.findall(text)) or re.search(r"`tests/[\w/]+\.py`", text)
            assert named, f"{page.name} has a measured figure without a case: {text}"


def test_every_case_is_cited() -> None:
    sources = [*(ROOT / "lightning_ptm").rglob("*.py"), *PAGES[:2], *PAGES[3:]]
    text = "\n".join(page.read_text() for page in sources)
    uncited = {name for name in CASES if f"`{name}`" not in text and name not in OF_VERSIONS}
    assert not uncited


def test_pages_name_no_scripts_and_no_raw_results() -> None:
    for page in PAGES:
        scripts = set(re.findall(r"benchmarks/(\w+\.py)", page.read_text()))
        assert scripts <= {"gpu.py"}, page
    ignored = (ROOT / "benchmarks" / ".gitignore").read_text().split()
    assert "results/" in ignored


def test_the_log_is_not_in_the_site() -> None:
    pages = runpy.run_path(str(ROOT / "docs" / "conf.py"))["PAGES"]
    assert "benchmarks/LOG.md" not in pages
    assert not any(re.search(r"\(\S*\bLOG\.md\)", page.read_text()) for page in PAGES)


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.stem)
def test_tables_of_pages_are_those_of_the_log(page: Path) -> None:
    """If this fails: `python -m benchmarks readme --no-run`."""
    assert tables.written(page) == page.read_text()


def test_the_tables_have_the_cases_of_the_readme() -> None:
    assert {line.case for line in tables.README} == set(OF_README)
    assert set(OF_VERSIONS) <= CASES.keys()
    modules = [
        in_memory,
        ranks,
        disk,
        activations,
        lock_free,
        checkpoints,
        planner,
        ranking,
        parts,
        long_text,
        slices,
        stages,
    ]
    assert sum(len(module.CASES) for module in modules) == len(CASES)  # no id twice


# -- figures --------------------------------------------------------------------------------------------------------------


def scores_of(case: Case, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Scores:
    """Turns that say nothing, of all sides that the case can have."""
    monkeypatch.setattr(disk, "installed_deepspeed", lambda *, on_disk: sys.executable)
    monkeypatch.setattr(parts.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(Setup, "memory_cap", lambda setup, cap_bytes, name: "")
    monkeypatch.setattr(Setup, "two_namespaces", lambda setup, rate: [])
    sides = case.sides(Setup(folder, True, 2, {}, contextlib.ExitStack()))
    extra: Any = defaultdict(lambda: 1.0)
    turn = Turn(1, 1.0, 1.0, 1.0, 2**20, 2**20, 2**20, 1, extra)
    # No two steps are equally long: numbers are ranked.
    turns = [dataclasses.replace(turn, seconds=1.0 + place) for place in range(len(sides))]
    return {side.name: Score(side.name, (each,)) for side, each in zip(sides, turns, strict=True)}


@pytest.mark.parametrize("case", [case for case in CASES.values() if case.id != "callbacks"], ids=lambda case: case.id)
def test_rows_of_the_log_and_of_tables_are_figures_of_their_case(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = itertools.count(1.0)
    monkeypatch.setattr(planner, "planned_s", lambda options, probe, folder: next(seconds))
    found = [figure.name for figure in case.figures(scores_of(case, tmp_path, monkeypatch))]
    assert found and len(set(found)) == len(found)
    logged = {row.figure for row in log.rows() if row.case == case.id}
    assert {name for name in logged if not re.search(r" over [0-9a-f]{7,}$", name)} <= set(found)
    lines = {line.figure for page in tables.PAGES.values() for line in page if line.case == case.id}
    assert lines <= set(found)
    assert not case.figures({})  # nothing, if the sides that it needs did not run


def test_a_machine_without_network_namespaces_skips_their_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no `ip`
    with pytest.raises(SkipCase, match="no network namespaces: ip netns add"), contextlib.ExitStack() as ends:
        CASES["two_batches_network"].sides(Setup(tmp_path, True, 2, {}, ends))


def test_rows_are_of_cases() -> None:
    rows = log.rows()
    assert {row.case for row in rows} <= {*CASES, "gpu"}
    assert len({(row.case, row.figure) for row in rows}) == len(rows)
    for row in rows:
        assert row.case == "gpu" or row.tokens in ("-", str(CASES[row.case].tokens_per_step)), row


def test_a_bar_is_met_at_its_limit() -> None:
    assert Figure("speed", 1.0, "s", 1.0, 1.15, 1.15).met and not Figure("speed", 1.0, "s", 1.0, 1.14, 1.15).met
    assert Figure("step", 1.0, "s", 1.0, 1.05, 1.05, at_least=False).bar == "<= 1.05, met"
    assert Figure("step", 1.0, "s", 1.0, 1.06, 1.05, at_least=False).bar == "<= 1.05, missed"
    assert Figure("step", 1.0, "s").met is None and Figure("step", 1.0, "s").bar == "-"


def test_a_new_row_takes_the_place_of_the_last(tmp_path: Path) -> None:
    path = tmp_path / "LOG.md"
    path.write_text(f"Above.\n\n{log.HEADING}\n")

    def row(case: str, figure: str, ours: str) -> log.Row:
        return log.Row(case, figure, ours, "-", "-", "-", "64", "a machine", "abc", "2026-11-26 08:00", "load 0.10")

    log.put([row("b", "step", "1 s"), row("a", "step", "2 s")], ["a", "b"], path)
    log.put([row("b", "step", "3 s"), row("b", "speed", "4 s")], ["a", "b"], path)
    assert [(each.case, each.figure, each.ours) for each in log.rows(path)] == [
        ("a", "step", "2 s"),
        ("b", "step", "3 s"),
        ("b", "speed", "4 s"),
    ]
    assert path.read_text().startswith("Above.\n")


# -- other versions -------------------------------------------------------------------------------------------------------


def test_settings_get_their_earlier_names() -> None:
    assert set(EARLIER_NAMES.values()) == set(EARLIER) - {"matmul_precision"} | {"weights"}
    flat = {*EARLIER_NAMES.values(), "page_size", "disk_path", "lock_free", "weights"}
    settings = {
        "page_size": "8MiB",
        "offload_optimizer": "disk",
        "offload_activations": "none",
        "lock_free": {"max_staleness": 16},
        "checkpoints": {"state_dict_type": "sharded", "on_failure": "warn"},
        "tuning": {"restore_weights": False, "matmul_precision": "fp32"},
    }
    assert for_version(settings, flat) == {
        "page_size": "8MiB",
        "master_home": "disk",
        "activations": "keep",
        "lock_free": True,
        "max_staleness": 16,
        "state_dict_type": "sharded",
        "failed_save": "go_on",
        "restore_weights": False,
        "half_products": "fp32",
    }
    assert for_version({"lock_free": False}, flat) == {"lock_free": False}
    with pytest.raises(ValueError, match=r"no setting for tuning.unheard_of=1"):
        for_version({"tuning": {"unheard_of": 1}}, flat)
    assert for_version(settings, Settings.__dataclass_fields__) == settings


# -- races ----------------------------------------------------------------------------------------------------------------


def test_a_case_runs_in_processes_that_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runner, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    before = log.LOG.read_text()
    (figure,) = runner.run_case(CASES["experts"], runner.Wanted(quick=True, disk=tmp_path))
    assert figure.name == "speed over dense" and figure.ours > 0 and figure.ratio is not None
    raw = json.loads((tmp_path / "results" / "experts.json").read_text())
    assert raw["tokens_per_step"] == 4096 and raw["sides"].keys() == {"ours", "dense"}
    assert raw["machine"]["commit"] and "load" in raw["beside"]
    assert log.LOG.read_text() == before  # quick
    assert "repeat 1 of 1: dense" in capsys.readouterr().out


def test_a_side_that_fails_ends_the_race_with_its_traceback() -> None:
    with pytest.raises(SideError, match=r"(?s)dense failed:.*KeyError: 'seed'"), Race([Side("dense", "moe", {})]):
        pass


class Workers:
    """Processes of sides by hand: `refusing` names those that refuse, each with the number of the report that says it."""

    def __init__(self, refusing: dict[str, int]) -> None:
        self.refusing = refusing
        self.open: list[str] = []

    def __call__(self, side: Side, rank: int, port: int) -> Any:
        turn = Turn(1, 1.0, 1.0, 1.0, 1, 1, 1, 1, {})
        reports = itertools.count()
        self.open.append(side.name)

        def receive(timeout_s: float) -> dict[str, object]:
            if next(reports) == self.refusing.get(side.name):
                raise race._RefusedError("memory does not suffice")
            return dataclasses.asdict(turn)

        ended = SimpleNamespace(release=lambda: self.open.remove(side.name), stop=lambda wait_s: None)
        return SimpleNamespace(receive=receive, order=lambda before, steps: None, **vars(ended))


@pytest.mark.parametrize("report", [0, 1, 2, 3])
def test_a_side_that_cannot_run_leaves_the_race_and_the_others_go_on(
    report: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused while it is built, in its warm-up, in its first turn, and after a turn that counted."""
    workers = Workers({"large": report})
    monkeypatch.setattr(race, "_Worker", workers)
    with Race([Side(name, "none", {}) for name in ("small", "large", "other")]) as running:
        scores = running.run(repeats=3, steps=1, warmup=1)
        assert workers.open == ["small", "other"]
    assert not workers.open
    assert {name: len(score.turns) for name, score in scores.items()} == {"small": 3, "other": 3}
    assert "large is refused: memory does not suffice" in capsys.readouterr().out


@pytest.mark.slow
def test_the_command_line(tmp_path: Path) -> None:
    """Our strategy against Lightning's, in all processes that a user starts."""
    command = [sys.executable, "-m", "benchmarks", "run", "in_memory-25M", "--quick", f"--disk-path={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=280)
    assert "[1 of 1, 0 s] in_memory-25M" in done.stdout and "speed over single" in done.stdout
