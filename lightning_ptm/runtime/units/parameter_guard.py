"""Guarded parameters: while it is closed, a parameter has a subclass that raises when its values are used.

`ParameterGuard` opens and closes the parameters of a flat by exchanging their class; the binding reports whether their values
are bound. Owns the list of functions that need a tensor's metadata only (shape, gradient, place in the autograd graph). Knows
tensors, never pages. torch does the same for parameters that are not yet initialised (`UninitializedParameter`).

I1: a closed parameter answers all queries of metadata, and raises at every other access through Python. Code that bypasses
    Python (a custom kernel) reads the bytes in the storage.
I2: the parameter stays the same object, and its class is a subclass of its former class: identity, attributes, hooks and
    `isinstance` are unchanged. An open parameter has no overhead.
I3: if a parameter has no values at all, `detach()` returns an `AbsentTensor`, so that a `state_dict()` of which only other
    entries are used (adapters of a frozen model) works; using the values of an `AbsentTensor` raises the parameter's error.
I4: parameters are open while they are summoned for the user; else while they are both bound and used. Parameters that do
    not close count as always used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.torch_internals import make_subclass

_ABOUT_VALUES = frozenset(
    getattr(Tensor, name) for name in ("data", "real", "imag", "T", "mT", "H", "mH") if hasattr(Tensor, name)
)

"""Attributes that return values of the tensor or views of it, and not metadata."""


_ABOUT_THE_TENSOR = frozenset(
    {
        *(getattr(Tensor, name) for name in ("__len__", "__hash__", "size", "dim", "ndimension", "numel", "nelement")),
        *(
            getattr(Tensor, name)
            for name in ("stride", "is_contiguous", "storage_offset", "element_size", "get_device")
        ),
        *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "is_signed", "is_inference")),
        *(getattr(Tensor, name) for name in ("is_same_size", "requires_grad_", "register_hook", "retain_grad")),
        *(getattr(Tensor, name) for name in ("register_post_accumulate_grad_hook",)),
        *(getattr(Tensor, name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")),
        *(getattr(torch, name) for name in ("is_floating_point", "is_complex", "is_signed", "is_inference", "numel")),
        *(getattr(torch, name) for name in ("empty_like", "zeros_like", "ones_like", "full_like", "is_same_size")),
        *(getattr(torch, name) for name in ("rand_like", "randn_like", "randint_like", "result_type")),
        torch.autograd.grad,
        torch.autograd.backward,
    }
)


def is_about_values(function: Any) -> bool:
    """Whether a function passed to `__torch_function__` reads or writes values of a tensor, and not only metadata."""
    if type(function).__name__ == "method-wrapper":  # an attribute that is read, written or deleted
        return function.__self__ in _ABOUT_VALUES
    return function not in _ABOUT_THE_TENSOR


COPIED_IN_A_RUN = (
    "a parameter whose values are in pages, or an object that refers to it (such as an optimizer), cannot be "
    "copied or pickled while a run is in progress; copy the module that has it, which gathers its values, or use "
    "state_dict() of the module or of the optimizer"
)

DIVIDED_IN_A_RUN = (
    "a module of a run in which ranks divide parameters or experts cannot be copied or pickled: a rank has parts of it, "
    "which cannot compute outside the run; copy it before the run (in __init__ or setup), or use its state_dict()"
)


class AbsentTensor(Tensor):
    """Placeholder in a `state_dict()` for a parameter without values: has shape and dtype, and raises at other uses (I3)."""

    refusal: Exception

    @staticmethod
    def of(parameter: Tensor, refusal: Exception) -> AbsentTensor:
        """Returns the placeholder of a parameter.

        Args:
            refusal: error of which a copy is raised at each use of values.
        """
        with torch.DisableTorchFunctionSubclass():
            nothing = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
            made = make_subclass(AbsentTensor, nothing)
        made.refusal = refusal
        return made

    def _refused(self) -> Exception:
        return type(self.refusal)(*self.refusal.args)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (*args, *kwargs.values())
        inside = (each for item in given for each in (item if isinstance(item, list | tuple) else (item,)))
        ours = next((each for each in inside if isinstance(each, AbsentTensor)), None)
        if function is Tensor.detach and ours is not None:
            return ours
        if ours is not None and is_about_values(function):
            raise ours._refused()
        with torch.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"AbsentTensor(<no values>, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, known: dict[int, Any]) -> Any:
        raise self._refused()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise self._refused()


class GuardedParameter:
    """Base class of all classes of closed parameters; see `guarded_class`."""

    opens_to: type[nn.Parameter]
    """Class of the parameter while it is open."""


def guarded_class(
    kind: type[nn.Parameter],
    refusal: Callable[[tuple[Any, ...]], Exception],
    absent: Callable[[], bool] = lambda: False,
) -> type[nn.Parameter]:
    """Returns the class of closed parameters for parameters of class `kind`.

    Args:
        refusal: returns the error, given the arguments of the refused function.
        absent: returns whether the parameters have no values at all now (I3).
    """

    def torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_about_values(function):
            if function is Tensor.detach and absent():
                return AbsentTensor.of(args[0], refusal((args[0],)))
            raise refusal((*args, *kwargs.values()))
        with torch.DisableTorchFunctionSubclass():
            return function(*args, **kwargs)

    def described(parameter: nn.Parameter, *ignored: Any) -> str:
        shape = tuple(parameter.shape)
        return f"{kind.__name__}(<values that cannot be read now>, shape={shape}, dtype={parameter.dtype})"

    def not_copied(parameter: nn.Parameter, *ignored: Any) -> Any:
        raise refusal((parameter,)) if absent() else UsageError(COPIED_IN_A_RUN)

    members = {
        "opens_to": kind,
        "__torch_function__": classmethod(torch_function),
        "__repr__": described,
        "__format__": described,
        "__deepcopy__": not_copied,
        "__reduce_ex__": not_copied,
        "__doc__": "A parameter whose values cannot be read now.",
    }
    return type(kind.__name__, (kind, GuardedParameter), members)


def reopen(parameter: nn.Parameter) -> bool:
    """Restores the class of a parameter that an earlier run has left closed; returns whether it was closed."""
    if not isinstance(parameter, GuardedParameter):
        return False
    parameter.__class__ = type(parameter).opens_to  # type: ignore[assignment]
    return True


class ParameterGuard:
    """Guard of one flat's parameters.

    Args:
        parameters: the binding's own list, in which new parameters may replace those that the user has resized.
        refusal: returns the error, given the arguments of a function that uses values of a closed parameter.
        closes: whether the parameters may be read only while something computes with them.
        absent: returns whether the parameters have no values at all now.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        refusal: Callable[[tuple[Any, ...]], Exception],
        *,
        closes: bool,
        absent: Callable[[], bool] = lambda: False,
    ) -> None:
        self.closes = closes
        self._parameters = parameters
        kinds = [type(parameter) for parameter in parameters]
        self._open_kinds = [kind.opens_to if issubclass(kind, GuardedParameter) else kind for kind in kinds]
        closed = {kind: guarded_class(kind, refusal, absent) for kind in dict.fromkeys(self._open_kinds)}
        self._closed_kinds = [closed[kind] for kind in self._open_kinds]
        # state
        self._used = not closes
        self._bound = False
        self._summoned = False
        self._open: bool | None = None
        """Whether the parameters have their open classes; None before the first change."""

    def open(self) -> None:
        """Marks the parameters as used: they can be read while they are bound."""
        if not self._used:
            self._used = True
            self._put_class()

    def close(self) -> None:
        """Marks the parameters as not used: they cannot be read, unless they never close."""
        if self._used and self.closes:
            self._used = False
            self._put_class()

    def values_are(self, *, bound: bool, summoned: bool) -> None:
        """Sets where the parameters' values are: in the bound flat, summoned for the user, or (neither) only in pages."""
        self._bound, self._summoned = bound, summoned
        self._put_class()

    def open_for_good(self, slot: int) -> None:
        """Opens a parameter whose storage is outside pages (end of a run)."""
        self._parameters[slot].__class__ = self._open_kinds[slot]

    def forget(self) -> None:
        """Marks the flat as gone without changing the parameters (end of a run)."""
        self._bound = False

    def _put_class(self) -> None:
        is_open = self._summoned or (self._used and self._bound)
        if is_open is self._open:
            return
        self._open = is_open
        for parameter, kind in zip(self._parameters, self._open_kinds if is_open else self._closed_kinds, strict=True):
            parameter.__class__ = kind
