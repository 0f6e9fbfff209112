"""Input of the layout: specs of each unit's parameters, with their dtypes, optimizers, groups, strides, codes and slices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.planning.layout import ParameterSpec, UnitSpec
from lightning_ptm.planning.sharding import ModelSharding
from lightning_ptm.runtime.deciding.blueprint import Request
from lightning_ptm.runtime.deciding.unpaged_optimizers import Traits, in_two
from lightning_ptm.runtime.units.discovery import Unit, UnitParameter
from lightning_ptm.terms import CODES, Code
from lightning_ptm.torch_internals import BatchNorm, parameters_in
from lightning_ptm.update.trial.probe import probe
from lightning_ptm.update.trial.traits import OptimizerTraits

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FP32_MODULES = (BatchNorm,)
"""Modules whose kernels need fp32 parameters, as their running statistics are fp32."""


def keeps_fp32(module: nn.Module) -> bool:
    """Whether the parameters of `module` itself stay in fp32 under mixed precision: its kernels need it, or its class sets
    `keep_in_fp32 = True` (as the router of mixture-of-experts layers does)."""
    return isinstance(module, _FP32_MODULES) or getattr(type(module), "keep_in_fp32", False) is True


def compute_dtype(parameter: Tensor, compute: torch.dtype, *, mixed: bool, keeps_fp32: bool) -> torch.dtype:
    """Returns the dtype of a parameter in forward and backward.

    Args:
        compute, mixed: see Request; without `mixed`, float32 means that nothing is converted (`32-true`).
        keeps_fp32: whether the parameter's module stays in fp32; see the function `keeps_fp32`.
    """
    if not mixed:
        return parameter.dtype if compute is torch.float32 else compute
    if parameter.dtype is torch.float64:
        return torch.float64
    return torch.float32 if keeps_fp32 else compute


def unit_specs(units: Sequence[Unit], request: Request, unpaged: Collection[int]) -> list[UnitSpec]:
    """Returns the specs of a run's units. Parameters that are in no optimizer, or only in those that `unpaged` numbers, are
    not trained in pages.

    Raises:
        ConfigError: pages cannot hold a parameter, or one optimizer has it twice.
    """
    groups_of = _groups_of(request, unpaged)
    keep_fp32 = {
        id(parameter)
        for module in request.module.modules()
        if keeps_fp32(module)
        for parameter in parameters_in(module).values()
        if parameter is not None
    }
    specs = []
    for unit in units:
        parameters = []
        for item in unit.parameters:
            parameter = item.parameter
            if parameter.dtype not in _FLOATS:
                raise ConfigError(
                    f"parameter {item.name} is {parameter.dtype}; pages hold float32, bfloat16, float16 and float64; "
                    f"keep other data in a buffer"
                )
            dtype = compute_dtype(
                parameter, request.compute, mixed=request.mixed, keeps_fp32=id(parameter) in keep_fp32
            )
            (optimizer, group), *further = groups_of.get(id(parameter), [(0, -1)])
            parameters.append(
                ParameterSpec(
                    name=item.name,
                    shape=tuple(parameter.shape),
                    dtype=str(dtype).removeprefix("torch."),
                    itemsize=dtype.itemsize,
                    trainable=parameter.requires_grad and group >= 0,
                    group=group,
                    optimizer=optimizer,
                    further=tuple(further),
                    # As in plain training, where parameters and therefore their accumulated gradients are fp32.
                    gradient_itemsize=4 if request.sums_gradients and request.mixed and dtype.itemsize < 4 else 0,
                    stride=_stride(item),
                    box=request.boxes.get(id(parameter)),
                    partial=id(parameter) in request.partial and parameter.requires_grad and group >= 0,
                    code=None if unit is units[0] or id(parameter) in keep_fp32 else _code(item, request.settings),
                )
            )
        specs.append(UnitSpec(unit.name, tuple(parameters)))
    _check_strides(specs, request)
    return specs


def _groups_of(request: Request, unpaged: Collection[int]) -> dict[int, list[tuple[int, int]]]:
    """Returns, by id of a parameter, the optimizers that have it and its group in each."""
    groups_of: dict[int, list[tuple[int, int]]] = {}
    for index, known in enumerate(request.optimizers):
        if index in unpaged:
            continue
        for number, settings in enumerate(known.param_groups):
            for parameter in settings["params"]:
                its = groups_of.setdefault(id(parameter), [])
                if its and its[-1][0] == index:
                    raise ConfigError(
                        f"a parameter of shape {tuple(parameter.shape)} is in {type(known).__name__} twice, and each step "
                        f"updates it once; leave it in one group, once"
                    )
                its.append((index, number))
    return groups_of


def _code(item: UnitParameter, settings: Settings) -> Code | None:
    """Returns the code in which a frozen parameter is stored in its home; None if it is not quantized.

    Not for the root unit, whose parameters stay on the device, so that codes would take additional memory. Vectors are not
    quantized, since they are small, nor embeddings, whose rows are looked up and not multiplied.
    """
    parameter, looked_up = item.parameter, (nn.Embedding, nn.EmbeddingBag)
    if parameter.requires_grad or parameter.dim() < 2 or any(isinstance(each, looked_up) for each, _ in item.places):
        return None
    return CODES.get(settings.frozen_dtype)


def _check_strides(specs: Sequence[UnitSpec], request: Request) -> None:
    strided = [parameter for spec in specs for parameter in spec.parameters if parameter.stride is not None]
    in_parts = next(
        (parameter for parameter in strided if parameter.box is not None and not _row_by_row(parameter)), None
    )
    if in_parts is not None:
        raise ConfigError(
            f"parameter {in_parts.name} has strides {in_parts.stride} (channels_last, or transposed) and is a slice of a "
            f"larger one, and positions in slices are row by row; make it contiguous before the fit"
        )
    if strided and request.settings.checkpoints.from_pages and request.optimizers:
        raise ConfigError(
            f"parameter {strided[0].name} has strides {strided[0].stride} (channels_last, or transposed; "
            f"{len(strided)} such), and Checkpoints(state_dict_type='sharded') writes parameters in the order of "
            "their memory, where checkpoints need them row by row; use "
            "checkpoints=Checkpoints(state_dict_type='full'), or make them contiguous before the fit"
        )


def _row_by_row(parameter: ParameterSpec) -> bool:
    """Whether a parameter's elements are in row-major order; dimensions of size 1 are ignored."""
    steps = [step for step, size in zip(parameter.stride or (), parameter.shape, strict=False) if size > 1]
    return steps == sorted(steps, reverse=True)


def _stride(item: UnitParameter) -> tuple[int, ...] | None:
    """Returns the stride of a parameter that is dense but not row-major; None for a contiguous one.

    Raises:
        ConfigError: the parameter has gaps between its elements.
    """
    parameter = item.parameter
    stride = parameter.stride()
    sizes = [max(1, size) for size in parameter.shape]
    contiguous = tuple([math.prod(sizes[dimension + 1 :]) for dimension in range(len(sizes))])
    if stride == contiguous or 0 in stride:  # a parameter whose memory was freed is an expanded NaN, with stride 0
        return None
    expected = 1
    for step, size in sorted([(step, size) for step, size in zip(stride, sizes, strict=True) if size > 1]):
        if step != expected:
            raise ConfigError(
                f"parameter {item.name} of shape {tuple(parameter.shape)} has strides {stride}: it is a view of a larger "
                f"tensor, with gaps between its elements; pages store it without gaps, so that kernels might round "
                f"differently; give it memory of its own, nn.Parameter(tensor.clone())"
            )
        expected *= size
    return stride


class OptimizerRefusedError(ConfigError):
    """Error that an optimizer does not work on the device where its updates would run.

    Args:
        text: error message.
        device: the device on which it does not work.
    """

    def __init__(self, text: str, device: torch.device) -> None:
        super().__init__(text)
        self.device = device


def traits_of(
    request: Request, known: Traits, optimizer: int, dtype: torch.dtype, device: torch.device
) -> OptimizerTraits:
    """Returns the traits of an optimizer for a dtype and a device; tries each combination once.

    Args:
        known: traits found so far; this function adds to it.

    Raises:
        OptimizerRefusedError: the optimizer cannot be run page by page there.
    """
    key = (optimizer, dtype, device)
    if key not in known:
        try:
            known[key] = probe(request.optimizers[optimizer], dtype=dtype, device=device)
        except ConfigError as error:
            where = ""
            if request.backend.has_own_memory and device == request.backend.device:
                where = (
                    f". Updates run on {device} here, where master weights and optimizer states are; if the class needs "
                    f"tensors in RAM, set "
                    f"offload_optimizer='host' or 'disk'"
                )
            elif request.backend.has_own_memory:
                instead = "lock_free=False and " if request.settings.lock_free else ""
                where = (
                    f". Updates run on the CPU here, since master weights and optimizer states are in RAM or on disk; if "
                    f"the class needs tensors on {request.backend.device}, set {instead}offload_optimizer='device', with "
                    f"enough device_memory for them (if the optimizer keeps no states, offload_parameters='device')"
                )
            raise OptimizerRefusedError(f"{error}{where}", device) from (error.__cause__ or error)
    return known[key]


def first_traits(
    request: Request, known: Traits, optimizer: int, dtype: torch.dtype, likely: torch.device
) -> OptimizerTraits:
    """Returns traits before homes decide where updates run: those on the likely device, or else on the other one."""
    if not request.backend.has_own_memory:
        return traits_of(request, known, optimizer, dtype, likely)
    devices = [likely, *({request.backend.device, torch.device("cpu")} - {likely})]
    found = next((known[optimizer, dtype, each] for each in devices if (optimizer, dtype, each) in known), None)
    if found is not None:
        return found
    try:
        return traits_of(request, known, optimizer, dtype, likely)
    except OptimizerRefusedError as refused:
        try:
            return traits_of(request, known, optimizer, dtype, devices[1])
        except OptimizerRefusedError:
            raise refused from None


def with_whole_updates(
    request: Request,
    specs: Sequence[UnitSpec],
    known: Traits,
    holders: ModelSharding,
    *,
    lock_free: bool,
    device: torch.device,
) -> list[UnitSpec]:
    """Returns the specs with the parameters marked that their optimizer updates as a whole (not element-wise).

    Args:
        device: device on which updates probably run.

    Raises:
        ConfigError: such a parameter is divided over ranks, or is in two optimizers.
    """

    def marked(parameter: ParameterSpec) -> ParameterSpec:
        if not parameter.trainable:
            return parameter
        dtype: torch.dtype = getattr(torch, parameter.dtype)
        master = master_dtype(dtype, mixed=request.mixed, always=lock_free)
        every = [first_traits(request, known, number, master or dtype, device) for number in parameter.optimizers]
        traits = next((each for each in every if each.whole), None)
        if traits is None:
            return parameter
        if len(every) > 1:
            raise in_two(parameter.shape, traits)
        if holders.by_unit or holders.in_parts:
            how = "slice parameters" if holders.in_parts else "divide experts"
            setting = "tensor_parallel_size" if holders.in_parts else "expert_parallel_size"
            raise ConfigError(
                f"{traits.name} updates each parameter as a whole ({traits.whole}), and ranks {how} among them, so that "
                f"no rank has all of it; train without {setting}, or use an element-wise optimizer such as torch.optim.AdamW"
            )
        sizes = (
            parameter.itemsize,
            parameter.gradient_itemsize or parameter.itemsize,
            master.itemsize if master else 0,
        )
        own = traits.own_bytes(parameter.group, parameter.shape)
        return dataclasses.replace(parameter, updated_whole=True, states_bytes=parameter.numel * sum(sizes) + own)

    return [dataclasses.replace(spec, parameters=tuple(map(marked, spec.parameters))) for spec in specs]


def master_dtype(dtype: torch.dtype, *, mixed: bool, always: bool) -> torch.dtype | None:
    """Returns the dtype of the master weights of a compute parameter; None if it has none. Lock-free updates need master
    weights in any precision, since they never write the parameters that compute reads.

    Args:
        always: whether updates are lock-free.
    """
    if mixed and dtype.itemsize < 4:
        return torch.float32
    return dtype if always else None
