"""Meta tensors in place of parameters without storage while a state dict is loaded, and detection of writes to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import OpOverload, TorchDispatchMode, parameters_in, schema_of, storage_id


class Placeholders:
    """Context in which meta tensors replace the parameters in `shapes` in the module.

    Args:
        shapes: shapes of the meta tensors, by id of the parameter.
    """

    def __init__(self, module: torch.nn.Module, shapes: Mapping[int, tuple[int, ...]]) -> None:
        self._module = module
        self._shapes = shapes
        self._replaced: list[tuple[torch.nn.Module, str, torch.nn.Parameter, torch.nn.Parameter]] = []
        self._of: dict[int, torch.nn.Parameter] = {}
        self.changed: set[int] = set()
        """Ids of parameters that, inside of `watched`, got other values than those given."""

    def __enter__(self) -> None:
        for owner in self._module.modules():
            for name, parameter in parameters_in(owner).items():
                if id(parameter) in self._shapes:
                    assert parameter is not None
                    empty = torch.empty(self._shapes[id(parameter)], dtype=parameter.dtype, device="meta")
                    stand_in = torch.nn.Parameter(empty, requires_grad=False)
                    self._replaced.append((owner, name, parameter, stand_in))
                    self._of[id(stand_in)] = parameter
                    parameters_in(owner)[name] = stand_in

    def __exit__(self, *exception: object) -> None:
        for owner, name, parameter, _ in self._replaced:
            parameters_in(owner)[name] = parameter

    def stands_for(self, item: Any) -> Any:
        """Returns the parameter that a placeholder in the module's state dict replaces; other items unchanged."""
        return self._of.get(id(item), item)

    @contextmanager
    def watched(self, given: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Context in which `changed` records parameters that get other values than those given, (value, id of
        parameter).

        Must end before the placeholders are removed.
        """
        if not self._replaced:
            yield
            return
        owners = {_storage(stand_in): id(parameter) for _, _, parameter, stand_in in self._replaced}
        owners |= {_storage(value): of for value, of in given}
        with _Writes(owners, self.changed):
            yield
        for owner, name, parameter, _ in self._replaced:
            if owners.get(_storage(parameters_in(owner).get(name))) != id(parameter):  # replaced by another tensor
                self.changed.add(id(parameter))


class _Writes(TorchDispatchMode):
    """Mode that finds writes to placeholders, except copies of the value given for the same parameter.

    Args:
        owners: id of the parameter that a meta tensor stands for, by the tensor's storage.
        changed: set to which ids of written parameters are added.
    """

    supports_higher_order_operators = True  # they write to none of their arguments

    def __init__(self, owners: Mapping[int | None, int], changed: set[int]) -> None:
        super().__init__()
        self._owners = owners
        self._changed = changed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.copy_.default:
            written = [args[0]] if self._owner(args[0]) != self._owner(args[1]) else []
        elif not isinstance(func, OpOverload):
            written = []
        else:
            values = [*args, *(kwargs.get(each.name) for each in schema_of(func).arguments[len(args) :])]
            marks = [each.alias_info is not None and each.alias_info.is_write for each in schema_of(func).arguments]
            chosen = [value for value, is_written in zip(values, marks, strict=False) if is_written]
            written = [each for value in chosen for each in (value if isinstance(value, (list, tuple)) else (value,))]
        self._changed.update(of for of in map(self._owner, written) if of is not None)
        return func(*args, **kwargs)

    def _owner(self, value: Any) -> int | None:
        return self._owners.get(_storage(value))


def _storage(value: Any) -> int | None:
    """Returns a key that views of one meta tensor share; None for other values."""
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout is torch.strided
    return storage_id(value.untyped_storage()) if is_meta else None
