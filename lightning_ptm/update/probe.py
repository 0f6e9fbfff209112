"""Find out by trial what an optimizer keeps and whether its update may be run page by page (design.md section 7).

The class is run on a few numbers the way the user would run it (whole, 2-D parameters, one instance) and the way the
shadow runs it (1-D pieces of them, one after the other, all through one clone), and every bit is compared. Nothing is
taken from a list of names, so third-party optimizers pass or fail by what they do.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from lightning_ptm.errors import ConfigError
from lightning_ptm.terms import ALIGN_NUMEL
from lightning_ptm.update.shadow import HyperParameters, RunViews, Shadow, construct_like
from lightning_ptm.update.traits import (
    GroupTraits,
    Initial,
    OptimizerTraits,
    ScalarState,
    SlotTraits,
    copy_value,
    same_value,
)

_STEPS = 5
_SHAPE = (13, 77)
_ALIGNED_CUTS = (0, 64, 448, 512, 960, 13 * 77)
_ODD_CUTS = (0, 7, 100, 333, 334, 801, 13 * 77)
_WORKS = (
    "what works: optimizers that treat each element on its own, as Adam, AdamW, SGD, RAdam, NAdam, RMSprop, Adagrad, "
    "Adadelta, Adamax, ASGD, Rprop and third-party ones such as Lion do"
)


@dataclasses.dataclass(slots=True)
class _Outcome:
    """A parameter of the trial after each step: its elements, slots (flattened) and scalars, and its group's values."""

    parameters: list[torch.Tensor]
    slots: list[dict[str, torch.Tensor]]
    scalars: list[dict[str, Any]]
    groups: list[dict[str, Any]]


def probe(
    optimizer: Optimizer, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> OptimizerTraits:
    """Learn an optimizer's traits by running its class on a few numbers.

    Args:
        optimizer: the user's object; it is not changed and no parameter of it is read.
        dtype: dtype that the master parameters will have.
        device: where updates will run.

    Returns:
        What it keeps for each parameter group, and where its update may be cut.

    Raises:
        ConfigError: its update is not element-wise, or cannot be run without a closure; says which and what works.
    """
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    device = torch.device(device)
    _refuse_closure(optimizer, name)
    groups, initial, granularity, group_slots = [], Initial.LAZY, 1, dict[str, None]()
    for index in range(len(optimizer.param_groups)):
        traits = _probe_group(optimizer, index, name, dtype, device)
        groups.append(traits.groups[0])
        granularity = max(granularity, traits.granularity)
        group_slots.update(dict.fromkeys(traits.group_slots))
        if traits.initial is Initial.CONSTRUCTED:
            initial = Initial.CONSTRUCTED
    return OptimizerTraits(name, tuple(groups), granularity, initial, tuple(group_slots), device)


def _probe_group(
    optimizer: Optimizer, index: int, name: str, dtype: torch.dtype, device: torch.device
) -> OptimizerTraits:
    values = {key: value for key, value in optimizer.param_groups[index].items() if key != "params"}
    if _may_fuse(values, dtype, device):
        # A fused kernel that does not work for this dtype is no reason to refuse: the class works without it.
        with contextlib.suppress(ConfigError):
            return _try_group(optimizer, {**values, "fused": True}, name, dtype, device, chosen_fused=True)
    return _try_group(optimizer, values, name, dtype, device, chosen_fused=False)


def _try_group(
    optimizer: Optimizer,
    values: dict[str, Any],
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    *,
    chosen_fused: bool,
) -> OptimizerTraits:
    try:
        plain = _run_plain(optimizer, values, dtype, device)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be tried on a small {dtype} parameter on {device}: {type(error).__name__}: {error}; so its "
            f"update cannot be run page by page; {_WORKS}"
        ) from error
    group_slots = tuple(
        key for key in values if any(not same_value(values[key], _value(after, key, values)) for after in plain.groups)
    )
    slots, scalars = _classify(plain, name)
    if chosen_fused and not _agree(plain, _run_plain(optimizer, {**values, "fused": False}, dtype, device)):
        # torch 2.13's fused SGD on the CPU stores wrong 16-bit momentum.
        raise ConfigError(f"{name}'s fused kernel does not do for {dtype} what its other code does")
    group = GroupTraits(slots, scalars, chosen_fused)
    reason = "no reason recorded"
    for initial in Initial:
        traits = OptimizerTraits(name, (group,), ALIGN_NUMEL, initial, group_slots, device)
        failed = _difference(optimizer, traits, values, plain, _ALIGNED_CUTS)
        if failed is None:
            odd = _difference(optimizer, traits, values, plain, _ODD_CUTS)
            return dataclasses.replace(traits, granularity=1 if odd is None else ALIGN_NUMEL)
        if initial is Initial.LAZY:
            reason = failed
    raise ConfigError(
        f"{name} is not element-wise: {reason}; so its update cannot be run page by page, and training with it would "
        f"change its meaning; {_WORKS}"
    )


def _refuse_closure(optimizer: Optimizer, name: str) -> None:
    parameters = [p for p in inspect.signature(type(optimizer).step).parameters.values() if p.name != "self"]
    if any(p.default is inspect.Parameter.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters):
        raise ConfigError(
            f"{name}.step needs a closure that evaluates the model again, several times a step; pages are updated long "
            f"after the forward pass; {_WORKS}"
        )


def _may_fuse(values: dict[str, Any], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the class offers a fused kernel and the user left the choice open."""
    if values.get("fused", False) is not None or values.get("foreach") or values.get("differentiable"):
        return False
    return dtype.is_floating_point and device.type in _get_fused_kernels_supported_devices()


def _agree(fused: _Outcome, other: _Outcome) -> bool:
    """Whether two outcomes are the same arithmetic, but for rounding; values that overflowed in `other` are not judged."""
    pairs = list(zip(fused.parameters, other.parameters, strict=True))
    for ours, theirs in zip(fused.slots, other.slots, strict=True):
        pairs.extend((value, theirs[key]) for key, value in ours.items() if key in theirs)
    for ours_, theirs_ in pairs:
        known = theirs_.isfinite()
        a, b = ours_[known].double(), theirs_[known].double()
        if b.numel() and not torch.allclose(a, b, rtol=0.1, atol=0.02 * float(b.abs().max())):
            return False
    return True


def _gradients(dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """One gradient a step: both signs, many magnitudes, some exact zeros, the same on every call."""
    generator = torch.Generator().manual_seed(2023)
    for _ in range(_STEPS):
        direction = torch.randn(_SHAPE, generator=generator)
        direction[torch.rand(_SHAPE, generator=generator) < 0.05] = 0.0
        scale = 10.0 ** torch.empty(_SHAPE).uniform_(-4, 1, generator=generator)
        yield (direction * scale).to(device, dtype)


def _start(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1706)
    return torch.randn(_SHAPE, generator=generator).to(device, dtype)


def _at_step(values: dict[str, Any], step: int) -> dict[str, Any]:
    """The hyper-parameters of a step: a schedule that halves the learning rate once, without touching the user's."""
    values = {key: copy_value(value) for key, value in values.items()}
    if step >= _STEPS // 2 and isinstance(values.get("lr"), float | torch.Tensor):
        values["lr"] = values["lr"] * 0.5
    return values


def _run_plain(optimizer: Optimizer, values: dict[str, Any], dtype: torch.dtype, device: torch.device) -> _Outcome:
    parameter = _start(dtype, device).requires_grad_()
    plain = construct_like(optimizer, [{"params": [parameter], **_at_step(values, 0)}])
    plain.param_groups[0].update(_at_step(values, 0))
    outcome = _Outcome([], [], [], [])
    for step, gradient in enumerate(_gradients(dtype, device)):
        # A gradient of its own: some classes write into it.
        parameter.grad = gradient.clone()
        lr = _at_step(values, step).get("lr")
        if lr is not None:
            plain.param_groups[0]["lr"] = lr
        plain.step()
        state = plain.state[parameter]
        slots = {key: value for key, value in state.items() if _tensor_of_many(value)}
        outcome.parameters.append(parameter.detach().clone())
        outcome.slots.append({key: copy_value(value) for key, value in slots.items()})
        outcome.scalars.append({key: copy_value(value) for key, value in state.items() if key not in slots})
        group = plain.param_groups[0]
        outcome.groups.append({key: copy_value(value) for key, value in group.items() if key not in ("params", "lr")})
    return outcome


def _tensor_of_many(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() > 1


def _value(after: dict[str, Any], key: str, before: dict[str, Any]) -> Any:
    return after.get(key, before[key])


def _classify(plain: _Outcome, name: str) -> tuple[tuple[SlotTraits, ...], tuple[str, ...]]:
    slots: dict[str, SlotTraits] = {}
    for state in plain.slots:
        for key, value in state.items():
            if value.shape != _SHAPE:
                raise ConfigError(
                    f"{name} is not element-wise: for a parameter of shape {_SHAPE} it keeps {key!r} of shape "
                    f"{tuple(value.shape)}; so its update cannot be run page by page; {_WORKS}"
                )
            slots.setdefault(key, SlotTraits(key, value.dtype))
    scalars: dict[str, None] = {}
    for values in plain.scalars:
        for key, value in values.items():
            if not isinstance(value, torch.Tensor | int | float | complex | bool | str | None):
                raise ConfigError(
                    f"{name} keeps {key!r}, a {type(value).__name__}, for each parameter; only tensors and numbers can be "
                    f"laid over pages; {_WORKS}"
                )
            scalars[key] = None
    return tuple(slots.values()), tuple(scalars)


def _difference(
    optimizer: Optimizer, traits: OptimizerTraits, values: dict[str, Any], plain: _Outcome, cuts: Sequence[int]
) -> str | None:
    """Run the trial in pieces, as the shadow does; say what differs from the plain run first, or None."""
    start = plain.parameters[0]
    flat = _start(start.dtype, start.device).reshape(-1)
    slots = {slot.name: torch.zeros(flat.numel(), dtype=slot.dtype, device=flat.device) for slot in traits.slots}
    shadow = Shadow(optimizer, traits)
    scalars: ScalarState | None = None
    advanced: dict[str, Any] = {}
    for step, gradient in enumerate(_gradients(start.dtype, start.device)):
        group = {**_at_step(values, step), **advanced}
        hyper = HyperParameters((group,))
        try:
            after = shadow.advance(hyper, 0, scalars, flat)
            for begin, end in itertools.pairwise(cuts):
                views = {key: slot[begin:end] for key, slot in slots.items()}
                piece = gradient.reshape(-1)[begin:end].clone()
                shadow.step(hyper, [RunViews(0, flat[begin:end], piece, views, scalars)])
            advanced = shadow.advanced_group(hyper, 0, traits.group_slots, flat)
        except Exception as error:  # whatever a foreign class raises on a piece is the reason to refuse it
            return f"on a piece of a parameter, made 1-D, it raises {type(error).__name__}: {error}"
        scalars = after
        found = _first_difference(plain, step, flat, slots, scalars, advanced)
        if found is not None:
            return f"updating a parameter in pieces changes its {found} at step {step + 1}"
    return None


def _first_difference(
    plain: _Outcome,
    step: int,
    flat: torch.Tensor,
    slots: dict[str, torch.Tensor],
    scalars: ScalarState,
    advanced: dict[str, Any],
) -> str | None:
    if not same_value(plain.parameters[step].reshape(-1), flat):
        return "value"
    for key, value in plain.slots[step].items():
        if not same_value(value.reshape(-1), slots[key]):
            return f"state {key!r}"
    expected = plain.scalars[step]
    if expected.keys() != scalars.values.keys():
        return f"set of scalars {sorted(expected)} (to {sorted(scalars.values)})"
    for key, value in expected.items():
        if not same_value(value, scalars.values[key]):
            return f"scalar {key!r} ({value} whole, {scalars.values[key]} in pieces)"
    for key, value in advanced.items():
        if not same_value(plain.groups[step].get(key), value):
            return f"group value {key!r}"
    return None
