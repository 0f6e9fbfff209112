"""The notebook runs in a Jupyter kernel, where one rank has to be the kernel itself, and says what its text promises."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat", reason="the notebook is run with nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient", reason="the notebook is run with nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="the notebook is run with nbclient and ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"

REFUSED = """
from lightning.pytorch import Trainer
import lightning_ptm

try:
    Trainer(strategy="angel_ptm", accelerator="cpu", devices=2)
except lightning_ptm.ConfigError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Cells of the notebook after it has run, and of one more that asks for two ranks."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.outputs for cell in notebook.cells if cell.cell_type == "code"), "outputs were saved"
    notebook.cells.append(nbformat.v4.new_code_cell(REFUSED))
    folder = str(tmp_path_factory.mktemp("notebook"))
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": folder}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def text(cell: Any) -> str:
    """Returns what a cell has printed and shown, but for warnings."""
    shown = [each.get("text", "") for each in cell.outputs if each.get("name") != "stderr"]
    return "".join(shown + [each.data["text/plain"] for each in cell.outputs if "data" in each])


def test_the_numbers_are_those_of_a_plain_trainer(cells: list[Any]) -> None:
    plain, paged = text(cells[2]).split()[-2:]
    assert float(paged) == pytest.approx(float(plain), rel=1e-4)  # the fused kernel of ours rounds differently
    assert text(cells[3]) == "True"


def test_each_gradient_is_applied_once(cells: list[Any]) -> None:
    assert text(cells[4]) == f"produced {64 * 3}, applied {64 * 3}\n"


def test_the_gpt_learns(cells: list[Any]) -> None:
    found = re.fullmatch(r"loss (\S+) nats a byte, of a unigram model (\S+)\n", text(cells[5]))
    assert found is not None and 0 < float(found[1]) < 0.95 * float(found[2]) < math.log(256)


def test_several_ranks_in_a_notebook_are_refused_in_a_sentence(cells: list[Any]) -> None:
    assert text(cells[6]).startswith("2 ranks cannot be started from a notebook")
    assert "use devices=1 here" in text(cells[6])
