"""Tables of README.md and docs/measured.md, made of the rows of LOG.md and written between two markers of the page.

I1: no figure of these tables is written by hand; a test compares the pages with LOG.md.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import log

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- figures of benchmarks/LOG.md -->\n", "<!-- end of figures -->\n"
DIGITS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a page's table.

    Attributes:
        what: in words.
        case, figure: its row of LOG.md.
        factor: what a ratio says: "as fast".
        loss: also give the case's loss beside the ratio.
    """

    what: str
    case: str
    figure: str
    factor: str = "x"
    loss: bool = False


FASTER = "x faster"
LOSS = "loss over synchronous"
LOCK_FREE = "GPT 124M, master states on disk: lock-free updates (at most 16 steps late) against synchronous ones"
README = (
    Line("GPT 3.0B trains with 4 GiB of memory in all (48 GB of states)", "scale-3.0B", "step"),
    Line(
        "GPT 124M, master states on disk, against DeepSpeed ZeRO-3 with its optimizer on NVMe",
        "deepspeed-124M",
        "speed over DeepSpeed",
        FASTER,
    ),
    Line(LOCK_FREE, "lock_free-64", "speed over synchronous", FASTER, loss=True),
    Line("the same", "lock_free-256", "speed over synchronous", FASTER, loss=True),
    Line("GPT 124M, two ranks, against FSDP2", "two_ranks-124M", "speed over fsdp2", FASTER),
    Line("the same, `reshard_after_forward=False`", "two_ranks-124M", "speed over fsdp2-keep", FASTER),
    Line(
        "GPT 124M, everything in RAM, against Lightning's single device", "in_memory-124M", "speed over single", FASTER
    ),
)
MEASURED = (
    Line(
        "GPT 1.2B in 4 GiB, step against max(compute alone, its disk traffic)",
        "scale-1.2B",
        "step over max(compute, its disk traffic)",
    ),
    Line(
        "GPT 124M, master states on disk, step against max(compute alone, the disk alone)",
        "disk_masters-124M",
        "step over max(compute, disk)",
    ),
    Line(
        f"{LOCK_FREE}, with a core to spare for the updates",
        "lock_free-64-spare_core",
        "speed over synchronous",
        FASTER,
        loss=True,
    ),
    Line("the same", "lock_free-256-spare_core", "speed over synchronous", FASTER, loss=True),
    Line(
        "lock-free updates on both cores, step against compute alone (forward and backward in RAM, no updates)",
        "lock_free-64-compute",
        "step over compute alone",
    ),
    Line(
        "GPT 355M, a sharded checkpoint of 4.2 GB, speed against writing as many bytes in order",
        "checkpoints-355M",
        "bytes/s over sequential writes",
    ),
    Line(
        "the same with master states on disk, which are read from it meanwhile",
        "checkpoints-355M",
        "bytes/s over sequential writes, masters on disk",
    ),
    Line("the memory that it adds, against 200 MB", "checkpoints-355M", "memory added over 200 MB"),
    Line(
        "8 experts of a Switch layer, speed against the dense layer of as many operations",
        "experts",
        "speed over dense",
    ),
    Line("GPT 25M, two ranks, against FSDP2", "two_ranks-25M", "speed over fsdp2", FASTER),
    Line(
        "GPT 124M, two ranks, against one rank with the same global batch",
        "two_ranks-124M",
        "speed over one rank",
        FASTER,
    ),
    Line(
        "GPT 124M, everything in RAM, against a plain PyTorch loop", "in_memory-124M-plain", "speed over plain", FASTER
    ),
    Line("GPT 25M, everything in RAM, against Lightning's single device", "in_memory-25M", "speed over single", FASTER),
    Line(
        "GPT 124M, everything in RAM, bf16-mixed, batch 2, peak memory of the process against Lightning's single device",
        "freed_memory-124M",
        "peak memory over single",
    ),
    Line("the same, batch 8", "freed_memory-124M-batch8", "peak memory over single"),
    Line("the same in fp32, batch 2", "freed_memory-124M-fp32", "peak memory over single"),
    Line(
        'GPT 124M, master states on disk, `Tuning(freed_memory="return")`, peak memory of the process against '
        "4 bytes a parameter, activations and 600 MB",
        "memory-124M",
        "peak memory over 4 bytes a parameter, activations and 600 MB",
    ),
)
PAGES: Mapping[Path, Sequence[Line]] = {ROOT / "README.md": README, ROOT / "docs" / "measured.md": MEASURED}


def table(lines: Sequence[Line]) -> str:
    """Returns a table as Markdown."""
    rows = {(row.case, row.figure): row for row in log.rows()}
    found = ["| what | tokens a step | ours | other | ratio | measured |", "| --- | --- | --- | --- | --- | --- |"]
    for line in lines:
        row = rows.get((line.case, line.figure))
        if row is None:
            found.append(f"| {line.what} | | | | | `{line.case}`: not yet |")
            continue
        cells = (line.what, row.tokens, _rounded(row.ours), _rounded(row.other), _ratio(line, row, rows), _when(row))
        found.append(f"| {' | '.join('' if cell == '-' else cell for cell in cells)} |")
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", each) for each in found) + "\n"


def _ratio(line: Line, row: log.Row, rows: Mapping[tuple[str, str], log.Row]) -> str:
    if row.ratio == "-":
        return "-"
    ratio = f"{float(row.ratio):.2f} {line.factor}"
    if not line.loss:
        return ratio
    loss = rows.get((line.case, LOSS))
    return f"{ratio}, loss {f'{float(loss.ratio):.3f} x' if loss else 'not measured'}"


def _rounded(amount: str) -> str:
    """An amount with so many digits as a reader needs."""
    number, _, unit = amount.partition(" ")
    if number == "-":
        return amount
    value = float(number)
    text = f"{value:,.0f}" if abs(value) >= 10 ** (DIGITS - 1) else f"{value:.{DIGITS}g}"
    return f"{text} {unit}".strip()


def _when(row: log.Row) -> str:
    date = datetime.date.fromisoformat(row.date[:10])
    return f"`{row.case}`, {row.commit[:7]}, {date.day} {date:%b}"


def of_readme() -> str:
    """Returns the table of README.md."""
    return table(README)


def written(page: Path) -> str:
    """Returns a page's text with the figures of LOG.md."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} has no lines {BEGIN.strip()!r} and {END.strip()!r}, between which its figures stand")
    return f"{before}{begin}\n{table(PAGES[page])}\n{end}{after}"


def write() -> None:
    """Writes the tables of all pages."""
    for page in PAGES:
        page.write_text(written(page))
        print(f"figures are in {page.relative_to(ROOT)}")
