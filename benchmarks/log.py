"""LOG.md: the last measurement of each figure of each case, one row each.

I1: a pair of case and figure has one row; a new measurement replaces it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

LOG = Path(__file__).with_name("LOG.md")
HEADING = "## Last measurements\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One row, as text.

    Attributes:
        case, figure: what was measured.
        ours, other: with their units; "-" for none.
        ratio: as the figure says; "-" for none.
        bar: the bar, and whether it is met; "-" for none.
        tokens: of a step, of all ranks; "-" where a step is no training step.
        machine, commit, date: where, what and when; the commit ends in -dirty if the checkout had changes.
        beside: the load average at the start and at the end, or what else is known of it.
    """

    case: str
    figure: str
    ours: str
    other: str
    ratio: str
    bar: str
    tokens: str
    machine: str
    commit: str
    date: str
    beside: str

    @property
    def line(self) -> str:
        return f"| {' | '.join(dataclasses.astuple(self))} |"


TITLES = ("case", "figure", "ours", "other", "ratio", "bar", "tokens a step", "machine", "commit", "date", "beside it")


def rows(path: Path = LOG) -> list[Row]:
    """Returns the rows of a log, in their order."""
    _, _, table = path.read_text().partition(HEADING)
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    return [Row(*(cell.strip() for cell in line.strip("| ").split(" | "))) for line in lines]


def put(new: Iterable[Row], order: Sequence[str], path: Path = LOG) -> None:
    """Writes rows in the place of those of the same case and figure.

    Args:
        order: cases in the order of the table.
    """
    found = {(row.case, row.figure): row for row in rows(path)}
    found |= {(row.case, row.figure): row for row in new}
    places = {case: place for place, case in enumerate(order)}
    ordered = sorted(found.values(), key=lambda row: places.get(row.case, len(places)))
    head = [f"| {' | '.join(TITLES)} |", f"| {' | '.join('---' for _ in TITLES)} |"]
    above, _, _ = path.read_text().partition(HEADING)
    path.write_text("\n".join([f"{above}{HEADING}", *head, *(row.line for row in ordered)]) + "\n")
