"""Decisions about chunks of a run are those of its forecast, entry by entry; a policy that changes changes both.

With two ranks: ranks/test_rank_one_policy.py. Lock-free: update/test_two_drivers_of_waiting.py.
"""

from __future__ import annotations

from typing import Any

import pytest
from kit.plain_loop import make_trainer, tokens
from kit.policy_log import INSTANT, SLOW, Disk, Entry, Log, between, planned
from kit.stacks import Stack

from lightning_ptm.planning.chunks import ChunkEvent, Chunks

STEPS, BEFORE = 8, 3
"""Steps of a run, and how many come before those that are compared: nothing is read ahead of the first, and the first plan is
not of the run's own trace."""


def logs(strategy: Any, patch: pytest.MonkeyPatch, *, slow: bool, **options: Any) -> tuple[list[Entry], list[Entry]]:
    """Returns the logs of the run and of the forecast."""
    log = Log()
    with patch.context() as disk:
        Disk(disk, slow=slow)
        make_trainer(strategy, callbacks=[log], **options).fit(Stack(), tokens(STEPS).loader())
    hardware = SLOW if slow else INSTANT
    return between(log.entries, STEPS, BEFORE), between(planned(log, hardware, STEPS), STEPS, BEFORE)


LATE = {"gradient_clip_val": 1.0}
"""Updates come at the step."""
LITTLE = {"tuning": {"staging_memory": "2MiB"}}
NARROW = {**LITTLE, "host_memory": "2944KiB"}
"""Settings with so little RAM that compute waits for updates where the gradients of more than two units do."""


@pytest.mark.slow_unless(
    "in the backward-ram-settings0-False",
    "in the backward-masters_on_disk-settings5-True",
    "in the backward-all_on_disk-settings6-False",
    "at the step-masters_on_disk-settings4-True",
)
@pytest.mark.parametrize(
    ("where", "settings", "slow"),
    [
        ("ram", {}, False),
        ("masters_on_disk", {}, False),
        ("masters_on_disk", {}, True),
        ("masters_on_disk", LITTLE, False),
        ("masters_on_disk", LITTLE, True),
        ("masters_on_disk", NARROW, True),
        ("all_on_disk", {}, False),
    ],
)
@pytest.mark.parametrize("options", [{}, LATE], ids=["in the backward", "at the step"])
def test_what_a_run_decides_is_what_its_forecast_does(
    strategy_at: Any, monkeypatch: pytest.MonkeyPatch, where: str, settings: Any, slow: bool, options: Any
) -> None:
    run, forecast = logs(strategy_at(where, **settings), monkeypatch, slow=slow, **options)
    assert run == forecast
    assert len(run) >= 3 * 5 * (STEPS - BEFORE - 1)
    if where != "ram":
        assert {doing for doing, *_ in run} >= {each.value for each in ChunkEvent if each is not ChunkEvent.GIVEN_UP}


def test_a_policy_that_changes_changes_both(strategy_at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies under test: nothing is read ahead of jobs; or the newest job is served first."""
    before, _ = logs(strategy_at("masters_on_disk", **LITTLE), monkeypatch, slow=True)
    enqueue = Chunks.enqueue

    def last_first(chunks: Any, job: Any) -> None:
        enqueue(chunks, job)
        chunks.to_front(job)

    for name, other in (("want", lambda chunks, order: None), ("enqueue", last_first)):
        with monkeypatch.context() as patch:
            patch.setattr(Chunks, name, other)
            run, forecast = logs(strategy_at("masters_on_disk", **LITTLE), patch, slow=True)
        assert run == forecast != before, name
