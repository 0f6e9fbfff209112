"""The timeline for ui.perfetto.dev: its events are those of the recorded batches, and its form is Chrome's."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from lightning_ptm import Event, EventKind
from lightning_ptm.callbacks import PerfettoTrace
from lightning_ptm.callbacks.perfetto_trace import chrome_trace
from lightning_ptm.callbacks.recorder import Batch


def tracks(trace: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Complete events by the title of their thread."""
    rows = trace["traceEvents"]
    titles = {row["tid"]: row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {title: [] for title in titles.values()}
    for row in rows:
        if row["ph"] == "X":
            found[titles[row["tid"]]].append(row)
    return found


def assert_spans_are_apart(spans: list[dict[str, Any]]) -> None:
    ordered = sorted(spans, key=lambda span: span["ts"])
    for before, after in itertools.pairwise(ordered):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)


Read = Callable[..., dict[str, Any]]


@pytest.fixture
def trace(tmp_path) -> Read:
    return lambda ending="": json.loads((tmp_path / "logs" / f"perfetto_trace{ending}.json").read_text())


@pytest.mark.parametrize("tier", ["masters_on_disk", "three_tiers", "lock_free"])
def test_fit(strategy_at, board_trainer, model, data, trace, tier) -> None:
    board_trainer(strategy_at(tier), [PerfettoTrace(start=1, count=2)], max_epochs=2).fit(model, data)
    found = tracks(trace())
    for spans in found.values():
        assert_spans_are_apart(spans)
    assert [span["name"] for span in found["batch"]] == ["batch 1", "batch 2"]
    forward = ["root", *(f"blocks.{index}" for index in (0, 1, 2))]
    backward = ["root", *(f"blocks.{index}" for index in (2, 1, 0))]
    names = [f"{name} forward" for name in forward] + [f"{name} backward" for name in backward]
    ticks = [span["name"] for span in sorted(found["compute train"], key=lambda span: span["ts"])]
    assert ticks == names * 2
    first, last = found["batch"]
    for span in found["compute train"]:
        assert first["ts"] <= span["ts"] and span["ts"] + span["dur"] <= last["ts"] + last["dur"]
    assert any(title.startswith("update") for title in found)
    moved = [span for title, spans in found.items() if title.startswith("copy disk_to_host") for span in spans]
    assert moved and all(span["args"]["bytes"] > 0 and "/" in span["name"] for span in moved)
    states = {"p16", "parameters", "master", "exp_avg", "exp_avg_sq", "gradient", "shard"}
    assert {name.rpartition("/")[0] for name in (span["name"] for span in moved)} <= {f"blocks.{n}" for n in range(3)}
    assert {span["name"].rpartition("/")[2] for span in moved} <= states
    updated = {span["name"].partition("/")[0] for title in found if title.startswith("update") for span in found[title]}
    assert updated == {f"blocks.{n}" for n in range(3)}
    if tier == "three_tiers":
        assert "copy host_to_device" in found
    counters = [row for row in trace()["traceEvents"] if row["ph"] == "C" and row["name"].startswith("disk")]
    assert len(counters) == len(ticks) and all(row["args"]["MB"] > 0 for row in counters)


@pytest.mark.parametrize("activations", ["none", "host"])
def test_copies_of_the_trace_are_those_of_the_counters(
    activations_leave, strategy_at, board_trainer, model, data, activations
) -> None:
    """Every byte that the links count in the block is told, once."""

    class Compare(PerfettoTrace):
        def _begin(self, trainer: Any) -> None:
            super()._begin(trainer)
            if self._number == 0:
                trainer.strategy.engine.drain()
                self.before = trainer.strategy.statistics().links

        def recorded(self, trainer: Any, events: list[Event], batches: list[Batch]) -> None:
            told.append((self.before, trainer.strategy.statistics().links, events))

        def _end(self, trainer: Any) -> None:
            trainer.strategy.engine.drain()  # nothing is under way at the end of the block
            super()._end(trainer)

    told: list[Any] = []
    board_trainer(strategy_at("three_tiers", offload_activations=activations), [Compare(start=0, count=2)]).fit(
        model, data
    )
    before, after, events = told[0]
    away = {"activations_to_host", "activations_to_device"}
    assert (away <= set(after)) == (activations == "host")
    names = {event.name for event in events if event.track in away}
    assert names == ({f"blocks.{index}/activations" for index in range(3)} if activations == "host" else set())
    for link, stats in after.items():
        said = sum(event.bytes for event in events if event.kind is EventKind.COPY and event.track == link)
        assert said == stats.bytes - (before[link].bytes if link in before else 0)


def test_what_overlaps_gets_a_track_of_its_own() -> None:
    copies = [
        Event(EventKind.COPY, "disk_to_host", name, begin_s, end_s, bytes=1)
        for name, begin_s, end_s in (("a", 5.0, 7.0), ("b", 6.0, 8.0), ("c", 7.0, 9.0))
    ]
    found = tracks(chrome_trace(copies, [Batch(0, 4.0, 9.0)], {}))
    assert [span["name"] for span in found["copy disk_to_host"]] == ["a", "c"]
    assert [(span["name"], span["ts"], span["dur"]) for span in found["copy disk_to_host (2)"]] == [("b", 2e6, 2e6)]


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_other_loops(strategy_at, board_trainer, model, data, trace, loop) -> None:
    trainer = board_trainer(strategy_at("three_tiers"), [PerfettoTrace(start=0, count=1)])
    getattr(trainer, loop)(model, data)
    assert len(tracks(trace(f"_{loop}"))["compute forward"]) == 4


def test_a_run_that_ends_early_or_fails_leaves_what_was_heard(strategy_at, board_trainer, model, data, trace) -> None:
    board_trainer(strategy_at("ram"), [PerfettoTrace()], max_steps=3).fit(model, data)
    assert [span["name"] for span in tracks(trace())["batch"]] == ["batch 2"]
    model.on_before_zero_grad = lambda optimizer: 1 / 0
    with pytest.raises(ZeroDivisionError):
        board_trainer(strategy_at("ram"), [PerfettoTrace(start=0)]).fit(model, data)
    assert len(tracks(trace())["compute train"]) >= 3 and "batch 0" not in str(trace())


def test_nobody_listens_outside_the_batches_and_other_strategies_are_left_alone(
    strategy_at, board_trainer, model, data, tmp_path
) -> None:
    strategy = strategy_at("ram")
    heard = []

    class Look(PerfettoTrace):
        def on_train_batch_end(self, *rest: Any) -> None:
            heard.append(strategy.engine.events.active)
            super().on_train_batch_end(*rest)
            heard.append(strategy.engine.events.active)

    board_trainer(strategy, [Look(start=1, count=1)]).fit(model, data)
    assert heard == [False, False, True, False, False, False, False, False]
    (tmp_path / "logs" / "perfetto_trace.json").unlink()
    board_trainer("auto", [PerfettoTrace(start=0)]).fit(model, data)
    assert not list(tmp_path.rglob("perfetto_trace.json"))
