"""The order of chunks, in every state that small updates can reach: something can always go on, all ends, nothing is torn.

What is tried and what is checked: chunk_states.py. Single behaviours: test_chunks.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from lightning_ptm.planning.chunks import Chunks

from .chunk_states import EMPTY, GRADIENT, STATES, TARGET, JobSpec, Model, ModelJob, Scenario, Stuck, explore

KINDS = {
    "states": STATES,
    "states and gradient": STATES | GRADIENT,
    "states and target": STATES | TARGET,
    "all": STATES | TARGET | GRADIENT,
    "gradient": GRADIENT,
    "target and gradient": TARGET | GRADIENT,
}
"""Kinds of data that pass through staging: all but those that are where the arithmetic is."""


def two_flats(columns: int, staging: int, chunks: tuple[int, int] = (1, 2)) -> Scenario:
    ahead = (("b",),) if columns & STATES else ()
    jobs = (JobSpec("a", columns), JobSpec("b", columns))
    return Scenario(staging, {"a": chunks[0], "b": chunks[1]}, jobs, ahead, forgets=True)


@pytest.mark.parametrize("staging", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_two_flats(kind: str, staging: int) -> None:
    assert explore(two_flats(KINDS[kind], staging)).states > 30


ALL = STATES | TARGET | GRADIENT
OTHERS = {
    "one flat, one job after the other": Scenario(2, {"a": 2}, (JobSpec("a", ALL), JobSpec("a", ALL)), (("a",),)),
    "one flat, jobs with and without a gradient": Scenario(
        1, {"a": 2}, (JobSpec("a", STATES | GRADIENT), JobSpec("a", STATES)), (("a",),)
    ),
    "a job without chunks between two of its flat": Scenario(
        2, {"a": 1}, (JobSpec("a", ALL), JobSpec("a", ALL, ()), JobSpec("a", ALL))
    ),
    "two jobs without chunks before one of their flat": Scenario(
        1, {"a": 1}, (JobSpec("a", ALL, ()), JobSpec("a", ALL, ()), JobSpec("a", ALL)), (("a",),)
    ),
    "a job that needs less than was read ahead": Scenario(
        2, {"a": 3, "b": 1}, (JobSpec("a", ALL, (1,)), JobSpec("b", ALL)), (("a",),), forgets=True
    ),
    "a job that needs no staging, of what was read ahead": Scenario(
        1, {"a": 2, "b": 1}, (JobSpec("a", 0), JobSpec("b", ALL)), (("a", "b"),), forgets=True
    ),
    "a flat in RAM, one on disk": Scenario(1, {"a": 2, "b": 2}, (JobSpec("a", 0), JobSpec("b", ALL)), (("b",),)),
    "another flat is wanted than comes": Scenario(
        1, {"a": 1, "b": 1, "c": 1}, (JobSpec("a", ALL), JobSpec("b", ALL)), (("c",),), forgets=True
    ),
    "orders that contradict each other": Scenario(
        1, {"a": 1, "b": 1}, (JobSpec("a", ALL), JobSpec("b", ALL)), (("a", "b"), ("b", "a"))
    ),
    "turns": Scenario(1, {"a": 1, "b": 2}, (JobSpec("b", ALL, turn=1), JobSpec("a", ALL)), (("b",),)),
    "a turn that is over before an earlier one begins": Scenario(
        2, {"a": 1, "b": 1}, (JobSpec("b", ALL, turn=1), JobSpec("a", ALL), JobSpec("b", ALL, turn=1))
    ),
    "three flats, nothing is put first": Scenario(
        1, {"a": 1, "b": 1, "c": 1}, tuple(JobSpec(flat, ALL) for flat in "abc"), (("c", "b"),), fronts=False
    ),
    "three flats, all are put first": Scenario(
        1, {"a": 1, "b": 1, "c": 1}, tuple(JobSpec(flat, STATES | GRADIENT) for flat in "abc")
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str) -> None:
    assert explore(OTHERS[name]).states > 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["states and gradient", "all"])
@pytest.mark.parametrize("staging", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [(2, 2), (1, 3), (2, 3)])
def test_two_flats_of_several_chunks(kind: str, staging: int, chunks: tuple[int, int]) -> None:
    assert explore(two_flats(KINDS[kind], staging, chunks)).states > 200


@pytest.mark.slow
@pytest.mark.parametrize("staging", [1, 2, 3, 4])
def test_three_flats(staging: int) -> None:
    jobs = (JobSpec("a", ALL), JobSpec("b", STATES | GRADIENT), JobSpec("c", STATES | TARGET))
    assert explore(Scenario(staging, {"a": 1, "b": 1, "c": 1}, jobs, (("c",),))).states > 200


def _first_without_room_ends_it(chunks: Any) -> bool:
    """Former rule: a job that is not first is not considered if the first has no room."""
    moved = False
    for job in chunks.queue:
        if not job.streams or job.predecessor is not None or not (job.reads_ahead or job.before.done()):
            continue
        for chunk in [*job.incomplete]:
            moved = chunks._actions.read(job, chunk) or moved
            if chunk.all_reads_begun:
                job.incomplete.remove(chunk)
        while job.waiting and not chunks._is_busy(job.flat, job.waiting[-1]):
            if chunks._held >= chunks.staging and not chunks._make_room(job):
                return moved
            start = job.waiting.pop()
            chunk = chunks._read(job, job.active, job.flat, start, job.cuts.length_from(start))
            if not chunk.all_reads_begun:
                job.incomplete.append(chunk)
            moved = True
    return chunks._issue_ahead() or moved


def _takes_what_is_being_read(chunks: Any, asking: Any) -> bool:
    for chunk in reversed(chunks._ahead):
        chunks._free(chunks._ahead, chunk, None)
        return True
    return False


def _takes_from_anybody(chunks: Any, asking: Any) -> bool:
    for job in chunks.queue:
        for chunk in job.active:
            if job is not asking and chunk.reads.done():
                chunks._free(job.active, chunk, None)
                job.incomplete = [other for other in job.incomplete if other is not chunk]
                job.waiting.append(chunk.start)
                return True
    return False


def _starts_what_waits_for_computed_jobs(advance: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def advances(chunks: Any) -> bool:
        for job in chunks.queue:
            if job.predecessor is not None and job.predecessor.computed:
                job.predecessor = None
        return advance(chunks)

    return advances


def _forgets_gradients(awaited: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def found(chunks: Any, lead: Any) -> Any:
        came = awaited(chunks, lead)
        return None if isinstance(came, ModelJob) else came

    return found


def _nobody_computes_what_comes_last(chunks: Any, job: Any) -> Any:
    return None if not job.waiting and len(job.active) == 1 else next_ready(chunks, job)


next_ready = Chunks._next_ready

FAULTS: dict[str, tuple[type, str, Any, str]] = {
    "who has no room ends the round": (Chunks, "_issue", _first_without_room_ends_it, "nothing can go on"),
    "buffers are taken that are being read": (Chunks, "_make_room", _takes_what_is_being_read, "middle of a transfer"),
    "nobody gives up buffers": (Chunks, "_make_room", lambda chunks, job: False, "nothing can go on"),
    "jobs take buffers from each other": (Chunks, "_make_room", _takes_from_anybody, "circle|nothing can go on"),
    "a stretch that is written is read": (Chunks, "_is_busy", lambda chunks, flat, start: False, "I2"),
    "what is computed counts as ended": (
        Chunks,
        "advance",
        _starts_what_waits_for_computed_jobs(Chunks.advance),
        "earlier job|I2",
    ),
    "gradients are not named": (Chunks, "awaited", _forgets_gradients(Chunks.awaited), "nothing is named"),
    "the last chunk is left": (Chunks, "_next_ready", _nobody_computes_what_comes_last, "nothing can go on"),
    "what is written keeps its buffers": (Chunks, "_retire", lambda chunks: False, "nothing can go on|has come"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, method, fault, words = FAULTS[name]
    monkeypatch.setattr(where, method, fault)
    scenarios = [two_flats(ALL, 1), two_flats(ALL, 2), *OTHERS.values()]

    def look() -> None:
        for scenario in scenarios:
            explore(scenario)

    with pytest.raises(Stuck, match=words):
        look()


def test_a_buffer_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Chunks.__init__

    def wider(chunks: Any, actions: Any, *, staging: float) -> None:
        begin(chunks, actions, staging=staging + 1)

    monkeypatch.setattr(Chunks, "__init__", wider)
    with pytest.raises(Stuck, match="more chunks hold buffers than there are"):
        explore(two_flats(ALL, 1))


def test_all_that_the_policy_knows_is_in_a_state() -> None:
    """Else states that differ would count as one."""
    model = Model(two_flats(ALL, 1), EMPTY)
    assert vars(model.policy).keys() == {
        *("_actions", "staging", "on_decision"),
        *("queue", "_wanted", "_ahead", "_writing", "_abandoned", "_held"),
    }
    assert vars(ModelJob(0, model)).keys() == {
        *("flat", "cuts", "before", "streams", "reads_ahead", "turn"),
        *("waiting", "active", "incomplete", "predecessor"),
        *("spec", "index", "model", "starts", "gradient", "done"),
    }
