"""The paper's tables and figures, from our planner, written to docs/paper.md. Needs no GPU and no memory for a model.

Side by side with what Angel-PTM's section 6 published: what `lightning-ptm plan` says of the same models on the same
servers, and, for the paper's comparisons, a model of a ZeRO-3 offload that divides states between device and RAM once and
for all (class Static). Nothing is tuned: one set of constants for all rows, listed on the page with where each comes
from. Where prediction and publication differ, the page says by how much. A prediction is no measurement.

    python -m benchmarks.paper                      # all tables but the longest
    python -m benchmarks.paper --tables figure8     # one; the page keeps the others
    python -m benchmarks.paper --tables table6_10t  # some more minutes of a core: not part of the first
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import datetime
import gc
import math
import multiprocessing
import re
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import oases
from benchmarks.oases import OasesAsk, oases_answer
from benchmarks.unit_degrees import DegreeAsk, degree_answer
from lightning_ptm import LockFree
from lightning_ptm.commands.plan import forecast
from lightning_ptm.errors import CapacityError
from lightning_ptm.forecasting import hardware as machines
from lightning_ptm.forecasting.pipeline import PipelineForecast
from lightning_ptm.terms import Link, Tier

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "paper.md"
SERVER = "a100_40gb_x8"
GB, GIB = 1e9, 2**30
GPT_TOKENS, LARGE_GPT_TOKENS, T5_TOKENS = 1024, 2048, 568
LOCK_FREE_STEPS = 16
STATE_BYTES = 16  # of a parameter: p16, g16, and three of fp32 with Adam
UPDATE_BYTES = 28  # of a parameter that an update reads and writes: 12 twice, g16 and p16 once

ASSUMPTIONS = (
    (
        "samples of GPT in Table 5 and Figure 7",
        f"{GPT_TOKENS} tokens",
        "assumed: the paper names no length there. It is the "
        'length of PatrickStar\'s Table 2 (Tencent, a server of the same kind); see "What the published rows imply"',
    ),
    (
        "samples of GPT3-175B (Figure 8)",
        f"{LARGE_GPT_TOKENS} tokens",
        "paper, section 2.2, where it counts the memory of this model",
    ),
    ("samples of T5", "512 tokens to read, 114 to write", "assumed: T5's own pre-training, which our config has"),
    (
        "shapes",
        "configs/*.yaml",
        "paper, Table 4; vocabularies are GPT-3's and T5's (assumed). Parameters are counted, not taken from the names",
    ),
    (
        "training",
        "AdamW, bf16-mixed, all units recomputed, no clipping",
        "paper, section 6.1 for precision; PatrickStar, "
        "section 8.1, for recomputation; Algorithm 2 updates layer by layer, so nothing waits for a norm",
    ),
    ("#Batch", "of one GPU, and samples/s of all", "assumed: the only reading in which 1 is a batch for 8 ranks"),
    (
        "share of RAM for pages",
        "0.8",
        "what a run of ours takes by default; the static offload gets as much",
    ),
    (
        "device memory for pages",
        "found",
        "`plan --device-memory`: `least` for a row about the largest batch, `best` otherwise; the default for experts",
    ),
    (
        "experts in Table 6",
        "32 a GPU",
        "assumed: 1.1T on 64 and 9.9T on 576 GPUs are then one series; the paper gives none",
    ),
    (
        "experts",
        "expert_parallel_size=GPUs",
        'paper, section 6.4: "expert parallelism [...], where expert parameters within an MoE layer are sharded among all '
        'GPUs": each GPU holds whole ones, and tokens travel',
    ),
    (
        "lock-free updates",
        f"max_staleness={LOCK_FREE_STEPS}",
        "assumed: the paper bounds nothing; this is that of the case `lock_free-64` of the benchmarks",
    ),
    (
        "static offload: device",
        "p16 / ranks + two gathered units + activations, with the gradients of a unit and of the root",
        "PatrickStar, "
        'section 4: "param fp16 data are stored in GPU while the grad fp16 and OS data are stored in CPU", with ZeRO-3',
    ),
    (
        "static offload: RAM",
        f"{STATE_BYTES} bytes a parameter",
        'PatrickStar, section 4: in the update "the CPU has to accommodate all of the model data"',
    ),
    (
        "static offload: a step",
        "max(compute, collectives, gradients to RAM) + update + parameters to the device",
        "assumed: what `backward()` and then `step()` can overlap; same rates as ours",
    ),
)

PAPER_TABLE_5 = (  # model, system, params (B), #batch, GPU mem (GB), samples/s
    ("GPT", "DeepSpeed", 28, 1, 18, 0.404),
    ("GPT", "DeepSpeed", 28, 36, 40, 7.61),
    ("GPT", "Angel-PTM", 28, 38, 39, 10.99),
    ("GPT", "Angel-PTM", 55, 1, 33, 0.464),
    ("GPT", "Angel-PTM", 55, 10, 40, 3.34),
    ("T5", "DeepSpeed", 27, 1, 20, 0.317),
    ("T5", "DeepSpeed", 27, 32, 39, 7.31),
    ("T5", "Angel-PTM", 27, 50, 40, 14.38),
    ("T5", "Angel-PTM", 58, 1, 38, 0.432),
    ("T5", "Angel-PTM", 58, 4, 40, 3.37),
)
TABLE_5_CONFIGS = {("GPT", 28): "gpt3_28b", ("GPT", 55): "gpt3_55b", ("T5", 27): "t5_27b", ("T5", 58): "t5_58b"}
COLOSSAL_BATCH = 32
PIPELINE_SAMPLES = 256
ONE_GPU = {
    "ranks_per_node": 1,
    "host_memory": "256GiB",
    "host_memory_bytes_per_s": 190e9,
    "cpu_cores": 48,
    "disk_read_bytes_per_s": 13e9,
    "disk_write_bytes_per_s": 10e9,
}
MICRO_BATCHES = (8, 4)
"""Number of micro-batches of a step, and samples of each."""
PAPER_FIGURE_7 = {"mean": 1.354, "largest": 1.70, "1.7B": 1 - 0.024}
PAPER_FIGURE_8 = {256: 11.68, 768: 36.46}
PAPER_TABLE_6 = {"1T": 37.26, "10T": 317.82, "10T lock-free": 942.31}


# --- Questions and answers --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ask:
    """One question to the planner: a config, changed as said, on some servers.

    Attributes:
        batch: samples a rank, or `auto`.
        tokens: length of a sample; experts: of each layer with some; both 0: the config's.
        device_memory, largest: as of `plan`.
        server: the hardware file; machine: fields of it that are changed.
        model: arguments of the config's model that are changed.
        clip: `gradient_clip_val`; accumulate: batches of a step.
    """

    config: str
    nodes: int = 1
    batch: int | str = "auto"
    device_memory: str | None = None
    tokens: int = 0
    experts: int = 0
    largest: str | None = None
    strategy: tuple[tuple[str, Any], ...] = ()
    server: str = SERVER
    machine: tuple[tuple[str, Any], ...] = ()
    model: tuple[tuple[str, Any], ...] = ()
    precision: str = "bf16-mixed"
    clip: float | None = None
    accumulate: int = 1


@dataclass(frozen=True, slots=True)
class Answer:
    """What the planner said; bytes are of one rank.

    Attributes:
        flops: of the model, of a rank's batch, without recomputation.
        page_bytes: of the device's pool; ram_bytes: of RAM that pages may take.
        unit_bytes: of the largest unit's p16, gathered.
        chosen: what was searched for.
        host_bytes: of pages in RAM; sent_bytes: by link, in a step.
    """

    fits: bool
    reason: str
    ranks: int
    numel: int
    batch: int
    seconds: float
    samples_per_s: float
    compute_s: float
    flops: int
    page_bytes: int
    ram_bytes: int
    activation_bytes: int
    unit_bytes: int
    busy_s: dict[str, float]
    chosen: dict[str, int]
    host_bytes: int = 0
    sent_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    pipeline: PipelineForecast | None = None
    binds: str = ""

    @property
    def device_bytes(self) -> int:
        return self.page_bytes + self.activation_bytes


def answer(ask: Ask) -> Answer:
    """Asks the planner."""
    document = yaml.safe_load((ROOT / "configs" / f"{ask.config}.yaml").read_text())
    trainer = {"gradient_clip_val": ask.clip, "precision": ask.precision, "accumulate_grad_batches": ask.accumulate}
    document["trainer"] |= trainer
    document["model"]["init_args"] |= dict(ask.model)
    if ask.tokens:
        document["data"]["init_args"]["sequence_length"] = ask.tokens
        document["model"]["init_args"]["sequence_length"] = ask.tokens
    if ask.experts:
        document["model"]["init_args"]["experts"] = ask.experts
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{ask.config}.yaml"
        path.write_text(yaml.safe_dump(document))
        gc.collect()
        gc.disable()  # a third of the time is looking for cycles among what lives to the end
        try:
            found, blueprint = forecast(
                path,
                _server(ask, Path(folder)),
                ask.nodes,
                ask.batch,
                {name: folder if name == "disk_path" else value for name, value in ask.strategy},
                device_memory=ask.device_memory,
                largest=ask.largest,
            )
        except CapacityError as error:
            return Answer(False, str(error), 0, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, {}, {})
        finally:
            gc.enable()
    device = found.tiers["device"]
    layout = blueprint.layout
    return Answer(
        fits=found.fits,
        reason=found.reason,
        ranks=found.ranks,
        numel=found.numel,
        batch=found.batch_size,
        seconds=found.seconds,
        samples_per_s=found.samples_per_s if found.fits else 0.0,
        compute_s=found.timing.compute_s if found.timing else 0.0,
        flops=found.flops,
        page_bytes=device.page_bytes,
        ram_bytes=blueprint.budget[Tier.HOST],
        activation_bytes=device.activation_bytes,
        unit_bytes=max(sum(flat.padded_bytes for flat in layout.flats_of(unit)) for unit in range(len(layout.units))),
        busy_s={use.link.value: use.busy_s for use in found.timing.links} if found.timing else {},
        chosen=found.chosen,
        host_bytes=found.tiers["host"].page_bytes,
        sent_bytes={use.link.value: use.bytes for use in found.timing.links} if found.timing else {},
        pipeline=found.pipeline,
        binds=found.binds,
    )


def _server(ask: Ask, folder: Path) -> str:
    """The hardware file of a question."""
    if not ask.machine:
        return ask.server
    fields = yaml.safe_load(machines.find(ask.server).read_text())
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump(fields | dict(ask.machine)))
    return str(path)


Answers = Callable[[Sequence[Any]], Sequence[Any]]
"""Answers in the order of the questions: `Answer` to an `Ask`, `DegreeAnswer` to a `DegreeAsk`."""


# --- The baselines ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Static:
    """A ZeRO-3 offload with fixed homes: p16 on the device, gradients and master states in RAM; see ASSUMPTIONS.

    Made of two answers for the same model at different batches: activations and compute grow evenly with the batch.
    """

    one: Answer
    many: Answer
    nodes: int

    def largest_batch(self) -> int:
        """Samples a rank that fit; 0: not even one."""
        node = machines.read(machines.find(SERVER))
        if STATE_BYTES * self._share > self.one.ram_bytes:
            return 0
        room = node.device_memory - self.device_bytes(0)
        least, each = self._line("activation_bytes")
        return max(0, int((room - least) // each))

    def device_bytes(self, batch: int) -> float:
        """Returns one rank's bytes. A batch of 0 has neither activations nor gradients of a unit and of the root."""
        least, each = self._line("activation_bytes")
        return 2 * self._share + 2 * self.one.unit_bytes + (least + each * batch if batch else 0)

    def seconds(self, batch: int) -> float:
        """Of a step."""
        rates = machines.read(machines.find(SERVER)).rates(self.nodes)
        least, each = self._line("compute_s")
        others = (self.one.ranks - 1) / self.one.ranks
        gathered = 3 * 2 * self.one.numel * others / rates.collective_bytes_per_s
        offloaded = 2 * self._share / rates.device_to_host_bytes_per_s
        update = UPDATE_BYTES * self._share / rates.update_host_bytes_per_s
        back = 2 * self._share / rates.host_to_device_bytes_per_s
        return max(least + each * batch, gathered, offloaded) + update + back

    def samples_per_s(self, batch: int) -> float:
        """Of all ranks."""
        return self.one.ranks * batch / self.seconds(batch)

    @property
    def _share(self) -> float:
        return self.one.numel / self.one.ranks

    def _line(self, name: str) -> tuple[float, float]:
        """(at no sample, of each sample) of a number that grows evenly."""
        low, high = getattr(self.one, name), getattr(self.many, name)
        each = (high - low) / (self.many.batch - self.one.batch)
        return low - each * self.one.batch, each


def data_parallel_samples_per_s(one: Answer, many: Answer) -> float:
    """Whole states on every device and an all-reduce of gradients behind the backward, at the largest batch that fits."""
    node = machines.read(machines.find(SERVER))
    rates = node.rates(one.ranks // node.ranks_per_node)
    each = (many.activation_bytes - one.activation_bytes) / (many.batch - one.batch)
    # Gradients of a unit are among activations, and among states.
    least = one.activation_bytes - each - one.unit_bytes
    batch = int((node.device_memory - STATE_BYTES * one.numel - least) // each)
    reduce_s = 2 * 2 * one.numel * (one.ranks - 1) / one.ranks / rates.collective_bytes_per_s
    update_s = UPDATE_BYTES * one.numel / rates.update_device_bytes_per_s
    return one.ranks * batch / (max(many.compute_s * batch / many.batch, reduce_s) + update_s)


# --- Tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """A number that was published, beside ours; None: the text gives none, or nothing fits. Both: there is none."""

    published: float | None
    predicted: float | None
    digits: int = 2

    @property
    def deviation(self) -> float | None:
        """Ours over the published one, less 1."""
        if self.published is None or self.predicted is None:
            return None
        return self.predicted / self.published - 1

    def __str__(self) -> str:
        if self.published is None and self.predicted is None:
            return "-"
        ours = "does not fit" if self.predicted is None else f"{self.predicted:,.{self.digits}f}"
        if self.published is None:
            return f"**{ours}**"
        by = "" if self.deviation is None else f" ({self.deviation:+.0%})"
        return f"{self.published:g} → **{ours}**{by}"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in the paper's order: names, then numbers. `text` stands above them.

    Attributes:
        causes: by row, the reason of the deviation; empty: the text gives one reason for all rows.
    """

    title: str
    text: str
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]
    causes: tuple[str, ...] = ()

    def markdown(self) -> str:
        """Returns a section of the page."""
        head = [*self.names, *self.numbers, *(["cause"] if self.causes else [])]
        lines = [f"## {self.title}", "", self.text, "", _line(head), _line(["---"] * len(head))]
        causes = [[cause] for cause in self.causes] or [[]] * len(self.rows)
        for (names, cells), cause in zip(self.rows, causes, strict=True):
            lines.append(_line([*names, *map(str, cells), *cause]))
        return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _tokens(model: str) -> int:
    return GPT_TOKENS if model == "GPT" else 0


def _whole(config: str, nodes: int = 1, tokens: int = 0) -> tuple[Ask, Ask]:
    """A batch of 1, and the largest that fits."""
    one = Ask(config, nodes, batch=1, device_memory="best", tokens=tokens)
    return one, dataclasses.replace(one, batch="auto", device_memory="least")


def table5(ask: Answers) -> Table:
    """Largest batch and samples/s on one server."""
    rows, causes = [], []
    pairs = [_whole(TABLE_5_CONFIGS[model, params], 1, _tokens(model)) for model, _, params, *_ in PAPER_TABLE_5]
    said = ask([question for pair in pairs for question in pair])
    for published, one, many in zip(PAPER_TABLE_5, said[::2], said[1::2], strict=True):
        model, system, params, batch, memory, speed = published
        if system == "DeepSpeed":
            static = Static(one, many, 1)
            most = 1 if batch == 1 else static.largest_batch()
            cells = (most, static.device_bytes(most), static.samples_per_s(most)) if most else (None, None, None)
        else:
            found = one if batch == 1 else many
            cells = (found.batch, found.device_bytes, found.samples_per_s) if found.fits else (None, None, None)
        count, held, rate = cells
        numbers = (
            Cell(params, one.numel / 1e9, 1),
            Cell(batch, count, 0),
            Cell(memory, None if held is None else held / GB, 0),
            Cell(speed, rate),
        )
        rows.append(((model, "static offload" if system == "DeepSpeed" else "ours", system), numbers))
        causes.append(_table5_cause(model, system, batch, count, numbers[-1]))
    return Table(
        "Table 5: batches on one server of 8 A100",
        "Published → **predicted** (deviation). Parameters in 10⁹: the published name, and what Table 4's shape comes to. "
        "A published #Batch of 1 is asked for as it is; otherwise the largest that fits is found.",
        ("model", "system", "the paper's"),
        ("parameters", "#Batch of a GPU", "GPU memory, GB", "samples/s"),
        tuple(rows),
        tuple(causes),
    )


def _table5_cause(model: str, system: str, batch: int, ours: int | None, rate: Cell) -> str:
    """Why a row of Table 5 deviates by more than 15 %."""
    if batch == 1:
        memory = (
            "what else is in the published device memory is not known"
            if system == "DeepSpeed"
            else "pages take what activations leave of the device"
        )
        return (
            "a published step with a batch of 1 takes several times what compute and the update take by our constants (see "
            f'"What the published rows imply"); {memory}'
        )
    if model == "T5":
        return (
            "Table 4's shape has half of the parameters of the name, and the length of samples is assumed: a sample "
            "computes less here and takes less memory"
        )
    if abs(rate.deviation or 0.0) <= _WITHIN:
        return "within 15 %, but for the parameters of Table 4's shape"
    speed = "compute binds, at an assumed half of the best rate; at 1024 tokens the published row needs more of it"
    if ours is not None and abs(ours / batch - 1) > _WITHIN:
        return f"{speed}; the #Batch is not explained, since that of 28B, of the same width, agrees"
    return speed


_WITHIN = 0.15
"""Deviation up to which no cause is given."""


def largest(ask: Answers) -> Table:
    """The largest models of Table 5."""
    rows, causes = [], []
    for model, published, layers in (("GPT", (28, 55), (26, 68)), ("T5", (27, 58), (28, 60))):
        asked = [_whole(TABLE_5_CONFIGS[model, size], 1, _tokens(model))[0] for size in published]
        small, deep, ours = ask([*asked, dataclasses.replace(asked[0], largest="layers")])
        each = (deep.numel - small.numel) / (layers[1] - layers[0])
        held = small.ranks * small.ram_bytes / STATE_BYTES
        depth = int((held - (small.numel - each * layers[0])) // each)
        size = small.numel + each * (depth - layers[0])
        rows += [
            ((model, "static offload"), (Cell(layers[0], depth, 0), Cell(published[0], size / 1e9, 1))),
            ((model, "ours"), (Cell(layers[1], ours.chosen["layers"], 0), Cell(published[1], ours.numel / 1e9, 1))),
            (
                (model, "ours over static offload"),
                (
                    Cell(round(layers[1] / layers[0], 3), ours.chosen["layers"] / depth),
                    Cell(round(published[1] / published[0], 3), ours.numel / size),
                ),
            ),
        ]
        shape = "; of layers also: Table 4's shape has half of the parameters of the name" if model == "T5" else ""
        causes += [
            f"published, a parameter takes {held * STATE_BYTES / published[0] / GB:.0f} bytes of the RAM that pages have "
            f"here, in place of {STATE_BYTES}: the paper does not say what else is there{shape}",
            f"pages here take {small.ram_bytes * small.ranks / GB:.0f} GB of RAM, and of the device what activations "
            f"leave; the paper does not give its shares{shape}",
            "as for the static offload",
        ]
    return Table(
        "Table 5: the largest model on one server",
        "Layers of the same width are added while a batch of 1 fits (`plan --largest layers`). T5's layers are those of the "
        "encoder, and of the decoder.",
        ("model", "system"),
        ("layers", "parameters, 10⁹"),
        tuple(rows),
        tuple(causes),
    )


FIGURE_7 = (("1.7B", 1), ("13B", 1), ("30B", 1), ("1.7B", 4), ("13B", 4), ("30B", 4), ("120B", 4))


def figure7(ask: Answers) -> Table:
    """Throughput over the static offload."""
    asked = []
    for model, nodes in FIGURE_7:
        pair = _whole(f"gpt3_{model.lower()}", nodes, GPT_TOKENS)
        asked += [*pair, dataclasses.replace(pair[1], device_memory="best")]
    said = ask(asked)
    rows, ratios = [], []
    causes = ["no number is published"] * len(FIGURE_7) + [STATIC_CAUSE] * 2 + ["within 15 %"]
    for (model, nodes), one, many, best in zip(FIGURE_7, said[::3], said[1::3], said[2::3], strict=True):
        static = Static(one, many, nodes)
        batch = static.largest_batch() if best.fits else 0
        ratio = best.samples_per_s / static.samples_per_s(batch) if batch else None
        ratios += [ratio] if ratio is not None else []
        names = (model, f"{8 * nodes}", "ours over static offload")
        rows.append((names, (Cell(None, best.samples_per_s), Cell(None, ratio))))
    for which, ratio in (("mean", sum(ratios) / len(ratios)), ("largest", max(ratios))):
        names = (which, "8, 32", "ours over static offload")
        rows.append((names, (Cell(None, None), Cell(PAPER_FIGURE_7[which], ratio))))
    one, many, best = said[:3]
    plain = best.samples_per_s / data_parallel_samples_per_s(one, many)
    names = ("1.7B", "8", "ours over plain data parallelism")
    rows.append((names, (Cell(None, best.samples_per_s), Cell(PAPER_FIGURE_7["1.7B"], plain))))
    return Table(
        "Figure 7: throughput against other systems",
        "The text gives a mean and a largest gain over DeepSpeed (+35.4 %, up to +70 %), and for 1.7B what is lost to "
        "Megatron-LM, which there is plain data parallelism (-2.4 %). Bars of single models are in the picture alone, which "
        "we do not have; Megatron-LM's hybrid parallelism is not modelled.",
        ("model", "GPUs", "what"),
        ("samples/s", "ratio"),
        tuple(rows),
        tuple(causes),
    )


STATIC_CAUSE = (
    "the static offload has about the same batch here, at which compute takes longer than its transfers beside it; the "
    "published DeepSpeed is slower than its bandwidths say, too (Table 5, batches of 1)"
)
"""Why ours gains less over the static offload than the published systems."""


def figure8(ask: Answers) -> Table:
    """GPT3-175B from 256 to 768 GPUs."""
    counts = (256, 384, 512, 768)
    said = ask([Ask("gpt3_175b", ranks // 8, device_memory="best", tokens=LARGE_GPT_TOKENS) for ranks in counts])
    efficiency = machines.read(machines.find(SERVER)).compute_efficiency
    rows, causes = [], []
    for ranks, found in zip(counts, said, strict=True):
        known = PAPER_FIGURE_8.get(ranks)
        scaling = None if known is None or ranks == 256 else round(known / PAPER_FIGURE_8[256], 2)
        over = found.samples_per_s / said[0].samples_per_s
        numbers = (Cell(None, found.batch, 0), Cell(known, found.samples_per_s), Cell(scaling, over))
        rows.append(((f"{ranks}",), numbers))
        causes.append(
            "no number is published"
            if known is None
            else f"compute binds, at an assumed {efficiency:.0%} of the best rate; the published samples/s are "
            f"{efficiency * known / found.samples_per_s:.0%} of it"
        )
    return Table(
        "Figure 8: GPT3-175B on more GPUs",
        "Published: the two ends, in the text; what lies between is in the picture alone. Above 3.00 at 768 GPUs is "
        "super-linear.",
        ("GPUs",),
        ("#Batch of a GPU", "samples/s", "over 256 GPUs"),
        tuple(rows),
        tuple(causes),
    )


def tensor(ask: Answers) -> Table:
    """GPT3-175B on 256 GPUs, layers cut over the GPUs of a server."""
    sizes = (1, 2, 4, 8)
    said = ask(
        [
            Ask(
                "gpt3_175b",
                32,
                device_memory="best",
                tokens=LARGE_GPT_TOKENS,
                strategy=(("tensor_parallel_size", size),),
            )
            for size in sizes
        ]
    )
    rows = []
    for size, found in zip(sizes, said, strict=True):
        tensor_exchange, collective = Link.TENSOR_EXCHANGE.value, Link.COLLECTIVE.value
        numbers = (
            Cell(None, found.page_bytes / GB, 1),
            Cell(None, found.activation_bytes / GB, 1),
            Cell(None, 8 * found.host_bytes / GB, 0),
            Cell(None, found.batch, 0),
            Cell(None, found.seconds),
            Cell(None, found.samples_per_s),
            Cell(None, found.sent_bytes.get(tensor_exchange, 0) / GB, 1),
            Cell(None, found.busy_s.get(tensor_exchange, 0.0)),
            Cell(None, found.sent_bytes.get(collective, 0) / GB, 1),
            Cell(None, found.seconds - found.compute_s),
        )
        rows.append(((f"{size}",), numbers))
    return Table(
        "GPT3-175B on 32 servers of 8 A100, layers cut over the GPUs of a server",
        "No published numbers: Angel-PTM cuts no layers. Each size at its largest batch that fits. What is sent is of a "
        "step and a GPU, as rings send it; pages are at their peak. What a group adds up of activations is exposed, all "
        "of it, while what is gathered and reduced passes beside compute. Units are recomputed, and what a forward has "
        "added up is kept for that: activations of a sample grow by it, so a group computes hardly larger batches than a "
        "GPU alone, and samples/s fall. What it buys is device memory for units in use, and less to gather and reduce.",
        ("tensor_parallel_size",),
        (
            "pages of a GPU, GB",
            "activations, GB",
            "pages in RAM of a server, GB",
            "#Batch of a group",
            "seconds of a step",
            "samples/s",
            "activations sent, GB",
            "seconds exposed by these",
            "gathered and reduced, GB",
            "seconds that compute waits in all",
        ),
        tuple(rows),
    )


def pipeline(ask: Answers) -> Table:
    """GPT3-175B on 256 GPUs, blocks in stages and layers cut over GPUs of a server."""
    ranks = 256
    shapes = ((1, 1), (2, 8), (4, 8), (8, 8), (8, 4), (8, 1))

    def asked(stages: int, parts: int) -> Ask:
        batch = PIPELINE_SAMPLES * stages * parts // ranks
        strategy: dict[str, int] = {"tensor_parallel_size": parts}
        if stages > 1:
            strategy |= {"pipeline_parallel_size": stages, "micro_batches": batch}
        return Ask("gpt3_175b", 32, batch, tokens=LARGE_GPT_TOKENS, strategy=tuple(strategy.items()))

    rows = []
    for (stages, parts), found in zip(shapes, ask([asked(*shape) for shape in shapes]), strict=True):
        said = found.pipeline
        rows.append(
            (
                (f"{stages}", f"{parts}", f"{ranks // stages // parts}", f"{found.batch if said else 1}"),
                (
                    Cell(None, found.page_bytes / GB, 1),
                    Cell(None, found.activation_bytes / GB, 1),
                    Cell(None, found.seconds),
                    Cell(None, found.samples_per_s),
                    Cell(None, 100 * said.bubble if said else 0.0, 0),
                    Cell(None, found.busy_s.get(Link.COLLECTIVE.value, 0.0)),
                    Cell(None, said.exposed_s / stages if said else 0.0),
                ),
            )
        )
    return Table(
        "GPT3-175B on 32 servers of 8 A100, blocks in pipeline stages",
        "No published numbers: Angel-PTM has no stages, and Colossal-AI publishes no seconds or samples of a pipeline "
        "(section 5.3 says that sequence parallelism is 1.55 times as fast as 1D on 4 stages, of a BERT). Each row has "
        f"{PIPELINE_SAMPLES} samples a step in micro-batches of 1, 1F1B; blocks are divided into equally many, and the last "
        "stage has the head, too. Bytes are of the stage that takes most of the device. Hidden states go over the servers' "
        "networks, whole from each GPU of a tensor group (assumed: as the run sends them), and a transfer begins when its "
        "receiver needs it, so none passes beside compute. GPUs of a stage that share its weights gather and reduce them for "
        "each micro-batch, in the seconds of the busiest stage that are listed.",
        ("stages", "tensor", "data", "micro-batches"),
        (
            "pages of a GPU, GB",
            "activations, GB",
            "seconds of a step",
            "samples/s",
            "bubble, %",
            "gathers and reductions, s",
            "sends of a stage, all exposed, s",
        ),
        tuple(rows),
    )


def colossal(ask: Answers) -> Table:
    """Colossal-AI's comparisons, of which one is of a model and a server like ours."""
    one = Ask("gpt3_13b", batch=1, device_memory="best", tokens=LARGE_GPT_TOKENS, machine=(("device_memory", "80GB"),))
    first, many = ask([one, dataclasses.replace(one, batch=COLOSSAL_BATCH)])
    gain = many.samples_per_s / Static(first, many, 1).samples_per_s(COLOSSAL_BATCH) if many.fits else None
    rows: list[tuple[tuple[str, ...], tuple[Cell, ...]]] = [
        (
            ("section 5.4", "13B (theirs OPT, ours GPT3), 8 A100 of 80 GB, 32 samples a GPU", "over DeepSpeed"),
            (Cell(1.33, gain),),
        )
    ]
    return Table(
        "Colossal-AI, section 5.4: offloading",
        "Section 5.4 compares states that lie where there is room with DeepSpeed's, divided once for all: beside it ours "
        "over the static offload, on our server with devices of 80 GB (theirs joins only neighbours by NVLink), at 2048 "
        "tokens a sample (assumed; it names none). Its Figure 14 (10B, 4 samples) gives no numbers, nor do Figures 8 (its "
        "text has percents of memory, for layers of a size that it does not name), 10 and 11.",
        ("where", "setup", "what"),
        ("number",),
        tuple(rows),
        (STATIC_CAUSE,),
    )


def slices(ask: Answers) -> Table:
    """GPT3-175B on one GPU: micro-batches one after another, and in slices of one batch."""
    batches, samples = MICRO_BATCHES
    shared = {"nodes": 1, "tokens": LARGE_GPT_TOKENS, "machine": tuple(ONE_GPU.items())}
    places: dict[str, dict[str, str]] = {
        "on the GPU": {},
        "in RAM": {"offload_activations": "host", "host_memory": "120GiB"},
        "on disk": {"offload_activations": "disk"},
    }
    asked = {
        (f"accumulate_grad_batches={batches}", place): Ask(
            "gpt3_175b",
            batch=samples,
            accumulate=batches,
            strategy=tuple(({"disk_path": "/any"} | settings).items()),
            **shared,
        )
        for place, settings in places.items()
    } | {
        (f"slices={batches}", place): Ask(
            "gpt3_175b",
            batch=batches * samples,
            strategy=tuple(({"disk_path": "/any", "slices": batches} | settings).items()),
            **shared,
        )
        for place, settings in places.items()
        if settings
    }
    said = dict(zip(asked, ask(list(asked.values())), strict=True))
    rows = []
    for (how, place), found in said.items():
        memory = (Cell(None, found.page_bytes / GB, 1), Cell(None, found.activation_bytes / GB, 1))
        if not found.fits:
            rows.append(((how, f"{place}: does not fit"), (*memory, *[Cell(None, None)] * 6)))
            continue
        busy = [found.busy_s.get(link.value, 0.0) for link in (Link.DISK_READ, Link.DISK_WRITE)]
        accumulated = said[f"accumulate_grad_batches={batches}", place].seconds
        times = (
            *(Cell(None, each, 0) for each in (found.seconds, found.compute_s, *busy)),
            Cell(None, found.seconds / max(found.compute_s, *busy)),
            Cell(None, accumulated / found.seconds if accumulated else None),
        )
        rows.append(((how, place), (*memory, *times)))
    return Table(
        "GPT3-175B on one A100: micro-batches in slices",
        f"{batches} micro-batches of {samples} samples of {LARGE_GPT_TOKENS} tokens, on a machine with one A100 of 40 GB, "
        "256 GiB of RAM and a disk that reads 13 GB/s and writes 10 GB/s (assumed). Units are recomputed from their inputs. "
        "GreedySnake (arXiv 2512.17570), which "
        "also computes all micro-batches of a layer before the next layer, published 2.53 times the throughput of "
        "ZeRO-Infinity for GPT-175B on one A100 (1.96 times for GPT-65B). The last column is over our own accumulation with "
        "inputs in the same place, which keeps in RAM what fits, so these are not the same ratio. A row does not fit if "
        "pages and activations of the GPU together take more than it has, also with the least device_memory.",
        ("how", "inputs of units"),
        (
            "pages of the GPU, GB",
            "activations, GB",
            "seconds of a step",
            "compute",
            "disk reads",
            "disk writes",
            "over the longest of these",
            "speed over accumulated",
        ),
        tuple(rows),
    )


def _experts(ranks: int, each: int, **strategy: Any) -> Ask:
    """`each` experts of a layer on each GPU."""
    settings = {"expert_parallel_size": ranks} | strategy
    return Ask("t5_moe_1.2t", ranks // 8, experts=each * ranks, strategy=tuple(settings.items()))


def figure9(ask: Answers) -> Table:
    """T5-MoE with 9 experts a GPU."""
    counts = (64, 128, 256)
    said = ask([_experts(ranks, 9) for ranks in counts])
    rows = []
    for ranks, found in zip(counts, said, strict=True):
        efficiency = found.samples_per_s / ranks / (said[0].samples_per_s / counts[0])
        numbers = (
            Cell(None, found.numel / 1e12),
            Cell(None, found.samples_per_s, 0),
            Cell(None, efficiency),
            Cell(None, found.busy_s[Link.EXCHANGE.value] / found.seconds),
        )
        rows.append(((f"{ranks}", f"{9 * ranks}"), numbers))
    return Table(
        "Figure 9: T5-MoE-1.2T on more GPUs",
        'Published in the picture alone; the text says "near-linear", and less than GPT3-175B, as more GPUs put more tokens '
        "into the all-to-all. As there, a GPU holds 9 whole experts of each layer and tokens travel; what is not an expert "
        "we shard over all GPUs, where the paper duplicates it.",
        ("GPUs", "experts of a layer"),
        ("parameters, 10¹²", "samples/s", "of linear scaling", "share of the step that tokens travel"),
        tuple(rows),
    )


def table6(ask: Answers) -> Table:
    """1T of experts whose master states are on the SSDs."""
    return _with_ssds(ask, "1T", 64, (1, LOCK_FREE_STEPS))


def table6_10t(ask: Answers) -> Table:
    """10T, likewise: 295,000 units to plan, twice."""
    return _with_ssds(ask, "10T", 576, (LOCK_FREE_STEPS,))


def _with_ssds(ask: Answers, model: str, ranks: int, staleness: Sequence[int]) -> Table:
    disk = {"disk_path": "/any"}
    asked = [("synchronous", _experts(ranks, 32, **disk, offload_optimizer="disk"))]
    for steps in staleness:
        question = _experts(ranks, 32, **disk, lock_free=LockFree(max_staleness=steps))
        asked.append((f"lock-free, max_staleness={steps}", question))
    said = ask([question for _, question in asked])
    rows = []
    for (updates, _), found in zip(asked, said, strict=True):
        published = PAPER_TABLE_6.get(model if found is said[0] else f"{model} lock-free")
        gain = None if published is None or found is said[0] else round(published / PAPER_TABLE_6[model], 2)
        numbers = (
            Cell(float(model.removesuffix("T")), found.numel / 1e12),
            Cell(None, found.batch, 0),
            Cell(published, found.samples_per_s),
            Cell(gain, found.samples_per_s / said[0].samples_per_s),
        )
        rows.append(((model, f"{found.ranks}", updates), numbers))
    return Table(
        f"Table 6: {model} of experts with SSDs, with and without lock-free updates",
        "One update reads and writes 12 bytes a parameter; with max_staleness=1 it has to take place at each step, so what "
        "is bound by the disks stays so. Samples/s then follow the batch: ours is the largest that fits, since a loss in "
        "slices keeps no logits; the paper does not say its own. Validation losses are not predicted.",
        ("model", "GPUs", "updates"),
        ("parameters, 10¹²", "#Batch of a GPU", "samples/s", "over synchronous"),
        tuple(rows),
    )


DEGREE_MODELS = ("gpt3_1.7b", "gpt3_13b", "gpt3_28b", "gpt3_30b", "gpt3_55b", "t5_1.4b", "t5_27b", "t5_58b")
DEGREE_SERVERS = (
    ("l40s_x8", "bf16-mixed"),
    ("rtx4090_x4", "bf16-mixed"),
    ("a100_40gb_x8", "bf16-mixed"),
    ("v100_32gb_x8", "16-mixed"),
    ("h100_x8", "bf16-mixed"),
)


def degrees(ask: Answers) -> Table:
    """Gains of a tensor parallel size for each unit."""
    asked = [
        DegreeAsk(model, server, precision=precision) for server, precision in DEGREE_SERVERS for model in DEGREE_MODELS
    ]
    asked += [DegreeAsk(model, DEGREE_SERVERS[0][0], samples=4) for model in ("gpt3_1.7b", "t5_1.4b")]
    rows = []
    said = ask(asked)
    most = [100 * max(getattr(found, name) for found in said if found) for name in ("gain", "gain_in_run")]
    for question, found in zip(asked, said, strict=True):
        names: tuple[str, ...] = question.hardware, question.config, f"{question.samples}"
        numbers: tuple[Cell, ...] = (Cell(None, None),) * 4
        if found is None:
            names += "does not fit", "-"
        else:
            names += f"{found.uniform[0]}", "the same" if found.gain < _LITTLE else found.mixed[0]
            seconds = found.uniform[2], found.mixed_run[1]
            gains = 100 * found.gain, 100 * found.gain_in_run
            numbers = (*(Cell(None, each, 3) for each in seconds), *(Cell(None, each, 1) for each in gains))
        rows.append((names, numbers))
    return Table(
        "A tensor parallel size for each unit: shipped configs on shipped servers",
        "No published numbers (the paper's own setting is a table of its own). Oases' planner gives each layer its own "
        "degree; a run of ours has one `tensor_parallel_size`. Here `benchmarks.unit_degrees` searches the fastest "
        "degrees by unit that fit, with seconds and bytes of the planner, no clipping. *At best* is the "
        "gain over the fastest single degree if every gather and reduction passed beside compute, wherever in the model. "
        "*In a virtual run* is the gain of the fastest of that chain and some mixes (an eighth, a quarter or half of the "
        "units with the other degree, first, last or spread), with gathers in the order of the plan. Pages are sharded over "
        "all GPUs, so a degree changes what a unit gathers and sums, not the memory of its states: without a limit of memory "
        "that adds up by units, unequal degrees gain only where collectives take longer than compute: small models, links by "
        f"PCIe and few samples. The most is {most[0]:.0f} % at best, {most[1]:.1f} % in a virtual run. Two pairs gain 5 % or "
        "more. A second look at them, with settings that a run has already (no recomputation, two halves of a batch) and one "
        "degree for all units: gpt3_1.7b takes 0.194 s, and no several degrees are faster; t5_1.4b takes 0.078 s, and the "
        "fastest with several degrees 0.076 s. So several degrees gain at most 3.6 % over the fastest run with one, and runs "
        "have one. Without halves, several degrees gain 14 % (gpt3_1.7b: 0.246 s) and 6.7 % (t5_1.4b) over the fastest with "
        'one, so that one degree suffices rests on halves: a run whose batch cannot be halved (`overlap="two_batches"`) '
        "forgoes these gains.",
        ("server", "config", "samples of a GPU", "fastest single degree", "fastest degrees by unit"),
        (
            "seconds with the single degree",
            "seconds with several, virtual run",
            "gain at best, %",
            "gain in a virtual run, %",
        ),
        tuple(rows),
    )


_LITTLE = 0.001
"""A gain below which degrees are not listed."""


def lengths(ask: Answers) -> Table:
    """What the assumed length of samples does to a row of Table 5."""
    rows = []
    counts = (512, GPT_TOKENS, 2048)
    said = ask([_whole("gpt3_28b", 1, tokens)[1] for tokens in counts])
    same = round(GPT_TOKENS * said[1].samples_per_s / 10.99, -1)
    for tokens, found in zip(counts, said, strict=True):
        rows.append(((f"{tokens}",), (Cell(38, found.batch, 0), Cell(10.99, found.samples_per_s))))
    return Table(
        "What the assumed length does",
        "The row of Table 5 for GPT 28B with Angel-PTM, for samples of other lengths. Deviations are the effect of the "
        f"length: at half of the GPU's best rate, the published samples/s are those of samples of about {same:.0f} tokens.",
        ("tokens a sample",),
        ("#Batch of a GPU", "samples/s"),
        tuple(rows),
    )


def implied(ask: Answers) -> Table:
    """What the published rows would mean, under the same assumptions."""
    rows = []
    node = machines.read(machines.find(SERVER))
    said = ask([_whole(TABLE_5_CONFIGS[model, params], 1, _tokens(model))[0] for model, _, params, *_ in PAPER_TABLE_5])
    for (model, system, params, batch, _, speed), found in zip(PAPER_TABLE_5, said, strict=True):
        flops = found.flops / found.batch * speed / found.ranks * 4 / 3
        step_s = found.ranks * batch / speed
        moved = UPDATE_BYTES * found.numel / step_s / GB
        rows.append(
            (
                (model, system, f"{params}B", f"{batch}"),
                (
                    Cell(None, step_s, 1),
                    Cell(None, flops / 1e12, 0),
                    Cell(None, 100 * flops / node.compute_flops_per_s["bfloat16"], 0),
                    Cell(None, moved, 0),
                ),
            )
        )
    return Table(
        "What the published rows imply",
        "Under the assumptions above: the seconds of a step (8 x #Batch / samples/s); operations a second and GPU with "
        f"recomputation, also in percent of its best rate (we assume {node.compute_efficiency:.0%}); and what an update of "
        "all parameters in each step would move through RAM at least, which gives "
        f"{node.host_memory_bytes_per_s / GB:.0f} GB/s by our constants. At 2048 tokens the third row would need more than "
        "twice its operations: more than the GPU has, so its samples are shorter. The rows with a batch of 1 take far longer "
        "than compute and the update need by our constants: the published systems lose time there that no bandwidth "
        "explains, and T5 58B would take longer with a batch of 1 than with one of 4. And if 28B were the most that RAM "
        f"holds, a parameter would take {said[0].ranks * said[0].ram_bytes / 28e9:.0f} bytes of it, where fixed homes need "
        f"{STATE_BYTES}.",
        ("model", "system", "parameters", "#Batch"),
        ("seconds of a step", "10¹² operations/s and GPU", "percent of its best", "GB/s of RAM"),
        tuple(rows),
    )


def table5_defaults(ask: Answers) -> Table:
    """Table 5 with default settings, with and without clipping by norm."""
    asked, published = [], [row for row in PAPER_TABLE_5 if row[1] == "Angel-PTM"]
    for model, _, params, batch, *_ in published:
        one = Ask(TABLE_5_CONFIGS[model, params], batch=1 if batch == 1 else "auto", tokens=_tokens(model))
        asked += [one, dataclasses.replace(one, clip=1.0)]
    said = ask(asked)
    rows, causes = [], []
    for row, plain, clipped in zip(published, said[::2], said[1::2], strict=True):
        model, _, params, batch, memory, speed = row
        for found, clips in ((plain, "no"), (clipped, "by norm")):
            numbers = (
                Cell(batch, found.batch if found.fits else None, 0),
                Cell(memory, found.device_bytes / GB if found.fits else None, 0),
                Cell(speed, found.samples_per_s if found.fits else None),
            )
            rows.append(((model, f"{params}B", clips), numbers))
            causes.append(_table5_cause(model, "Angel-PTM", batch, found.batch if found.fits else None, numbers[-1]))
    return Table(
        "Table 5 with default settings",
        "The rows of Angel-PTM as a run has them that sets nothing but the config's recomputation: the largest batch beside "
        "the pages of a run that begins with the least (not the fastest share of the device, nor the one that leaves most "
        "to activations, as above). With `gradient_clip_val`, gradients wait in pages until the norm is known.",
        ("model", "parameters", "clipping"),
        ("#Batch of a GPU", "GPU memory, GB", "samples/s"),
        tuple(rows),
        tuple(causes),
    )


def figure7_defaults(ask: Answers) -> Table:
    """Figure 7 with default settings, with and without clipping."""
    models = [(model, nodes) for model, nodes in FIGURE_7 if nodes == 1]
    asked = []
    for model, nodes in models:
        one = Ask(f"gpt3_{model.lower()}", nodes, batch=1, tokens=GPT_TOKENS)
        many = dataclasses.replace(one, batch="auto")
        asked += [one, many, dataclasses.replace(many, clip=1.0)]
    said = ask(asked)
    rows, ratios = [], []
    for (model, nodes), one, many, clipped in zip(models, said[::3], said[1::3], said[2::3], strict=True):
        static = Static(one, many, nodes)
        batch = static.largest_batch()
        for found, clips in ((many, "no"), (clipped, "by norm")):
            ratio = found.samples_per_s / static.samples_per_s(batch) if batch and found.fits else None
            ratios += [ratio] if ratio is not None and clips == "no" else []
            rows.append(((model, f"{8 * nodes}", clips), (Cell(None, found.samples_per_s), Cell(None, ratio))))
    rows.append((("mean", "8", "no"), (Cell(None, None), Cell(PAPER_FIGURE_7["mean"], sum(ratios) / len(ratios)))))
    return Table(
        "Figure 7 with default settings",
        "Ours over the static offload on one server, as a run has it that sets nothing but the config's recomputation. The "
        "published mean is over 8 and 32 GPUs; the static offload does not clip.",
        ("model", "GPUs", "clipping"),
        ("samples/s", "ratio"),
        tuple(rows),
        tuple(["no number is published"] * (len(rows) - 1) + [STATIC_CAUSE]),
    )


# --- PatrickStar ------------------------------------------------------------------------------------------------------

STAR_BATCH = 4  # the smallest that its section 8.1 tries
STAR_SHAPES = {  # Table 2; its columns for 10B to 18B are in disorder there: this order gives the named sizes
    "1B": (2048, 20),
    "6B": (3072, 53),
    "18B": (4096, 90),
    "68B": (9216, 66),
}
STAR_SERVERS = {"YARD": ("v100_32gb_x8", "16-mixed"), "SuperPod": ("a100_40gb_x8", "16-mixed")}
STAR_LARGEST = (  # section 8.2.1: cluster, GPUs, PatrickStar, DeepSpeed-DP, width of the largest in Table 2
    ("YARD", 1, 12, 4, 4096),
    ("YARD", 8, 18, 4, 4096),
    ("SuperPod", 1, 50, 15, 8192),
    ("SuperPod", 8, 68, 30, 9216),
)
STAR_TFLOPS = (  # section 8.2.3: cluster, nodes, model, Tflop/s of all GPUs
    ("YARD", 1, "1B", 444),
    ("YARD", 1, "18B", 419),
    ("SuperPod", 1, "6B", 1180),
    ("SuperPod", 1, "68B", 857),
)


def _star(cluster: str, width: int, layers: int, **fields: Any) -> Ask:
    server, precision = STAR_SERVERS[cluster]
    # A head is 576 wide at most there: the width is divided by 16.
    model = {"width": width, "layers": layers, "heads": 16, "head_width": width // 16, "feed_forward_width": 4 * width}
    return Ask("gpt3_13b", tokens=GPT_TOKENS, server=server, precision=precision, model=tuple(model.items()), **fields)


def patrickstar_largest(ask: Answers) -> Table:
    """The largest models of PatrickStar's section 8.2.1."""
    asked = []
    for cluster, gpus, _, _, width in STAR_LARGEST:
        machine = () if gpus == 8 else (("ranks_per_node", gpus),)
        asked.append(_star(cluster, width, 10, batch=STAR_BATCH, largest="layers", machine=machine))
    rows, causes = [], []
    for (cluster, gpus, star, deepspeed, _), found in zip(STAR_LARGEST, ask(asked), strict=True):
        static = found.ranks * found.ram_bytes / STATE_BYTES
        rows += [
            ((cluster, f"{gpus}", "ours", "PatrickStar"), (Cell(star, found.numel / 1e9, 1),)),
            ((cluster, f"{gpus}", "static offload", "DeepSpeed-DP"), (Cell(deepspeed, static / 1e9, 1),)),
        ]
        causes += [
            "14 bytes a parameter there, 16 here; ours takes all of the device that activations leave, theirs a fifth; "
            "models of any speed count here",
            "16 bytes a parameter of RAM, and models of any speed count here; the paper names no cause for its decrease",
        ]
    return Table(
        "PatrickStar: the largest model on one node",
        "Its section 8.2.1, in 10⁹ parameters. Layers of the width of its Table 2 are added while a batch of "
        f"{STAR_BATCH} of 1024 tokens a GPU, the smallest that it tries, fits (`plan --largest layers`). It counts a model "
        "only above 30 (YARD) and 50 (SuperPod) Tflop/s a GPU. With 1 GPU the node has all its RAM.",
        ("cluster", "GPUs", "system", "the paper's"),
        ("parameters, 10⁹",),
        tuple(rows),
        tuple(causes),
    )


def patrickstar_speed(ask: Answers) -> Table:
    """Operations per second in PatrickStar's section 8.2.3."""
    asked = [_star(cluster, *STAR_SHAPES[model], nodes=nodes, batch="auto") for cluster, nodes, model, _ in STAR_TFLOPS]
    rows, causes = [], []
    for (cluster, nodes, model, speed), found in zip(STAR_TFLOPS, ask(asked), strict=True):
        # It divides the operations of a step by its seconds; recomputation is one more forward of four.
        rate = found.flops * 4 / 3 / found.seconds * found.ranks / 1e12 if found.fits else None
        node = machines.read(machines.find(STAR_SERVERS[cluster][0]))
        best = node.compute_flops_per_s["float16"] * node.ranks_per_node * nodes / 1e12
        rows.append(
            (
                (cluster, f"{8 * nodes}", model),
                (
                    Cell(None, found.batch if found.fits else None, 0),
                    Cell(speed, rate, 0),
                    Cell(round(100 * speed / best), 100 * rate / best if rate else None, 0),
                ),
            )
        )
        causes.append(
            f"bottleneck: {found.binds}; we assume {node.compute_efficiency:.0%} of the best rate for compute"
            if found.fits
            else "see the table of the largest models"
        )
    return Table(
        "PatrickStar: operations per second on one node",
        "Its section 8.2.3, Tflop/s of all 8 GPUs with recomputation counted (assumed; it does not say), at the largest "
        "batch that fits with default settings. The largest of its batches is 64; ours has no such limit.",
        ("cluster", "GPUs", "model"),
        ("#Batch of a GPU", "Tflop/s", "percent of the best rate"),
        tuple(rows),
        tuple(causes),
    )


# --- Colossal-AI's grids ----------------------------------------------------------------------------------------------

IMAGE_TOKENS = 197  # of 224 x 224 pixels in patches of 16, and a class token
GRID_ROWS = (  # Table 3: GPUs, mode, layers, width, batch, images/s
    (4, "1D", 24, 2048, 128, 5.06),
    (4, "2D", 24, 2048, 256, 6.18),
    (4, "2.5D", 24, 2048, 256, 6.73),
    (8, "1D", 24, 2048, 256, 7.46),
    (8, "2.5D", 24, 2048, 384, 6.57),
    (8, "3D", 24, 2048, 512, 8.38),
    (16, "1D", 32, 4096, 64, 3.42),
    (16, "2D", 32, 4096, 256, 5.33),
    (16, "2.5D", 32, 4096, 256, 5.46),
    (32, "1D", 32, 4096, 128, 4.22),
    (32, "2.5D", 32, 4096, 256, 5.46),
    (64, "1D", 32, 4096, 128, 4.63),
    (64, "2D", 32, 4096, 512, 12.76),
    (64, "2.5D", 32, 4096, 512, 4.93),
    (64, "3D", 32, 4096, 512, 8.63),
)
GRID_SIDES = {4: 2, 8: 2, 16: 4, 32: 4, 64: 4}
"""By GPUs, the side of 2.5D squares and of cubes; 2D has the square root."""
GRID_ITEMSIZE = 2


def grid_numel(mode: str, ranks: int, tokens: int, width: int) -> float:
    """Returns the elements that a rank sends for a block in a step: formulas of docs/grid.md; `1D` is Megatron-LM's.

    Args:
        tokens: of the step.
    """
    activations, weights = tokens * width, 36 * width * width
    if mode == "1D":  # four all-reduces
        return 8 * activations * (ranks - 1) / ranks
    if mode == "3D":
        side = GRID_SIDES[ranks]
        return (39 * activations + weights) * (side - 1) / side**3
    side = math.isqrt(ranks) if mode == "2D" else GRID_SIDES[ranks]
    depth = ranks // side**2
    squares = 21 * activations / depth + weights
    return squares * (side - 1) / side**2 + weights * (depth - 1) / ranks


def grid(ask: Answers) -> Table:
    """Colossal-AI's Table 3, from bytes."""
    del ask  # formulas alone

    def gigabytes(gpus: int, mode: str, layers: int, width: int, batch: int) -> float:
        return layers * grid_numel(mode, gpus, batch * IMAGE_TOKENS, width) * GRID_ITEMSIZE / batch / GB

    def compute(gpus: int, layers: int, width: int) -> float:
        return layers * width * width / (32 * 4096 * 4096) / gpus

    # Two unknowns, seconds of an image's compute on one GPU and seconds of a GB, from the rows of 1D on 16 and 64 GPUs.
    first, last = (row for row in GRID_ROWS if row[1] == "1D" and row[0] in (16, 64))
    (first_share, first_gb), (last_share, last_gb) = (
        (compute(row[0], *row[2:4]), gigabytes(*row[:5])) for row in (first, last)
    )
    determinant = first_share * last_gb - last_share * first_gb
    image_s = (last_gb / first[-1] - first_gb / last[-1]) / determinant
    gigabyte_s = (first_share / last[-1] - last_share / first[-1]) / determinant
    rows, causes = [], []
    of_1d = {row[0]: row[-1] for row in GRID_ROWS if row[1] == "1D"}
    found: dict[int, float] = {}
    for gpus, mode, layers, width, batch, speed in GRID_ROWS:
        sent = gigabytes(gpus, mode, layers, width, batch)
        rate = 1 / (image_s * compute(gpus, layers, width) + gigabyte_s * sent)
        found.setdefault(gpus, rate)  # 1D is first
        over = (speed / of_1d[gpus], rate / found[gpus])
        numbers = Cell(None, sent), Cell(speed, rate), Cell(round(over[0], 2), over[1])
        rows.append(((f"{gpus}", f"{layers} x {width}", mode, f"{batch}"), numbers))
        causes.append(_grid_cause(gpus, mode, rate / speed - 1))
    flops = 6 * 12 * 32 * 4096**2 * IMAGE_TOKENS / image_s
    return Table(
        "Colossal-AI, Table 3: 1D, 2D, 2.5D and 3D from their bytes",
        "ViTs on P100s, one GPU a node. GB that a GPU sends for an image: formulas of [Grid modes](grid.md) in 16 bits "
        "(its Table 1 has no formulas in our copy), and four all-reduces a block for 1D, as Megatron-LM's. Images/s: "
        "compute and bytes, one after the other, with two numbers that follow from the rows of 1D on 16 and 64 GPUs: "
        f"{flops / 1e12:.1f} Tflop/s of a GPU and {1 / gigabyte_s:.1f} GB/s of a GPU's sends. All other rows are predicted "
        "by these. 2.5D has squares of 2 x 2 on 4 and 8 GPUs, of 4 x 4 on 16 to 64.",
        ("GPUs", "layers x width", "mode", "batch"),
        ("GB sent for an image", "images/s", "over 1D"),
        tuple(rows),
        tuple(causes),
    )


def _grid_cause(gpus: int, mode: str, deviation: float) -> str:
    if mode == "1D" and gpus in (16, 64):
        return "none: the two numbers follow from it"
    if abs(deviation) <= 0.15:
        return "within 15 %"
    if mode == "2.5D" and gpus == 16:
        return "of depth 1 it is 2D here; published, it is 2 % faster than 2D"
    if mode == "2.5D":
        return (
            "the published rate is no higher than with fewer ranks, though depth halves what a GPU sends: bytes do not "
            "explain it"
        )
    if mode == "3D":
        return "collectives along three axes follow each other; only their bytes are counted"
    return "compute and links have one rate here; at half the width, products and messages are smaller and slower"


def sequence(ask: Answers) -> Table:
    """Colossal-AI's section 5.3: sequence parallelism against 1D, on BERT-Base."""
    model = {"vocab_size": 30528, "width": 768, "layers": 12, "heads": 12, "head_width": 64, "feed_forward_width": 3072}
    machine = {"ranks_per_node": 4, "host_memory": "512GB", "cpu_cores": 64, "inter_node_bytes_per_s": 25e9}

    def asked(**sizes: int) -> Ask:
        strategy = tuple({**sizes, "recompute": "none"}.items())
        fields = {"model": tuple(model.items()), "machine": tuple(machine.items()), "tokens": SEQUENCE_TOKENS}
        return Ask("gpt3_13b", 3, precision="16-mixed", strategy=strategy, **fields)  # type: ignore[arg-type]

    along, cut = ask([asked(context_parallel_size=12), asked(tensor_parallel_size=12)])
    rows = [
        (
            ("the largest batch",),
            (Cell(None, along.batch, 0), Cell(None, cut.batch, 0), Cell(4.44, along.batch / cut.batch)),
        ),
        (
            ("samples/s at it",),
            (
                Cell(None, along.samples_per_s, 0),
                Cell(None, cut.samples_per_s, 0),
                Cell(1.43, along.samples_per_s / cut.samples_per_s),
            ),
        ),
    ]
    return Table(
        "Colossal-AI, section 5.3: sequence parallelism over 1D",
        "BERT-Base (here a GPT of its size) on 12 GPUs, 3 nodes of 4 A100 of 40 GB with 25 GB/s between them, "
        f"{SEQUENCE_TOKENS} tokens (512 there; our sequences are cut into 24 chunks). Their sequence parallelism is our "
        "`context_parallel_size`. Published: 4.44 times the batch on 12 GPUs, and up to 1.43 times as fast.",
        ("what",),
        ("context_parallel_size=12", "tensor_parallel_size=12", "ratio"),
        tuple(rows),
        (
            "within 15 %"
            if abs(along.batch / cut.batch / 4.44 - 1) <= _WITHIN
            else "attention keeps no scores here (fused kernels), which are the same for both; units' inputs are not",
            "1D waits here for all its sums over the network between nodes; published at batches that it does not name",
        ),
    )


SEQUENCE_TOKENS = 504


# --- Oases ------------------------------------------------------------------------------------------------------------


def oases_shares(ask: Answers) -> Table:
    """Oases' Table 2."""
    (found,) = ask([OasesAsk()])
    rows, causes = [], []
    for cluster in oases.CLUSTERS:
        for place, (width, model) in enumerate(oases.MODELS.items()):
            halves = found.calibrations[cluster].halves_slower
            shares = [
                100 * longer * found.compute_s[cluster, width] / found.seconds[cluster, width, schedule]
                for schedule, longer in ((oases.Schedule.MEGATRON, 1.0), (oases.Schedule.FINE_GRAINED, halves))
            ]
            systems = [oases.EFFICIENCY[cluster, system][place] for system in ("Megatron-LM", "Oases")]
            cells = tuple(Cell(system, share, 1) for system, share in zip(systems, shares, strict=True))
            rows.append(((cluster, f"{width}", f"{model.degree}"), cells))
            own = "the rate of sums follows from Megatron-LM's number; " if width in oases.CALIBRATED.values() else ""
            causes.append(own + _share_cause([cell.deviation or 0.0 for cell in cells]))
    rates = "; ".join(
        f"{cluster}: " + ", ".join(f"{rate / GB:.1f} GB/s of {degree}" for degree, rate in each.sum_bytes_per_s.items())
        for cluster, each in found.calibrations.items()
    )
    calibration, node = found.calibrations[oases.CLUSTERS[0]], machines.look_up("rtx3090", 4)
    widths = ", ".join(map(str, oases.CALIBRATED.values()))
    return Table(
        "Oases, Table 2: percent of time in which GPUs compute",
        "Seven GPTs on 32 RTX 3090, 4 a node. The paper gives no rates, so they follow from published rows, the same for all "
        f"widths. Sums: Megatron-LM's shares at widths {widths}: {rates}. Compute: Megatron-LM's rows in Table 3, "
        f"{node.flops_per_s('float16') / calibration.slower / 1e12:.1f} Tflop/s; Oases' rows there take "
        f"{calibration.halves_slower:.2f} times as long for it (halves of a batch compute slower, section 5.6; the planner "
        "itself counts launches of kernels alone). The rest is the planner's clock: sums beside the other half's compute, "
        'recomputation without sums, as `overlap="two_batches"`. Published numbers of Oases are with its planner, ours '
        "without.",
        ("cluster", "width", "GPUs that sum"),
        ("Megatron-LM", "Oases"),
        tuple(rows),
        tuple(causes),
    )


def _share_cause(deviations: Sequence[float]) -> str:
    if max(map(abs, deviations)) <= 0.15:
        return "within 15 %"
    which = [system for system, each in zip(("Megatron-LM", "Oases"), deviations, strict=True) if abs(each) > 0.15]
    return (
        f"{' and '.join(which)}: one rate for sums of all sizes, and sums take no compute time of the GPU on the "
        "planner's clock"
    )


OASES_STEPS = (
    (oases.Schedule.MERAK, "Merak"),
    (oases.Schedule.CROSS_PASS, "+ cross-pass schedule"),
    (oases.Schedule.FINE_GRAINED, "+ fine-grained recomputation"),
)


def oases_speedups(ask: Answers) -> Table:
    """Oases' Table 3."""
    (found,) = ask([OasesAsk()])
    rows, causes = [], []
    for cluster, width in oases.THROUGHPUT:
        published = oases.published(cluster, width)
        megatron_s = found.seconds[cluster, width, oases.Schedule.MEGATRON]
        tokens = oases.MODELS[width].samples * oases.TOKENS / 1000
        seconds = [(name, found.seconds[cluster, width, schedule]) for schedule, name in OASES_STEPS]
        seconds.append(("+ planner", found.theirs_s[cluster, width]))
        seconds.insert(0, ("Megatron-LM", megatron_s))
        speeds = [1.0, *published]
        for (name, each_s), speed, speed_tokens in zip(seconds, speeds, oases.THROUGHPUT[cluster, width], strict=True):
            ratio = Cell(round(speed, 3), megatron_s / each_s)
            rows.append(((cluster, f"{width}", name), (Cell(speed_tokens, tokens / each_s, 1), ratio)))
            within = abs(ratio.deviation or 0.0) <= 0.15
            causes.append("within 15 %" if within else OASES_CAUSE)
        if (cluster, width) not in found.runs_s:
            continue
        whole_s, halves_s = found.runs_s[cluster, width]
        numbers = (Cell(None, tokens / halves_s, 1), Cell(None, whole_s / halves_s))
        rows.append(((cluster, f"{width}", "ours, virtual run: two halves over blocking sums"), numbers))
        causes.append("pages are gathered over the network, too, and blocking sums are not repeated in recomputation")
    return Table(
        "Oases, Table 3: throughput and speedups over Megatron-LM",
        "Thousands of tokens/s, and speedups, with the rates of the table above, and for the planner's row the degrees of "
        "the paper's Table 6. The last row of each model is a virtual run of this package, with all its pages. Not computed: "
        "its Figures 4 and 5 (pictures; of Figure 5 the text has ranges of pipelines, which have no two halves here), and "
        "Wang et al. and Alpa, of which only bars are published.",
        ("cluster", "width", "system"),
        ("10³ tokens/s", "speedup"),
        tuple(rows),
        tuple(causes),
    )


OASES_CAUSE = (
    "the planner's clock overlaps every sum with compute that is long enough; published schedules overlap less"
)


def oases_planner(ask: Answers) -> Table:
    """Oases' Table 6."""
    (found,) = ask([OasesAsk()])
    rows, causes = [], []
    for cluster, width in oases.THROUGHPUT:
        fine_s = found.seconds[cluster, width, oases.Schedule.FINE_GRAINED]
        published = oases.THROUGHPUT[cluster, width]
        words, best_s = found.planned[cluster, width]
        first, firsts, second, seconds = oases.STRATEGY[width]
        gains = fine_s / found.theirs_s[cluster, width], fine_s / best_s
        numbers = (
            Cell(round(100 * (published[4] / published[3] - 1), 1), 100 * (gains[0] - 1), 1),
            Cell(None, 100 * (gains[1] - 1), 1),
            Cell(None, found.memory_bytes[width] / GB, 1),
        )
        rows.append(((cluster, f"{width}", f"{first} x {firsts}, {second} x {seconds}", words), numbers))
        causes.append(
            "a smaller degree gains nothing for sums that compute already hides; published steps hide fewer"
            if gains[0] < published[4] / published[3]
            else "not explained: the paper gives no seconds of single degrees"
        )
    return Table(
        "Oases, Table 6: a degree for each layer",
        "What its planner gains over one degree for all layers. Ours: its degrees with the seconds of the table above, and "
        "the fastest degrees that "
        "`benchmarks.unit_degrees` finds, of those two that it chose among. Limit of memory: device memory of the "
        f"hardware file, with {oases.STATE_BYTES} bytes of states a parameter, whole on each data rank (assumed), and "
        "activations; the last column has what the smaller degree takes for all. Gradients between data ranks are not "
        "counted, as in the paper's cost model.",
        ("cluster", "width", "its degrees", "ours"),
        ("gain of its degrees, %", "gain of ours, %", "memory of a GPU with the smaller degree, GB"),
        tuple(rows),
        tuple(causes),
    )


TABLES: dict[str, Callable[[Answers], Table]] = {
    "table5": table5,
    "largest": largest,
    "figure7": figure7,
    "figure8": figure8,
    "tensor": tensor,
    "pipeline": pipeline,
    "colossal": colossal,
    "table5_defaults": table5_defaults,
    "figure7_defaults": figure7_defaults,
    "degrees": degrees,
    "oases_shares": oases_shares,
    "oases_speedups": oases_speedups,
    "oases_planner": oases_planner,
    "grid": grid,
    "sequence": sequence,
    "patrickstar_largest": patrickstar_largest,
    "patrickstar_speed": patrickstar_speed,
    "slices": slices,
    "figure9": figure9,
    "table6": table6,
    "table6_10t": table6_10t,
    "lengths": lengths,
    "implied": implied,
}


LONG = ("table6_10t", "slices")
"""Tables that are computed only if they are named: many minutes of a core each."""


# --- Report -----------------------------------------------------------------------------------------------------------


def hardware_constants() -> list[tuple[str, str, str]]:
    """(name, value, source) of each number of the server's hardware file, the source from its comments."""
    found: list[tuple[str, str, str]] = []
    for line in machines.find(SERVER).read_text().splitlines():
        name = re.match(r"^(\s*)([a-z]\w*):\s*([^#\s]*)\s*(?:#\s*(.*))?$", line)
        more = re.match(r"^\s+#\s*(.*)$", line)
        if name:
            found.append((name[2], name[3], name[4] or ""))
        elif more and found:
            found[-1] = (*found[-1][:2], f"{found[-1][2]} {more[1]}")
    return [row for row in found if row[1] and row[0] != "device"]


CONSTANTS = "Constants"


def page(tables: Sequence[Table], before: str = "") -> str:
    """Returns the page as Markdown.

    Args:
        tables: new ones.
        before: the page until now, from which other tables are kept.
    """
    sections = {text.partition("\n")[0]: text for text in re.split(r"^## ", before, flags=re.MULTILINE)[1:]}
    sections |= {table.title: table.markdown().removeprefix("## ") for table in tables}
    sections.pop(CONSTANTS, None)
    parts = [
        "# The paper's tables, predicted",
        "",
        "What Angel-PTM (VLDB 2023) published in its section 6, beside what `lightning-ptm plan` says of the same models on "
        "the same servers; and what of PatrickStar, Colossal-AI and Oases can be computed so. Made by `python -m "
        "benchmarks.paper`; predictions, not measurements. Nothing is tuned for a row: the constants are at the end, or "
        'follow from published rows that the text names. "Static offload" stands for DeepSpeed ZeRO-3 with offload, modelled '
        "in the script.",
        "",
        *(f"## {text.rstrip()}\n" for text in sections.values()),
        f"## {CONSTANTS}",
        "",
        _line(["what", "value", "from"]),
        _line(["---"] * 3),
        *(_line([name, value, source]) for name, value, source in ASSUMPTIONS),
        *(_line([f"`{name}`", value, source]) for name, value, source in hardware_constants()),
    ]
    return "\n".join(parts) + "\n"


_ANSWERS: dict[type, Callable[[Any], Any]] = {Ask: answer, DegreeAsk: degree_answer, OasesAsk: oases_answer}


class Asking:
    """Questions of several tables, answered in processes of their own; each once."""

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        # Configuration.
        self._pool = pool
        # State, guarded by the lock.
        self._lock = threading.Lock()
        self._asked: dict[Any, concurrent.futures.Future[Any]] = {}

    def __call__(self, questions: Sequence[Any]) -> Sequence[Any]:
        with self._lock:
            for question in questions:
                if question not in self._asked:
                    self._asked[question] = self._pool.submit(_ANSWERS[type(question)], question)
                    self._asked[question].add_done_callback(lambda _, question=question: _tell(question))
        return [self._asked[question].result() for question in questions]


def _tell(question: Any) -> None:
    print({name: value for name, value in dataclasses.asdict(question).items() if value}, flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = [name for name in TABLES if name not in LONG]
    parser.add_argument("--tables", default=",".join(usual), help=f"which to compute, of {', '.join(TABLES)}")
    parser.add_argument("--jobs", type=int, default=2, help="questions at a time")
    args = parser.parse_args()
    names = [name.strip() for name in args.tables.split(",")]
    if unknown := set(names) - set(TABLES):
        raise SystemExit(f"no table is called {', '.join(sorted(unknown))}; there are {', '.join(TABLES)}")
    before = PAGE.read_text() if PAGE.is_file() else ""
    PAGE.write_text(page(with_commit(tables_of(names, args.jobs).values()), before))
    print(PAGE)


def with_commit(tables: Iterable[Table]) -> list[Table]:
    """Returns tables whose text says of which commit their numbers are, and when they were computed."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    computed = f"Computed at commit {commit.stdout.strip()} on {datetime.date.today().isoformat()}."
    return [replace(table, text=f"{table.text} {computed}") for table in tables]


def tables_of(names: Sequence[str], jobs: int) -> dict[str, Table]:
    """Returns the tables of these names; answers `jobs` questions at a time."""
    context = multiprocessing.get_context("spawn")
    with (
        concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool,
        concurrent.futures.ThreadPoolExecutor(len(names)) as threads,
    ):
        ask = Asking(pool)
        # Those with the longest questions first.
        waiting = {name: threads.submit(TABLES[name], ask) for name in sorted(names, key=_longest_first)}
        return {name: waiting[name].result() for name in names}


def _longest_first(name: str) -> int:
    order = ("table6_10t", "table6", "figure9")
    return order.index(name) if name in order else len(order)


if __name__ == "__main__":
    main()
