"""What `.grad` of a parameter shows while its gradient is in pages: a tensor without bytes, whose values are fetched when
somebody asks for them.

Owns the values that were fetched. Whose pages they come from, and what becomes of changes, is its maker's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_ptm.torch_internals import make_wrapper_subclass, no_torch_function, tree_map_only

if TYPE_CHECKING:
    from lightning_ptm.memory.backend import Backend, Mark


class GradPlaceholder(Tensor):
    """A gradient in pages. Any operation on it is done on its values, which stay here from then on.

    Args:
        parameter: whose gradient it is.
        read: fetches the values, shaped as the parameter, of its dtype, and nobody else's. Raises where they cannot be had.
        backend: of the device whose current stream they are fetched for; None: there are none to be had.
    """

    @staticmethod
    def __new__(
        cls: Any, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None
    ) -> GradPlaceholder:
        with torch.DisableTorchFunctionSubclass():  # a closed one would be asked by Python each time
            made: GradPlaceholder = make_wrapper_subclass(
                cls, parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        return made

    def __init__(self, parameter: Tensor, read: Callable[[], Tensor], backend: Backend | None = None) -> None:
        self._read = read
        self._backend = backend
        self._held: Tensor | None = None
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
        """Whoever holds it keeps the values that were fetched; others can be had by `read` alone."""
        self._read = read

    @property
    def held(self) -> Tensor | None:
        """Those that were fetched, and may have been changed."""
        return self._held

    def _fetched(self) -> Tensor:
        if self._held is None:
            with torch.no_grad():
                self._held = self._read()
            self._fetch = self._backend.mark() if self._backend is not None else None
        elif self._fetch is not None and self._backend is not None:
            # To its user the gradient was there before the fetch: another stream may be behind no more than that.
            self._fetch.order()
            self._backend.record_use(self._held)  # and may be at it yet when it is let go of
        return self._held

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        fetched = tree_map_only(GradPlaceholder, GradPlaceholder._fetched, (tuple(args), dict(kwargs or {})))
        result = func(*fetched[0], **fetched[1])
        if args and isinstance(args[0], GradPlaceholder) and result is fetched[0][0]:
            return args[0]  # in place
        return result
