"""Two trainings of the same parameters, side by side: plain torch, and pages. For tests of the update."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from lightning_ptm.memory.allocator import Allocator
from lightning_ptm.memory.backend import CpuBackend
from lightning_ptm.memory.paged_tensor import PagedTensor
from lightning_ptm.planning.layout import FlatLayout, ParameterSpec, UnitSpec, build_layout
from lightning_ptm.terms import Tier, chunk_numel
from lightning_ptm.update.flat_states import FlatStates
from lightning_ptm.update.gradient_source import ParameterGradients, ShardGradient, Transform
from lightning_ptm.update.shadow import GroupValues, ShadowOptimizer, snapshot
from lightning_ptm.update.state_encoding import Encoding
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.update_job import JobHandle, UpdateJob
from lightning_ptm.update.updater import Updater

PAGE_SIZE = 64 * 1024
# Ragged ends, a scalar, one that spans several chunks, one that is exactly one vector, groups interleaved.
SHAPES = ((3, 7), (64, 130), (1,), (129,), (300, 171), (64,), (33, 65), (8193,))
SMALL_SHAPES = ((3, 7), (64, 130), (1,), (129,), (100, 171), (64,), (33, 65), (8193,))
"""None so large that torch's own 16-bit loops are split over threads at places where their vectors are cut."""
GROUPS = (0, 1, 0, 1, 0, 0, 1, 0)

Make = Callable[[list[dict[str, object]]], Optimizer]


def make_flat(
    shapes: Sequence[tuple[int, ...]], groups: Sequence[int], dtype: torch.dtype, world_size: int = 1
) -> FlatLayout:
    specs = tuple(
        ParameterSpec(f"p{index}", shape, str(dtype).removeprefix("torch."), dtype.itemsize, True, group)
        for index, (shape, group) in enumerate(zip(shapes, groups, strict=True))
    )
    return build_layout([UnitSpec("root", specs)], page_size=PAGE_SIZE, world_size=world_size).flats[0]


def make_allocator(
    disk: Path | None = None, *, device_mib: int = 6, host_mib: int = 0, disk_mib: int = 6, **settings: object
) -> Allocator:
    mib = 1 << 20
    return Allocator(
        page_size=PAGE_SIZE,
        backend=CpuBackend(),
        sizes={
            Tier.DEVICE: device_mib * mib,
            Tier.HOST: host_mib * mib,
            Tier.DISK: disk_mib * mib if disk is not None else 0,
        },
        disk_paths=[disk] if disk is not None else [],
        poison=True,
        **settings,  # type: ignore[arg-type]
    )


def fill(allocator: Allocator, target: PagedTensor, values: torch.Tensor) -> None:
    """Write all elements of a paged tensor of any tier."""
    buffer = allocator.allocate("values", target.numel, target.dtype, Tier.DEVICE)
    buffer.tensor().zero_()
    buffer.tensor()[: values.numel()].copy_(values)
    allocator.copy(buffer, target).wait()
    allocator.release(buffer)


def read(allocator: Allocator, source: PagedTensor) -> torch.Tensor:
    """All elements of a paged tensor of any tier."""
    buffer = allocator.allocate("values", source.numel, source.dtype, Tier.DEVICE)
    allocator.copy(source, buffer).wait()
    values = buffer.tensor().clone()
    allocator.release(buffer)
    return values


def parameter_groups(
    parameters: Sequence[torch.nn.Parameter], groups: Sequence[int], second: dict[str, object]
) -> list[dict[str, object]]:
    """Group 0 with the optimizer's defaults, group 1 with `second` on top."""
    members = [[p for p, group in zip(parameters, groups, strict=True) if group == wanted] for wanted in (0, 1)]
    return [{"params": members[0]}, {"params": members[1], **second}]


@dataclasses.dataclass
class Twin:
    """The paged side and its plain twin."""

    allocator: Allocator
    updater: Updater
    optimizer: Optimizer
    states: FlatStates
    shadow: ShadowOptimizer
    target: PagedTensor
    gradient: PagedTensor | None
    plain: list[torch.nn.Parameter]
    plain_optimizer: Optimizer
    flat: FlatLayout
    order: list[int]
    """Position in the flat to index of the parameter."""
    steps: int = 0
    """Number of the next step, for those that count."""

    def hyper(self) -> GroupValues:
        return snapshot(self.optimizer, self.states.traits, self.steps)

    def job(
        self, gradients: Sequence[torch.Tensor | None], transform: Transform | None = None, **more: object
    ) -> UpdateJob:
        """`gradients`: in the order of the parameters."""
        laid_out = [gradients[index] for index in self.order]
        source: ParameterGradients | ShardGradient
        if self.gradient is None:
            source = ParameterGradients(laid_out)
        else:
            full = torch.zeros(self.flat.numel, dtype=self.gradient.dtype)
            for slot, gradient in zip(self.flat.slots, laid_out, strict=True):
                if gradient is not None:
                    full[slot.start : slot.end] = gradient.reshape(-1)
            fill(self.allocator, self.gradient, full)
            source = ShardGradient(self.gradient, [gradient is not None for gradient in laid_out])
        return UpdateJob(
            self.states,
            self.shadow,
            source,
            self.target,
            self.hyper(),
            transform or Transform(),
            **more,  # type: ignore[arg-type]
        )

    def submit(self, gradients: Sequence[torch.Tensor | None], transform: Transform | None = None) -> JobHandle:
        return self.updater.submit(self.job(gradients, transform))

    def pieces(self, values: torch.Tensor) -> list[torch.Tensor]:
        """A flat's elements as parameters, in the order of the parameters."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(self.order)
        for slot, index in zip(self.flat.slots, self.order, strict=True):
            found[index] = values[slot.start : slot.end].reshape(slot.spec.shape)
        return found

    def assert_equal(self) -> None:
        """Master parameters, compute parameters, slots and scalars equal the plain optimizer's, bit for bit."""
        self.updater.drain()
        target = self.pieces(read(self.allocator, self.target))
        truth = target if self.states.master is None else self.pieces(read(self.allocator, self.states.master))
        slots = {name: self.pieces(read(self.allocator, slot)) for name, slot in self.states.slots.items()}
        for index, parameter in enumerate(self.plain):
            assert_bits(truth[index], parameter.detach(), f"p{index}")
            assert_bits(target[index], parameter.detach().to(self.target.dtype), f"compute p{index}")
            state = self.plain_optimizer.state.get(parameter, {})
            scalars = self.states.scalars(self.order.index(index))
            for name, value in state.items():
                if name in slots and value is not None:
                    assert_bits(slots[name][index], value, f"{name} of p{index}")
                else:
                    assert scalars is not None
                    assert_bits(torch.as_tensor(scalars.values[name]), torch.as_tensor(value), f"{name} of p{index}")
        assert not self.optimizer.state or type(self.optimizer).__name__ == "Adagrad"

    def close(self) -> None:
        self.updater.close()
        self.allocator.close()


def assert_bits(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert actual.shape == expected.shape, what
    assert actual.dtype == expected.dtype, what
    same = (
        torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        if actual.dim()
        else (actual == expected or (actual != actual and expected != expected))
    )
    assert same, f"{what}: {(actual != expected).sum()} of {actual.numel()} elements differ"


def make_twin(
    make: Make,
    allocator: Allocator,
    *,
    second: dict[str, object] | None = None,
    compute: torch.dtype = torch.bfloat16,
    mixed: bool = True,
    home: Tier = Tier.DEVICE,
    target_home: Tier = Tier.DEVICE,
    gradient_home: Tier | None = None,
    shapes: Sequence[tuple[int, ...]] = SHAPES,
    groups: Sequence[int] = GROUPS,
    encoding: type[Encoding] | None = None,
    **updater: object,
) -> Twin:
    generator = torch.Generator().manual_seed(7)
    master_dtype = torch.float32 if mixed else compute
    values = [torch.randn(shape, generator=generator).to(master_dtype) for shape in shapes]

    plain = [torch.nn.Parameter(value.clone()) for value in values]
    plain_optimizer = make(parameter_groups(plain, groups, second or {}))
    users = [torch.nn.Parameter(value.to(compute)) for value in values]
    optimizer = make(parameter_groups(users, groups, second or {}))
    flat = make_flat(shapes, groups, compute)
    order = [int(slot.spec.name[1:]) for slot in flat.slots]
    traits = probe(optimizer, dtype=master_dtype)
    traits = traits.encoded({slot.name: encoding for slot in traits.slots})
    for group, known in zip(plain_optimizer.param_groups, traits.groups, strict=True):
        if known.fused:
            group["fused"] = True
    states = FlatStates.allocate(allocator, flat, 0, traits, home, master_dtype=torch.float32 if mixed else None)
    target = allocator.allocate("p16", flat.shard_numel, compute, target_home)
    gradient = (
        allocator.allocate("g16", flat.shard_numel, compute, gradient_home) if gradient_home is not None else None
    )
    full = torch.zeros(flat.shard_numel, dtype=master_dtype)
    for slot, index in zip(flat.slots, order, strict=True):
        full[slot.start : slot.end] = values[index].reshape(-1)
    if states.master is not None:
        fill(allocator, states.master, full)
    fill(allocator, target, full.to(compute))
    chunk = 4096 * 3 if encoding is None else chunk_numel(PAGE_SIZE)
    settings = {"chunk_numel": chunk, "block_numel": 4096, "staging": 2, **updater}
    paged = Updater(allocator, **settings)  # type: ignore[arg-type]
    return Twin(
        allocator,
        paged,
        optimizer,
        states,
        ShadowOptimizer(optimizer, traits),
        target,
        gradient,
        plain,
        plain_optimizer,
        flat,
        order,
    )


def random_gradients(
    step: int, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, unused: Sequence[int] = ()
) -> list[torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1000 + step)
    gradients: list[torch.Tensor | None] = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    for index in unused:
        gradients[index] = None
    return gradients


def plain_step(twin: Twin, gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(twin.plain, gradients, strict=True):
        parameter.grad = (
            gradient.to(parameter.dtype, memory_format=torch.contiguous_format, copy=True)
            if gradient is not None
            else None
        )
    twin.plain_optimizer.step()


def set_lr(twin: Twin, factor: float) -> None:
    """Changes the learning rates, as a scheduler does."""
    for optimizer in (twin.optimizer, twin.plain_optimizer):
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
