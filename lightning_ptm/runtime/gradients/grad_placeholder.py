"""Placeholder in `.grad` for a gradient in pages: a tensor without memory whose values are fetched at the first use.

Owns the fetched values. Its maker decides where values come from and what happens to changes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import make_wrapper_subclass, no_torch_function, tree_map_only

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend
    from lightning_ptm.memory.device_work import Mark


class GradPlaceholder(Tensor):
    """A gradient in pages. Operations run on its values, which are fetched once and stored here.

    Args:
        parameter: the parameter whose gradient it is.
        read: fetches the values as a new tensor with the parameter's shape and dtype; raises if they are not available.
        backend: the device whose current stream fetches the values; None: no values are available.
    """

    @staticmethod
    def __new__(
        cls: Any, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None
    ) -> GradPlaceholder:
        # otherwise Python would call __torch_function__ of a parameter guard each time
        with torch.DisableTorchFunctionSubclass():
            made: GradPlaceholder = make_wrapper_subclass(
                cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        return made

    def __init__(self, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None) -> None:
        self._read = read
        self._backend = backend
        self._fetched_values: Tensor | None = None
        self._fetch: Mark | None = None

    __torch_function__ = no_torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._fetched())

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self._fetched().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._fetched().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self._fetched().numpy(force=force)

    def tolist(self) -> Any:
        return self._fetched().tolist()

    def data_ptr(self) -> int:
        return self._fetched().data_ptr()

    def retire(self, read: Callable[[], Tensor]) -> None:
        """Replaces the fetch function: values that were fetched stay, others come from `read`."""
        self._read = read

    @property
    def fetched_values(self) -> Tensor | None:
        """The fetched values, which the user may have changed; None: not fetched."""
        return self._fetched_values

    def _fetched(self) -> Tensor:
        if self._fetched_values is None:
            with torch.no_grad():
                self._fetched_values = self._read()
            self._fetch = self._backend.mark() if self._backend is not None else None
        elif self._fetch is not None and self._backend is not None:
            # For the user the gradient existed before the fetch, so the user's stream may not have waited for it.
            self._fetch.order()
            self._backend.record_use(self._fetched_values)  # this stream may still read it when it is freed
        return self._fetched_values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fetched = tree_map_only(GradPlaceholder, GradPlaceholder._fetched, (tuple(args), dict(kwargs or {})))
        result = func(*fetched[0], **fetched[1])
        if args and isinstance(args[0], GradPlaceholder) and result is fetched[0][0]:
            return args[0]  # in-place operations return the placeholder
        return result
