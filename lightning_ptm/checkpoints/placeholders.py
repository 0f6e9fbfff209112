"""Empty tensors in the places of parameters without storage, while a state dict is loaded, and who writes to them then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import OpOverload, TorchDispatchMode, parameters_in, schema_of, storage_id


class Placeholders:
    """Inside, empty meta tensors of these shapes stand in the module for the parameters in `elsewhere`, by id."""

    def __init__(self, module: torch.nn.Module, elsewhere: Mapping[int, tuple[int, ...]]) -> None:
        self._module = module
        self._elsewhere = elsewhere
        self._taken: list[tuple[torch.nn.Module, str, torch.nn.Parameter, torch.nn.Parameter]] = []
        self._of: dict[int, torch.nn.Parameter] = {}
        self.changed: set[int] = set()
        """Parameters, by id, that were to get other values than those given, as far as they were watched."""

    def __enter__(self) -> None:
        for owner in self._module.modules():
            for name, parameter in parameters_in(owner).items():
                if id(parameter) in self._elsewhere:
                    assert parameter is not None
                    empty = torch.empty(self._elsewhere[id(parameter)], dtype=parameter.dtype, device="meta")
                    stand_in = torch.nn.Parameter(empty, requires_grad=False)
                    self._taken.append((owner, name, parameter, stand_in))
                    self._of[id(stand_in)] = parameter
                    parameters_in(owner)[name] = stand_in

    def __exit__(self, *exception: object) -> None:
        for owner, name, parameter, _ in self._taken:
            parameters_in(owner)[name] = parameter

    def stands_for(self, item: Any) -> Any:
        """What an item of the module's state dict stands for, itself if for nothing."""
        return self._of.get(id(item), item)

    @contextmanager
    def watched(self, given: Sequence[tuple[Tensor, int]]) -> Iterator[None]:
        """Inside, `changed` learns of parameters that get something else than what was given for them, by id.

        Ends inside of the stand-ins.
        """
        if not self._taken:
            yield
            return
        owners = {_storage(stand_in): id(parameter) for _, _, parameter, stand_in in self._taken}
        owners |= {_storage(value): of for value, of in given}
        with _Writes(owners, self.changed):
            yield
        for owner, name, parameter, _ in self._taken:
            if owners.get(_storage(parameters_in(owner).get(name))) != id(parameter):  # another tensor was put there
                self.changed.add(id(parameter))


class _Writes(TorchDispatchMode):
    """Inside, finds out which stand-ins are written to, other than by copying what stands for the same parameter.

    Args:
        owners: which parameter a meta tensor stands for, by its storage.
        changed: where to tell it.
    """

    supports_higher_order_operators = True  # they write to nothing that they are given

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
    """Equal for views of one meta tensor; None for all else."""
    is_meta = isinstance(value, Tensor) and value.is_meta and value.layout is torch.strided
    return storage_id(value.untyped_storage()) if is_meta else None
