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
import gc
import multiprocessing
import re
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

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
        "p16 / ranks + two gathered units + the gradients of one + activations",
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
COLOSSAL_TABLE_3 = (  # GPUs, model, mode, images/s
    (16, "32 x 4096", "1D", 3.42),
    (16, "32 x 4096", "2D", 5.33),
    (32, "32 x 4096", "1D", 4.22),
    (32, "32 x 4096", "2.5D", 5.46),
    (64, "32 x 4096", "1D", 4.63),
    (64, "32 x 4096", "2D", 12.76),
)
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
        machine: fields of the server's hardware file that are others.
        accumulate: batches of a step.
    """

    config: str
    nodes: int = 1
    batch: int | str = "auto"
    device_memory: str | None = None
    tokens: int = 0
    experts: int = 0
    largest: str | None = None
    strategy: tuple[tuple[str, Any], ...] = ()
    machine: tuple[tuple[str, Any], ...] = ()
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

    @property
    def device_bytes(self) -> int:
        return self.page_bytes + self.activation_bytes


def answer(ask: Ask) -> Answer:
    """Asks the planner."""
    document = yaml.safe_load((ROOT / "configs" / f"{ask.config}.yaml").read_text())
    document["trainer"] |= {"gradient_clip_val": None, "accumulate_grad_batches": ask.accumulate}
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
            return Answer(False, str(error), 8 * ask.nodes, 0, 0, 0.0, 0.0, 0.0, 0, 0, 0, 0, 0, {}, {})
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
    )


def _server(ask: Ask, folder: Path) -> str:
    """The hardware file of a question."""
    if not ask.machine:
        return SERVER
    fields = yaml.safe_load(machines.find(SERVER).read_text())
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump(fields | dict(ask.machine)))
    return str(path)


Answers = Callable[[Sequence[Ask]], Sequence[Answer]]
"""Answers in the order of the questions."""


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
        """Of one rank; a batch of 0 is without activations."""
        least, each = self._line("activation_bytes")
        return 2 * self._share + 3 * self.one.unit_bytes + (least + each * batch if batch else 0)

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
    batch = int((node.device_memory - STATE_BYTES * one.numel - (one.activation_bytes - each)) // each)
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
    """Rows in the paper's order: names, then numbers. `text` stands above them."""

    title: str
    text: str
    names: tuple[str, ...]
    numbers: tuple[str, ...]
    rows: tuple[tuple[tuple[str, ...], tuple[Cell, ...]], ...]

    def markdown(self) -> str:
        """Returns a section of the page."""
        head = [*self.names, *self.numbers]
        lines = [f"## {self.title}", "", self.text, "", _line(head), _line(["---"] * len(head))]
        lines += [_line([*names, *map(str, cells)]) for names, cells in self.rows]
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
    rows = []
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
    return Table(
        "Table 5: batches on one server of 8 A100",
        "Published → **predicted** (deviation). Parameters in 10⁹: the published name, and what Table 4's shape comes to. "
        "A published #Batch of 1 is asked for as it is; otherwise the largest that fits is found.",
        ("model", "system", "the paper's"),
        ("parameters", "#Batch of a GPU", "GPU memory, GB", "samples/s"),
        tuple(rows),
    )


def largest(ask: Answers) -> Table:
    """The largest models of Table 5."""
    rows = []
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
    return Table(
        "Table 5: the largest model on one server",
        "Layers of the same width are added while a batch of 1 fits (`plan --largest layers`). T5's layers are those of the "
        "encoder, and of the decoder.",
        ("model", "system"),
        ("layers", "parameters, 10⁹"),
        tuple(rows),
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
    )


def figure8(ask: Answers) -> Table:
    """GPT3-175B from 256 to 768 GPUs."""
    counts = (256, 384, 512, 768)
    said = ask([Ask("gpt3_175b", ranks // 8, device_memory="best", tokens=LARGE_GPT_TOKENS) for ranks in counts])
    rows = []
    for ranks, found in zip(counts, said, strict=True):
        known = PAPER_FIGURE_8.get(ranks)
        scaling = None if known is None or ranks == 256 else round(known / PAPER_FIGURE_8[256], 2)
        over = found.samples_per_s / said[0].samples_per_s
        numbers = (Cell(None, found.batch, 0), Cell(known, found.samples_per_s), Cell(scaling, over))
        rows.append(((f"{ranks}",), numbers))
    return Table(
        "Figure 8: GPT3-175B on more GPUs",
        "Published: the two ends, in the text; what lies between is in the picture alone. Above 3.00 at 768 GPUs is "
        "super-linear.",
        ("GPUs",),
        ("#Batch of a GPU", "samples/s", "over 256 GPUs"),
        tuple(rows),
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
    for gpus, form, mode, throughput in COLOSSAL_TABLE_3:
        rows.append((("Table 3", f"ViT {form}, {gpus} P100", f"{mode}: {throughput:g} images/s"), (Cell(None, None),)))
    return Table(
        "Colossal-AI: what it published",
        "Section 5.4 compares states that lie where there is room with DeepSpeed's, divided once for all: beside it ours "
        "over the static offload, on our server with devices of 80 GB (theirs joins only neighbours by NVLink), at 2048 "
        "tokens a sample (assumed; it names none). Table 3 is of images on P100s with one GPU a node: nothing of ours is "
        "comparable, so nothing is predicted. In it, 1D, which cuts layers as tensor_parallel_size does, gains 1.35 times "
        "from 16 to 64 GPUs across nodes; our table above stays inside of a server. Its Figure 14 (10B, 4 samples) gives "
        "no numbers.",
        ("where", "setup", "what"),
        ("number",),
        tuple(rows),
    )


def slices(ask: Answers) -> Table:
    """GPT3-175B on one GPU: micro-batches one after another, and in slices of one batch."""
    shared = {"nodes": 1, "tokens": LARGE_GPT_TOKENS, "machine": tuple(ONE_GPU.items())}
    activations = {
        "host": {"offload_activations": "host", "host_memory": "120GiB"},
        "disk": {"offload_activations": "disk"},
    }
    batches, samples = MICRO_BATCHES
    asked = [
        Ask("gpt3_175b", batch=samples, accumulate=batches, strategy=(("disk_path", "/any"),), **shared),
        *(
            Ask(
                "gpt3_175b",
                batch=batches * samples,
                strategy=tuple(({"disk_path": "/any", "slices": batches} | settings).items()),
                **shared,
            )
            for settings in activations.values()
        ),
    ]
    said = ask(asked)
    names = [
        f"accumulate_grad_batches={batches}",
        *(f"slices={batches}, inputs of units in {each}" for each in activations),
    ]
    rows = []
    for name, found in zip(names, said, strict=True):
        busy = [found.busy_s.get(link.value, 0.0) for link in (Link.DISK_READ, Link.DISK_WRITE)]
        bound = max(found.compute_s, *busy)
        rows.append(
            (
                (name,),
                (
                    Cell(None, found.seconds, 0),
                    Cell(None, found.compute_s, 0),
                    *(Cell(None, each, 0) for each in busy),
                    Cell(None, found.seconds / bound if bound else None),
                    Cell(None, said[0].seconds / found.seconds if found.seconds else None),
                ),
            )
        )
    return Table(
        "GPT3-175B on one A100: micro-batches in slices",
        f"{batches} micro-batches of {samples} samples of {LARGE_GPT_TOKENS} tokens, on a machine with one A100 of 40 GB, "
        "256 GiB of RAM and a disk that reads 13 GB/s and writes 10 GB/s (assumed). GreedySnake (arXiv 2512.17570), which "
        "also computes all micro-batches of a layer before the next layer, published 2.53 times the throughput of "
        "ZeRO-Infinity for GPT-175B on one A100 (1.96 times for GPT-65B). The last column is over our own accumulation, "
        "which keeps in RAM what fits, so these are not the same ratio.",
        ("how",),
        (
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
        question = _experts(ranks, 32, **disk, lock_free={"max_staleness": steps})
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
        "is bound by the disks stays so. Validation losses are not predicted.",
        ("model", "GPUs", "updates"),
        ("parameters, 10¹²", "#Batch of a GPU", "samples/s", "over synchronous"),
        tuple(rows),
    )


def lengths(ask: Answers) -> Table:
    """What the assumed length of samples does to a row of Table 5."""
    rows = []
    counts = (512, GPT_TOKENS, 2048)
    said = ask([_whole("gpt3_28b", 1, tokens)[1] for tokens in counts])
    for tokens, found in zip(counts, said, strict=True):
        rows.append(((f"{tokens}",), (Cell(38, found.batch, 0), Cell(10.99, found.samples_per_s))))
    return Table(
        "What the assumed length does",
        "The row of Table 5 for GPT 28B with Angel-PTM, for samples of other lengths.",
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


TABLES: dict[str, Callable[[Answers], Table]] = {
    "table5": table5,
    "largest": largest,
    "figure7": figure7,
    "figure8": figure8,
    "tensor": tensor,
    "pipeline": pipeline,
    "colossal": colossal,
    "slices": slices,
    "figure9": figure9,
    "table6": table6,
    "table6_10t": table6_10t,
    "lengths": lengths,
    "implied": implied,
}


LONG = ("table6_10t",)
"""Left as the JSON file has it unless asked for: eight minutes of a core."""


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
        "the same servers. Made by `python -m benchmarks.paper`; predictions, not measurements. Nothing is tuned for a row: "
        'the constants are at the end. "Static offload" stands for DeepSpeed ZeRO-3 with offload, modelled in the script.',
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


class Asking:
    """Questions of several tables, answered in processes of their own; each once."""

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        # Configuration.
        self._pool = pool
        # State, guarded by the lock.
        self._lock = threading.Lock()
        self._asked: dict[Ask, concurrent.futures.Future[Answer]] = {}

    def __call__(self, questions: Sequence[Ask]) -> Sequence[Answer]:
        with self._lock:
            for question in questions:
                if question not in self._asked:
                    self._asked[question] = self._pool.submit(answer, question)
                    self._asked[question].add_done_callback(lambda _, question=question: _tell(question))
        return [self._asked[question].result() for question in questions]


def _tell(question: Ask) -> None:
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
    PAGE.write_text(page(list(tables_of(names, args.jobs).values()), before))
    print(PAGE)


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
