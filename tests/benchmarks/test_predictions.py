"""The planner's cases: what their runs decide tick by tick is what the forecast of them on paper decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.decisions import Listens, in_virtual_run
from kit.fits import quiet_trainer

from benchmarks.cases.planner import RUNS, options_of_runs
from benchmarks.cases.ranking import JOBS, rank_correlation
from lightning_ptm import AngelPTMStrategy
from lightning_ptm.data import TextBytes
from lightning_ptm.models import GPT
from lightning_ptm.terms import Operation

MARKS = {"25M": pytest.mark.slow, "in RAM": pytest.mark.slow}
ON_ONE_RANK = RUNS[:3]
PARAMETERS = [
    pytest.param(size, name, marks=[MARKS[each] for each in (size, name) if each in MARKS])
    for size in ("tiny", "25M")
    for name in ON_ONE_RANK
]


@pytest.mark.slow_unless("tiny-lock-free")
@pytest.mark.parametrize(("size", "name"), PARAMETERS)
def test_decision_by_decision(size: str, name: str, disk: Path) -> None:
    options = options_of_runs(size, disk)[name]
    seen = Listens()
    trainer = quiet_trainer(
        AngelPTMStrategy(**options["settings"]), precision=options["precision"], max_steps=4, callbacks=[seen]
    )
    trainer.fit(GPT(**options["model"]), datamodule=TextBytes(**options["data"]))
    assert seen.issued == in_virtual_run(seen)[0]
    # Everything computes in the tier where it is kept.
    assert {each.operation for each in seen.issued} == {Operation.COMPUTE}
    assert len(seen.issued) == 4 * len(seen.blueprint.trace.ticks)


def test_the_order_of_runs_is_compared_by_ranks() -> None:
    assert rank_correlation([1.0, 2.0, 9.0, 10.0], [0.1, 0.2, 0.3, 5.0]) == pytest.approx(1)
    assert rank_correlation([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1)
    assert sum(len(settings) for *_, settings in JOBS) >= 16 and {ranks for ranks, *_ in JOBS} == {1, 2, 4}
