"""Models for the planner's tests: small ones by hand, the paper's by Table 4, random ones by Hypothesis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from lightning_ptm.planning.gradient_tasks import gradient_tasks
from lightning_ptm.planning.layout import ModelLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.planning.placement_data import Budget, Placement
from lightning_ptm.planning.plan import Plan, Task
from lightning_ptm.planning.schedule import schedule
from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.planning.trace import Tick, Trace, sequential_trace
from lightning_ptm.terms import Phase, Tier

PAGE = 64 * 1024
"""Bytes of a page in these tests: the smallest that is allowed. It holds `PAGE // 2` elements of 16 bit."""

BESIDE = replace(Tier.HOST, name="BESIDE", distance=1.5, setting="beside_memory", toward=Tier.HOST)
"""A tier that the planner does not know: another memory, whose bytes pass through the host's, and where updates run."""


def spec(name: str, *shape: int, dtype: str = "bfloat16", trainable: bool = True, group: int = 0) -> ParameterSpec:
    """A parameter of a 16-bit or a 32-bit dtype."""
    return ParameterSpec(name, shape, dtype, 4 if dtype == "float32" else 2, trainable, group)


def even_units(pages: Sequence[int]) -> list[UnitSpec]:
    """The root and blocks, whose flats fill exactly so many pages each."""
    names = ["root", *(f"layers.{index}" for index in range(len(pages) - 1))]
    return [
        UnitSpec(name, (spec(f"{name}.weight", count * PAGE // 2),)) for name, count in zip(names, pages, strict=True)
    ]


def in_parts(unit: UnitSpec, parts: int, every: bool) -> UnitSpec:
    """A unit whose parameters, all or the first and each second behind it, are parts of larger ones."""
    cut = [
        replace(each, box=TensorSlice((parts * each.numel,), 0, parts, 0)) if every or not at % 2 else each
        for at, each in enumerate(unit.parameters)
    ]
    return replace(unit, parameters=tuple(cut))


def even_layout(pages: Sequence[int], world_size: int = 1) -> ModelLayout:
    """The layout of `even_units`."""
    return build_layout(even_units(pages), page_size=PAGE, world_size=world_size)


@dataclass(frozen=True, slots=True)
class Transformer:
    """A row of the paper's Table 4."""

    name: str
    layers: int
    width: int
    inner: int
    decoder_layers: int = 0
    experts: int = 0


TABLE_4 = (
    Transformer("GPT3-1.7B", 24, 2304, 9216),
    Transformer("GPT3-13B", 40, 5140, 20506),
    Transformer("GPT3-28B", 26, 8192, 32768),
    Transformer("GPT3-30B", 64, 8192, 32768),
    Transformer("GPT3-55B", 68, 8192, 32768),
    Transformer("GPT3-120B", 64, 12288, 49152),
    Transformer("GPT3-175B", 70, 14336, 57344),
    Transformer("T5-1.4B", 16, 1024, 16384, decoder_layers=16),
    Transformer("T5-27B", 28, 4096, 16384, decoder_layers=28),
    Transformer("T5-58B", 60, 4096, 16384, decoder_layers=60),
    Transformer("T5-MoE-1.2T", 16, 1024, 16384, experts=2304),
)


def transformer_units(model: Transformer) -> list[UnitSpec]:
    """A unit per block, the embeddings and the last norm in the root; biases and norms as in GPT-2 and T5."""
    vocabulary, positions = (32128, 0) if model.name.startswith("T5") else (50257, 2048)
    root = [spec("embedding.weight", vocabulary, model.width), spec("norm.weight", model.width, group=1)]
    if positions:
        root.append(spec("positions.weight", positions, model.width))
    units = [UnitSpec("root", tuple(root))]
    for side, layers, attentions in (("layers", model.layers, 1), ("decoder", model.decoder_layers, 2)):
        for index in range(layers):
            units.append(UnitSpec(f"{side}.{index}", tuple(_block(f"{side}.{index}", model, attentions))))
    return units


def _block(name: str, model: Transformer, attentions: int) -> list[ParameterSpec]:
    width, inner = model.width, model.inner
    parameters: list[ParameterSpec] = []
    for attention in range(attentions):
        prefix = f"{name}.attention.{attention}"
        parameters += [spec(f"{prefix}.qkv.weight", 3 * width, width), spec(f"{prefix}.out.weight", width, width)]
        parameters += [spec(f"{prefix}.qkv.bias", 3 * width, group=1), spec(f"{prefix}.out.bias", width, group=1)]
        parameters += [spec(f"{prefix}.norm.weight", width, group=1), spec(f"{prefix}.norm.bias", width, group=1)]
    for expert in range(max(model.experts, 1)):
        prefix = f"{name}.mlp.{expert}"
        parameters += [spec(f"{prefix}.up.weight", inner, width), spec(f"{prefix}.down.weight", width, inner)]
        parameters += [spec(f"{prefix}.up.bias", inner, group=1), spec(f"{prefix}.down.bias", width, group=1)]
    if model.experts:
        parameters.append(spec(f"{name}.router.weight", model.experts, width, dtype="float32"))
    return parameters


@st.composite
def unit_lists(draw: st.DrawFn, max_units: int = 5) -> list[UnitSpec]:
    """Units with none to four parameters: empty, tiny and of several pages; two dtypes; some frozen."""
    units: list[UnitSpec] = []
    for index in range(draw(st.integers(1, max_units))):
        parameters = [
            spec(
                f"{index}.{number}",
                draw(st.one_of(st.integers(0, 200), st.integers(20_000, 200_000), st.integers(20_000, 200_000))),
                dtype=draw(st.sampled_from(("bfloat16", "bfloat16", "float32"))),
                trainable=draw(st.sampled_from((True, True, True, False))),
                group=draw(st.integers(-1, 2)),
            )
            for number in range(draw(st.integers(0, 4)))
        ]
        units.append(UnitSpec(f"unit{index}", tuple(parameters)))
    return units


@st.composite
def traces(draw: st.DrawFn, unit_count: int) -> Trace:
    """Any order of forward ticks, then of backward ones, with nested and repeated units; sometimes mixed phases."""
    mixed = draw(st.booleans())
    root_always = draw(st.booleans())
    ticks: list[Tick] = []
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for _ in range(draw(st.integers(0, 7))):
            unit = draw(st.integers(0, unit_count - 1))
            live = {unit} | draw(st.sets(st.integers(0, unit_count - 1), max_size=2))
            live |= {0} if root_always else set()
            at = draw(st.sampled_from(Phase)) if mixed else phase
            ticks.append(Tick(unit, at, tuple(sorted(live)), seconds=0.01))
    return Trace(tuple(ticks))


def replanned(plan: Plan, tasks: Sequence[Task]) -> Plan:
    """A plan with other tasks, sorted as they are issued."""
    return Plan((), plan.tick_count).with_tasks(tasks)


def two_micro_batches(layout: ModelLayout) -> Trace:
    """Both forwards come before both backwards; the root is live all along."""
    once = sequential_trace(layout).ticks
    forward, backward = once[: len(layout.units)], once[len(layout.units) :]
    return Trace((*forward, *forward[1:], *backward, *(replace(tick, passes=1) for tick in backward)))


def done(layout: ModelLayout, placement: Placement, trace: Trace, budget: Budget) -> Plan:
    """The plan, and what follows the gradients."""
    return schedule(layout, placement, trace, budget).with_tasks(gradient_tasks(layout, placement, trace))
