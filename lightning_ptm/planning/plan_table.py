"""A plan as a text table, for golden files, the debug log and the documentation.

Owns the text only. One line per tick: what computes, and what is issued at its trigger, in issue order.
"""

from __future__ import annotations

from collections.abc import Iterable

from lightning_ptm.planning.layout import ModelLayout
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.terms import Operation


def render(plan: Plan, layout: ModelLayout) -> str:
    """Returns the plan as lines of text, ending in a newline.

    The order of the units shows the phase of a tick, so the table needs no trace.
    """
    rows = [("tick", "compute", "issued before it")]
    for trigger in range(plan.tick_count + 1):
        tasks = plan.at[trigger]
        computes = [_name(task, layout) for task in tasks if task.operation is Operation.COMPUTE]
        others = [
            f"{task.operation.value} {_name(task, layout)}" for task in tasks if task.operation is not Operation.COMPUTE
        ]
        tick = str(trigger) if trigger < plan.tick_count else "end"
        rows.append((tick, ", ".join(computes) or "-", ", ".join(others) or "-"))
    return _table(rows)


def _name(task: Task, layout: ModelLayout) -> str:
    return layout.units[task.unit].name or "root"


def _table(rows: Iterable[tuple[str, str, str]]) -> str:
    cells = list(rows)
    first = max(len(row[0]) for row in cells)
    second = max(len(row[1]) for row in cells)
    return "".join(f"{tick:>{first}}  {compute:<{second}}  {issued}\n" for tick, compute, issued in cells)
