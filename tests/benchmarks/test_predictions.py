"""benchmarks/predictions.py: what its runs decide tick by tick is what the forecast of them on paper decides."""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from kit.decisions import Listens, on_paper
from kit.fits import quiet_trainer

from lightning_ptm import AngelPTMStrategy
from lightning_ptm.data import TextBytes
from lightning_ptm.models import GPT
from lightning_ptm.terms import Operation

ROOT = Path(__file__).parents[2]
ARGS = Namespace(page_size=4, set=[], threads=1, keep_freed_memory=False, wait_policy="")
MARKS = {"25M": pytest.mark.slow, "in RAM": pytest.mark.slow}
RUNS = [
    pytest.param(size, name, marks=[MARKS[each] for each in (size, name) if each in MARKS])
    for size in ("tiny", "25M")
    for name in ("in RAM", "masters on disk", "lock-free")
]


@pytest.mark.slow_unless("tiny-lock-free")
@pytest.mark.parametrize(("size", "name"), RUNS)
def test_decision_by_decision(size: str, name: str, disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    predictions: Any = importlib.import_module("predictions")
    options = predictions.runs(size, ARGS, disk)[f"{size} {name}"].options
    seen = Listens()
    trainer = quiet_trainer(
        AngelPTMStrategy(**options["settings"]), precision=options["precision"], max_steps=4, callbacks=[seen]
    )
    trainer.fit(GPT(**options["model"]), datamodule=TextBytes(**options["data"]))
    assert seen.issued == on_paper(seen)
    # Everything computes where it is at home.
    assert {each.operation for each in seen.issued} == {Operation.COMPUTE}
    assert len(seen.issued) == 4 * len(seen.blueprint.trace.ticks)
    del sys.modules["predictions"]
