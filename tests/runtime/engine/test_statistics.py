"""What is told of a run in numbers: which parts they come from, and that they are those of one moment."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_ptm.memory.transfer import LinkStats
from lightning_ptm.planning.fetch_policy import Lookups
from lightning_ptm.runtime.engine.statistics import audit, collect, last_audit, together
from lightning_ptm.runtime.ranks.experts import TokenStats
from lightning_ptm.runtime.updates.audits import StalenessStats, UpdateAudit
from lightning_ptm.runtime.updates.lock_free import LockFreeUpdates
from lightning_ptm.terms import Tier

NOW = (UpdateAudit("layers.0", 3, 1, 2, 0),)
BEFORE = (UpdateAudit("layers.0", 1, 1, 0, 0),)


class Counted(LockFreeUpdates):
    """Updates of which nothing is there but what is told of them."""

    updates_per_step = 0.5  # type: ignore[assignment]

    def __init__(self) -> None:
        self.versions: Any = SimpleNamespace(stats=StalenessStats(reads=4, total=6, maximum=3, steps=2))
        self.last_audit = BEFORE

    def audit(self) -> tuple[UpdateAudit, ...]:
        return NOW


def engine(**parts: Any) -> Any:
    """What is asked of an engine; synchronous updates, one rank's experts, no transfers of activations."""
    plain: dict[str, Any] = {
        "allocator": SimpleNamespace(
            stats=lambda: {
                (Tier.DISK, Tier.DEVICE): LinkStats(7, 1, 0.5),
                (Tier.HOST, Tier.DISK): LinkStats(0, 0, 0.0),
            },
            busy_s=lambda: 0.75,
        ),
        "executor": SimpleNamespace(
            compute_timing=SimpleNamespace(stall_s={"fetch": 1.0, "update": 2.0}),
            fetching=SimpleNamespace(lookups=Lookups()),
        ),
        "updater": SimpleNamespace(in_thread=True, stats=SimpleNamespace(save_stall_s=8.0, arithmetic_s=16.0)),
        "updates": object(),
        "offload": None,
        "expert_groups": None,
        "save_stall_s": 4.0,
    }
    return SimpleNamespace(**plain | parts)


def test_of_a_plain_run() -> None:
    found = collect(engine())
    assert found.links == {"disk_to_device": LinkStats(7, 1, 0.5), "host_to_disk": LinkStats(0, 0, 0.0)}
    assert (found.busy_s, found.update_arithmetic_s, found.updates_per_step) == (0.75, 16.0, 1.0)
    assert (found.staleness, found.tokens) == (None, None)
    assert found.stall_s["fetch"] == 1.0 and found.stall_s["update"] == 2.0


@pytest.mark.parametrize(("in_thread", "save_s"), [(True, 4.0), (False, 12.0)])
def test_an_updating_threads_waits_for_saves_are_nobody_elses(in_thread: bool, save_s: float) -> None:
    updater = SimpleNamespace(in_thread=in_thread, stats=SimpleNamespace(save_stall_s=8.0, arithmetic_s=0.0))
    assert collect(engine(updater=updater)).stall_s["save"] == save_s


def test_links_of_activations_are_told_where_they_were_used() -> None:
    links = {"activations_to_host": LinkStats(5, 2, 0.1), "activations_to_device": LinkStats(0, 0, 0.0)}
    found = collect(engine(offload=SimpleNamespace(links=lambda: links)))
    assert set(found.links) == {"disk_to_device", "host_to_disk", "activations_to_host"}


def test_numbers_of_one_moment() -> None:
    updates, tokens = Counted(), TokenStats(exchanges=1)
    made = engine(updates=updates, expert_groups=SimpleNamespace(stats=tokens))
    uses = made.executor.fetching.lookups
    found = collect(made)
    names = list(Lookups.__dataclass_fields__)
    for name in names:
        setattr(uses, name, getattr(uses, name) + 1)
    made.executor.compute_timing.stall_s["fetch"] = 9.0
    updates.versions.stats.reads = tokens.exchanges = 99
    assert found.uses == Lookups() and found.uses != uses
    assert found.stall_s["fetch"] == 1.0
    assert found.staleness == StalenessStats(reads=4, total=6, maximum=3, steps=2)
    assert found.tokens == TokenStats(exchanges=1)
    assert found.updates_per_step == 0.5


def test_audits_are_of_lock_free_updates() -> None:
    assert audit(engine()) == last_audit(engine()) == ()
    assert audit(engine(updates=Counted())) == NOW
    assert last_audit(engine(updates=Counted())) == BEFORE


@pytest.mark.parametrize(
    ("produced", "applied", "pending", "skipped", "balanced"),
    [(0, 0, 0, 0, True), (6, 1, 2, 3, True), (3, 3, 1, 0, False), (3, 1, 1, 0, False)],
)
def test_none_lost_and_none_twice(produced: int, applied: int, pending: int, skipped: int, balanced: bool) -> None:
    assert UpdateAudit("", produced, applied, pending, skipped).balanced is balanced


def test_a_run_that_was_laid_out_anew_is_told_of_as_one() -> None:
    before = collect(engine(updates=Counted()))
    assert together(None, before) is before
    after = dataclasses.replace(
        before,
        links={"host_to_disk": LinkStats(5, 2, 0.25), **before.links},
        staleness=StalenessStats(reads=1, total=9, maximum=9, steps=1),
        updates_per_step=0.25,
        tokens=None,
    )
    both = together(before, after)
    assert both.links == {
        "host_to_disk": LinkStats(5, 2, 0.25),
        **{name: LinkStats(2 * link.bytes, 2 * link.transfers, 2 * link.busy_s) for name, link in before.links.items()},
    }
    assert both.stall_s == {cause: 2 * seconds for cause, seconds in before.stall_s.items()}
    assert (both.busy_s, both.update_arithmetic_s) == (2 * before.busy_s, 2 * before.update_arithmetic_s)
    assert both.uses == Lookups(2 * before.uses.kept, 2 * before.uses.ahead, 2 * before.uses.late)
    assert both.staleness == StalenessStats(reads=5, total=15, maximum=9, steps=3)
    assert both.updates_per_step == 0.25 and both.tokens == before.tokens
