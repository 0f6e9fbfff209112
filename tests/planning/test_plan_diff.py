"""Messages about layouts and plans that differ: the first decision in them that does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lightning_ptm.planning.layout import ModelLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.plan_diff import digest, first_difference, layout_lines, plan_lines
from lightning_ptm.terms import Kind, Operation

from .models import PAGE, even_layout, spec

HEAD, TAIL = spec("head", 8, 4), spec("tail", 8, 4)


def laid_out(*specs: ParameterSpec, page_size: int = PAGE) -> ModelLayout:
    return build_layout([UnitSpec("", specs)], page_size=page_size, world_size=2)


def told(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str] | None:
    """Digests differ where there is a difference, and only there."""
    found = first_difference(ours, theirs)
    assert (digest(ours) == digest(theirs)) == (found is None)
    return found


def between(ours: ModelLayout, theirs: ModelLayout) -> tuple[str, str] | None:
    return told(list(layout_lines(ours)), list(layout_lines(theirs)))


def test_equal_layouts_do_not_differ() -> None:
    assert between(laid_out(HEAD, TAIL), laid_out(HEAD, TAIL)) is None


HERE = "tail of shape (8, 4), bfloat16, trained by optimizer 0, at element 64 of flat 0"


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        (
            replace(TAIL, name="other"),
            "other of shape (8, 4), bfloat16, trained by optimizer 0, at element 64 of flat 0",
        ),
        (
            replace(TAIL, shape=(4, 8)),
            "tail of shape (4, 8), bfloat16, trained by optimizer 0, at element 64 of flat 0",
        ),
        (
            replace(TAIL, stride=(1, 8)),
            "tail of shape (8, 4) with strides (1, 8), bfloat16, trained by optimizer 0, at element 64 of flat 0",
        ),
        (
            replace(TAIL, dtype="float16"),
            "tail of shape (8, 4), float16, trained by optimizer 0, at element 0 of flat 1",
        ),
        (
            replace(TAIL, trainable=False),
            "tail of shape (8, 4), bfloat16, frozen, at element 0 of flat 1",
        ),
        (
            replace(TAIL, optimizer=1),
            "tail of shape (8, 4), bfloat16, trained by optimizer 1, at element 0 of flat 1",
        ),
    ],
    ids=["name", "shape", "strides", "dtype", "frozen", "optimizer"],
)
def test_what_parameters_differ_in(theirs: ParameterSpec, instead: str) -> None:
    assert between(laid_out(HEAD, TAIL), laid_out(HEAD, theirs)) == (HERE, instead)


def test_what_is_missing_and_how_large_pages_are() -> None:
    assert between(laid_out(HEAD, TAIL), laid_out(HEAD)) == (HERE, "nothing more")
    assert between(laid_out(HEAD), laid_out(HEAD, TAIL)) == ("nothing more", HERE)
    assert between(laid_out(HEAD), laid_out(HEAD, page_size=2 * PAGE)) == (
        "pages of 65536 bytes",
        "pages of 131072 bytes",
    )


FETCH = Task(Operation.FETCH, 1, Kind.FULL, 3)


@pytest.mark.parametrize(
    ("theirs", "instead"),
    [
        (replace(FETCH, operation=Operation.GATHER), "gather of layers.0 (full) at tick 3"),
        (replace(FETCH, unit=0), "fetch of root (full) at tick 3"),
        (replace(FETCH, kind=Kind.PARAMETER), "fetch of layers.0 (parameter) at tick 3"),
        (replace(FETCH, trigger=4), "fetch of layers.0 (full) at tick 4"),
        (None, "nothing more"),
    ],
    ids=["operation", "unit", "kind", "trigger", "missing"],
)
def test_what_plans_differ_in(theirs: Task | None, instead: str) -> None:
    layout = even_layout([1, 2])
    here, there = Plan((FETCH,), 5), Plan(() if theirs is None else (theirs,), 5)
    assert told(list(plan_lines(here, layout)), list(plan_lines(here, layout))) is None
    expected = ("fetch of layers.0 (full) at tick 3", instead)
    assert told(list(plan_lines(here, layout)), list(plan_lines(there, layout))) == expected


def test_plans_of_other_lengths() -> None:
    layout = even_layout([1, 2])
    lines = [list(plan_lines(Plan((), count), layout)) for count in (5, 6)]
    assert told(*lines) == ("a plan of 5 ticks", "a plan of 6 ticks")
