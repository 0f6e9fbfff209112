"""benchmarks/paper.py: what was published is as in the paper, deviations are computed right, and a table is what the
planner says."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import paper
from lightning_ptm.commands.plan import forecast

ROOT = Path(__file__).parents[2]


def test_what_was_published() -> None:
    """Against the paper's text: its gains are those of the rows."""
    rows = {(system, model, params, batch): speed for model, system, params, batch, _, speed in paper.PAPER_TABLE_5}
    assert len(rows) == len(paper.PAPER_TABLE_5) == 10
    best = rows["Angel-PTM", "GPT", 28, 38] / rows["DeepSpeed", "GPT", 28, 36]
    assert best == pytest.approx(1.44, abs=0.005)  # "a 44 % improvement"
    best = rows["Angel-PTM", "T5", 27, 50] / rows["DeepSpeed", "T5", 27, 32]
    assert best == pytest.approx(1.967, abs=0.0005)  # "96.7 %"
    assert paper.PAPER_FIGURE_8[768] / paper.PAPER_FIGURE_8[256] == pytest.approx(3.12, abs=0.005)
    gain = paper.PAPER_TABLE_6["10T lock-free"] / paper.PAPER_TABLE_6["10T"]
    assert gain == pytest.approx(2.96, abs=0.006)
    assert [row[2:] for row in paper.PAPER_TABLE_5[:2]] == [(28, 1, 18, 0.404), (28, 36, 40, 7.61)]


def test_deviations() -> None:
    cell = paper.Cell(10.0, 12.5)
    assert cell.deviation == pytest.approx(0.25) and str(cell) == "10 → **12.50** (+25%)"
    assert paper.Cell(10.0, 5.0).deviation == pytest.approx(-0.5)
    assert paper.Cell(None, 5.0).deviation is None and str(paper.Cell(None, 5.0, 0)) == "**5**"
    assert paper.Cell(3.0, None).deviation is None and str(paper.Cell(3.0, None)) == "3 → **does not fit**"
    assert str(paper.Cell(None, None)) == "-"


def made(**values: Any) -> dict[str, Any]:
    """An answer for 8 ranks whose numbers are easy to reckon with."""
    return {
        "fits": True,
        "reason": "",
        "ranks": 8,
        "numel": 8 * 10**9,
        "batch": 1,
        "seconds": 1.0,
        "samples_per_s": 8.0,
        "compute_s": 1.0,
        "flops": 1,
        "page_bytes": 0,
        "ram_bytes": 100 * 10**9,
        "activation_bytes": 3 * 10**9,
        "unit_bytes": 10**9,
        "busy_s": {},
        "chosen": {},
    } | values


def test_the_static_offload() -> None:
    one = paper.Answer(**made())
    many = paper.Answer(**made(batch=11, compute_s=11.0, activation_bytes=13 * 10**9))
    static = paper.Static(one, many, 1)
    # 2 GB of p16, 2 units of 1 GB, and 2 GB + 1 GB a sample: of 40 GB.
    assert static.device_bytes(10) == pytest.approx(16e9)
    assert static.largest_batch() == 34
    others = 28e9 / (375e9 / 8) + 2e9 / 32e9  # update, parameters back
    assert static.seconds(10) == pytest.approx(10.0 + others)
    assert static.samples_per_s(10) == pytest.approx(80 / (10.0 + others))
    few = dataclasses.replace(static, one=dataclasses.replace(one, ram_bytes=15 * 10**9))
    assert few.largest_batch() == 0  # 16 GB of states


def test_a_table_is_what_the_planner_says() -> None:
    """At the default device_memory, which spares the search."""
    asked: list[Any] = []

    def ask(questions: Sequence[Any]) -> list[Any]:
        asked.extend(questions)
        return [paper.answer(dataclasses.replace(question, device_memory=None)) for question in questions]

    table = paper.lengths(ask)
    assert [question.tokens for question in asked] == [512, 1024, 2048]
    assert [names for names, _ in table.rows] == [("512",), ("1024",), ("2048",)]
    batch, speed = table.rows[-1][1]
    said, _ = forecast(ROOT / "configs" / "gpt3_28b.yaml", paper.SERVER, 1, "auto", {})  # its samples have 2048
    assert batch.predicted == said.batch_size
    assert speed.predicted == pytest.approx(said.samples_per_s, rel=0.02)  # it clips gradients
    assert speed.deviation == pytest.approx(speed.predicted / 10.99 - 1)
    assert f"| 2048 | 38 → **{batch.predicted}** ({batch.deviation:+.0%}) | 10.99 → **" in table.markdown()


def test_layers_that_are_cut_and_what_colossal_ai_published() -> None:
    """Table of a step of 2 s on 256 GPUs, one of which computes; and of 1 s of ours beside the static offload of
    `made`."""
    asked: list[Any] = []

    def ask(questions: Sequence[Any]) -> list[Any]:
        asked.extend(questions)
        sent, busy = {"tensor_exchange": 4 * 10**9, "collective": 10**9}, {"tensor_exchange": 0.5}
        said = made(seconds=2.0, host_bytes=10**9, page_bytes=3 * 10**9, sent_bytes=sent, busy_s=busy)
        return [paper.Answer(**said | {"batch": each.batch if each.batch != "auto" else 2}) for each in questions]

    table = paper.tensor(ask)
    assert [dict(question.strategy) for question in asked] == [{"tensor_parallel_size": size} for size in (1, 2, 4, 8)]
    assert {question.nodes for question in asked} == {32}
    told = {name: [cells[at].predicted for _, cells in table.rows] for at, name in enumerate(table.numbers)}
    assert told["pages in RAM of a server, GB"] == 4 * [8] and told["pages of a GPU, GB"] == 4 * [3]
    assert told["activations sent, GB"] == 4 * [4] and told["seconds exposed by these"] == 4 * [0.5]
    assert told["seconds that compute waits in all"] == 4 * [1]
    asked.clear()
    table = paper.colossal(ask)
    assert [(question.batch, dict(question.machine)["device_memory"]) for question in asked] == [
        (1, "80GB"),
        (32, "80GB"),
    ]
    (gain,) = table.rows[0][1]
    first, many = ask(asked[:2])
    assert gain.published == 1.33 and gain.predicted == pytest.approx(
        8.0 / paper.Static(first, many, 1).samples_per_s(32)
    )


def test_bytes_of_grids_are_those_of_their_page() -> None:
    """MiB in docs/grid.md, whose formulas are compared with counts; and Table 3's largest gain is as in its text."""
    page = (ROOT / "docs" / "grid.md").read_text()
    rows = re.findall(r"^\| (\d+) \| ([\d,]+) \| ([\d,]+) \| [^|]*\| ([\d,]+) \| ([\d,-]+) \|$", page, re.MULTILINE)
    assert len(rows) == 18
    for ranks, width, tokens, square, cube in ((cell.replace(",", "") for cell in row) for row in rows):
        sizes = int(ranks), int(tokens), int(width)
        of_square = paper.grid_numel("2.5D" if ranks == "8" else "2D", *sizes) * 2 / 2**20
        assert of_square == pytest.approx(int(square), abs=0.51)
        if cube != "-":
            assert paper.grid_numel("3D", *sizes) * 2 / 2**20 == pytest.approx(int(cube), abs=0.51)
    rates = {(gpus, mode): rate for gpus, mode, *_, rate in paper.GRID_ROWS}
    assert rates[64, "2D"] / rates[64, "1D"] == pytest.approx(2.76, abs=0.005)


def test_rows_that_give_rates_have_no_deviation() -> None:
    """Rows of Table 3 for 1D on 16 and 64 GPUs, from which the other rows of 1D across nodes follow."""
    rows = {(names[0], names[2]): cells[1].deviation for names, cells in paper.grid(lambda _: []).rows}
    assert rows["16", "1D"] == pytest.approx(0) and rows["64", "1D"] == pytest.approx(0)
    assert abs(rows["32", "1D"] or 1) < 0.05


def test_micro_batches_in_slices_of_a_batch() -> None:
    """Each beside accumulation with inputs of units in the same place; the first row does not fit."""
    asked: list[Any] = []

    def ask(questions: Sequence[Any]) -> list[Any]:
        asked.extend(questions)
        busy = {"disk_read": 4.0, "disk_write": 6.0}
        seconds = (24.0, 18.0, 12.0, 6.0)
        refused = paper.Answer(**made(fits=False, seconds=None, compute_s=0.0, page_bytes=25 * 10**9))
        return [refused, *(paper.Answer(**made(seconds=s, compute_s=5.0, busy_s=busy)) for s in seconds)]

    table = paper.slices(ask)
    assert [(question.batch, question.accumulate) for question in asked] == [*[(4, 8)] * 3, *[(32, 1)] * 2]
    settings = [dict(question.strategy) for question in asked]
    assert [each.get("slices") for each in settings] == [None, None, None, 8, 8]
    assert [each.get("offload_activations") for each in settings] == [None, "host", "disk", "host", "disk"]
    told = {name: [cells[at].predicted for _, cells in table.rows] for at, name in enumerate(table.numbers)}
    assert told["over the longest of these"] == [None, 4, 3, 2, 1]
    assert told["speed over accumulated"] == [None, 1, 1, 2, 3]
    assert told["pages of the GPU, GB"][0] == 25 and told["seconds of a step"][0] is None
    assert "| on the GPU: does not fit | **25.0** | **3.0** | - |" in table.markdown()


def test_a_table_takes_the_place_of_the_one_before() -> None:
    cells = (paper.Cell(10.0, 12.5),)
    first, second = (paper.Table(title, "Text.", ("model",), ("speed",), ((("GPT",), cells),)) for title in ("A", "B"))
    both = paper.page([first, second])
    other = dataclasses.replace(first, text="Another text.")
    again = paper.page([other], both)
    assert again == paper.page([other, second]) and "Text." in again
    assert paper.page([], both) == both


def test_the_page_that_is_committed_is_of_the_script() -> None:
    """The page has the published numbers of Table 5 in their order, and the constants of the script and of the hardware
    file."""
    text = paper.PAGE.read_text()
    assert paper.page([], text) == text
    table = text.partition("## Table 5")[2].partition("## ")[0]
    published = re.findall(r"\| ([\d.]+) → [^|]*\|[^|]*\|$", table, re.MULTILINE)  # the last column is the cause
    assert published == [f"{row[5]:g}" for row in paper.PAPER_TABLE_5]
    constants = {name: (value, source) for name, value, source in paper.hardware_constants()}
    assert constants["host_to_device_bytes_per_s"] == ("32e9", "Paper, section 6.1: PCIe, of each device")
    assert all(source for _, source in constants.values())
