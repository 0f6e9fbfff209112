"""Parameters whose values nobody may read or write now: a class that a parameter has as long as it is closed.

Owns which questions are about the tensor (its shape, its gradient, its place in a graph) and which about its values. Knows
tensors, never pages. torch does the same for parameters that are not initialised yet (`UninitializedParameter`).

I1: a closed parameter answers every question about the tensor, and raises at any other that Python can ask of it; code that
asks no Python (a kernel of somebody's own) finds what the storage holds. I2: it is the same object, of a subclass of its own
class: identity, attributes, hooks and `isinstance` are as they were. An open parameter costs nothing. I3: where a parameter
has no values at all, `detach()` gives an `AbsentTensor`, so that a `state_dict()` of which only other entries are used
(adapters of a frozen model) can be made; whatever asks that one for values gets the parameter's refusal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.torch_internals import make_subclass

_ABOUT_VALUES = frozenset(
    getattr(Tensor, name) for name in ("data", "real", "imag", "T", "mT", "H", "mH") if hasattr(Tensor, name)
)
"""Attributes that are no fact about the tensor, but its values or a view of them."""

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
    """Whether what `__torch_function__` is asked for are values of a tensor, or a change of them, and no fact about it."""
    if type(function).__name__ == "method-wrapper":  # an attribute that is read, written or deleted
        return function.__self__ in _ABOUT_VALUES
    return function not in _ABOUT_THE_TENSOR


COPIED_IN_A_RUN = (
    "a parameter whose values are in pages, or an optimizer or whatever else refers to it and not to its module, cannot be "
    "copied or pickled while a run is in progress; copy the module that has it, which gathers its values, or take a "
    "state_dict() of the module or of the optimizer"
)
DIVIDED_IN_A_RUN = (
    "a module of a run in which ranks divide parameters or experts cannot be copied or pickled: a rank has parts of it, "
    "which compute nothing outside of the run; copy it before the run (in __init__ or setup), or take its state_dict()"
)


class AbsentTensor(Tensor):
    """Shape and dtype of a parameter without values, in a `state_dict()`: what asks it for values raises (I3)."""

    refusal: Exception

    @staticmethod
    def of(parameter: Tensor, refusal: Exception) -> AbsentTensor:
        """In the place of a parameter. Args: refusal: what is raised, each time anew."""
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
    """Base of all classes of closed parameters; see `guarded_class`."""

    opens_to: type[nn.Parameter]
    """The class that the parameter has when it is open."""


def guarded_class(
    kind: type[nn.Parameter],
    refusal: Callable[[tuple[Any, ...]], Exception],
    absent: Callable[[], bool] = lambda: False,
) -> type[nn.Parameter]:
    """The class of parameters of class `kind` while they are closed.

    Args:
        refusal: makes the error, from what the refused function was called with.
        absent: whether they have no values at all now (I3).
    """

    def torch_function(cls: Any, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.detach and absent():
            return AbsentTensor.of(args[0], refusal((args[0],)))
        if is_about_values(function):
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
    """Gives a parameter that an earlier run has left closed its own class back; whether it was closed."""
    if not isinstance(parameter, GuardedParameter):
        return False
    parameter.__class__ = type(parameter).opens_to  # type: ignore[assignment]
    return True
