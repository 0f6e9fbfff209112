"""Products of 16-bit tensors on a CPU without 16-bit arithmetic: computed in fp32 and rounded once.

On such CPUs torch's bfloat16 and float16 matrix kernels are plain loops, 10 to 100 times slower than those of fp32. Owns
the list of operators that count as products (matrix products, attention, convolutions, and their backward passes), and
the decision whether a run needs this. Knows nothing of pages: they stay 16-bit.

I1: a product is the fp32 result of its operator for the same numbers, rounded once to the 16-bit dtype; this equals what
kernels with 16-bit arithmetic return, up to the order of summation. I2: all other operators, products of other dtypes and of
mixed dtypes are torch's own. I3: it applies to the thread that entered it, and costs some microseconds per operator.
"""

from __future__ import annotations

import functools
import math
import sys
import time
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_ptm import torch_internals
from lightning_ptm.comm import Communicator
from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.memory.backend import Backend
from lightning_ptm.torch_internals import (
    HIGHER_ORDER_FOLDER,
    PRODUCTS,
    HigherOrderOperator,
    TorchDispatchMode,
    can_decompose,
    forget_compiled_code,
    modes_of_thread,
    scaled_attention,
    scaled_attention_backward,
)

HALVES = (torch.bfloat16, torch.float16)

SLOW = 4.0
"""Ratio to fp32's time from which a 16-bit product counts as slow. Processors with 16-bit arithmetic take 0.3 to 1.5 times as
long as for fp32, those without 8 to 70 times."""

_SIDE = 128
_LEAST_ROUNDS = 5
_MOST_ROUNDS = 40

_CALLING_HIGHER_ORDER = tuple(str(folder) for folder in (HIGHER_ORDER_FOLDER, Path(torch.nn.attention.__file__).parent))
"""Folders of the functions that torch compiles to call higher-order operators."""

_aten = torch.ops.aten

_IN_PLACE = {_aten.addmm_.default, _aten.addmv_.default, _aten.addbmm_.default, _aten.baddbmm_.default}

_INTO = {
    _aten.mm.out,
    _aten.bmm.out,
    _aten.mv.out,
    _aten.dot.out,
    _aten.addmm.out,
    _aten.addmv.out,
    _aten.addbmm.out,
    _aten.baddbmm.out,
}
"""Overloads that write to a tensor `out`."""

_PRODUCTS = {
    _aten.mm.default,
    _aten.bmm.default,
    _aten.mv.default,
    _aten.dot.default,
    _aten.vdot.default,
    _aten.addmm.default,
    _aten.addmv.default,
    _aten.addbmm.default,
    _aten.baddbmm.default,
    _aten.convolution.default,
    _aten.convolution_backward.default,
    _aten.conv_tbc.default,
    _aten.mkldnn_rnn_layer.default,
    _aten.mkldnn_rnn_layer_backward.default,
    scaled_attention,
    scaled_attention_backward,
    *PRODUCTS,
    *_IN_PLACE,
    *_INTO,
}

_ALWAYS_FP32 = {scaled_attention: 3, scaled_attention_backward: 5}
"""Number of arguments, from the first, that decide whether the operator is a 16-bit product: the attention mask may
have another dtype, and the log-sum-exp, its second output, is fp32."""


class WideMatmuls(TorchDispatchMode):
    """Dispatch mode, per thread, that computes products of 16-bit tensors in fp32 and rounds them once.

    Higher-order operators (`torch.cond`, `flex_attention`) are refused: torch compiles their callers, so that gradients
    reach the parameters used inside, and it compiles nothing under a dispatch mode.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            _refuse(func)
        if func in _PRODUCTS:
            deciding = args[: _ALWAYS_FP32[func]] if func in _ALWAYS_FP32 else (*args, *kwargs.values())
            half = _half_of(deciding)
            return func(*args, **kwargs) if half is None else _wide(func, args, kwargs, half)
        if torch.is_inference_mode_enabled() and _is_composite(func):
            with self:  # composite operators (linear, einsum) are not decomposed yet in inference mode
                return func.decompose(*args, **kwargs)
        return func(*args, **kwargs)


def _refuse(func: Any) -> NoReturn:
    # torch remembers failed compilations for the process, and later runs may call this code without the mode.
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_CALLING_HIGHER_ORDER):
            forget_compiled_code(frame.f_code)
        frame = frame.f_back
    raise ConfigError(
        f"{func.name()} always needs torch.compile, which does not work while products of 16-bit tensors are computed in "
        f"fp32 on this CPU; set tuning=Tuning(matmul_precision='native'), or precision='32-true', or write it with ordinary "
        f"operators (torch.where, torch.nn.functional.scaled_dot_product_attention)"
    )


@contextmanager
def wide_matmuls() -> Iterator[None]:
    """Enters `WideMatmuls`, unless this thread has entered it already."""
    if any(isinstance(mode, WideMatmuls) for mode in modes_of_thread()):
        yield
        return
    with WideMatmuls():
        yield


@functools.cache
def _is_composite(func: Any) -> bool:
    return bool(can_decompose(func))


def _half_of(values: tuple[Any, ...]) -> torch.dtype | None:
    """The 16-bit dtype that all floating-point tensors share; None if they have another dtype or several."""
    found = {value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()}
    dtype = found.pop() if len(found) == 1 else None
    return dtype if dtype in HALVES else None


def _wide(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], half: torch.dtype) -> Any:
    wide_args = tuple(_widened(value) for value in args)
    wide_kwargs = {name: _widened(value) for name, value in kwargs.items()}
    result = func(*wide_args, **wide_kwargs)
    if func in _IN_PLACE:
        return args[0].copy_(result)
    if func in _INTO:
        out: Tensor = kwargs["out"]
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
    if func is scaled_attention:
        return result[0].to(half), result[1]
    return result.to(half) if isinstance(result, Tensor) else tuple(_rounded(each, half) for each in result)


def _rounded(value: Any, half: torch.dtype) -> Any:
    return value.to(half) if isinstance(value, Tensor) and value.dtype is torch.float32 else value


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALVES else value


def products_here(dtype: torch.dtype, backend: Backend) -> AbstractContextManager[None]:
    """Context in which code outside of runs computes products of `dtype` as a run with default settings would here, for
    measurements and comparisons."""
    return wide_matmuls() if not backend.has_own_memory and _slowdown_here(dtype) >= SLOW else nullcontext()


@functools.cache
def _slowdown_here(dtype: torch.dtype) -> float:
    """`slowdown`, measured once, and only if torch reports no arithmetic for `dtype`; otherwise 1."""
    return slowdown(dtype) if dtype in HALVES and not has_arithmetic(dtype) else 1.0


def slowdown(dtype: torch.dtype) -> float:
    """Time of a product in `dtype` relative to fp32 on this CPU, over the memory orders that training uses.

    Takes the least times of several rounds on one thread: other load on the machine only adds time. The run's numerics depend
    on the answer, so a processor counts as fast only after many rounds.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        half, fp32 = _Products(dtype), _Products(torch.float32)
        for done in range(1, _MOST_ROUNDS + 1):
            half.compute()
            fp32.compute()
            if done >= _LEAST_ROUNDS and half.least_s() >= SLOW * fp32.least_s():
                break
        return half.least_s() / fp32.least_s()
    finally:
        torch.set_num_threads(threads)


class _Products:
    """Small products, one for each memory order of the operands, and the least time of each."""

    def __init__(self, dtype: torch.dtype) -> None:
        left, right = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
        self._pairs = ((left, right), (left, right.t()), (left.t(), right))
        self._least_s = [math.inf] * len(self._pairs)

    def compute(self) -> None:
        for index, pair in enumerate(self._pairs):
            began_s = time.monotonic()
            torch.mm(*pair)
            self._least_s[index] = min(self._least_s[index], time.monotonic() - began_s)

    def least_s(self) -> float:
        return sum(self._least_s)


def has_arithmetic(dtype: torch.dtype) -> bool:
    """Whether torch has kernels for this processor's 16-bit arithmetic."""
    name = "bf16" if dtype is torch.bfloat16 else "fp16"
    return torch.backends.mkldnn.is_available() and torch_internals.has_arithmetic(name)


def chosen_wide_matmuls(settings: Settings, dtype: torch.dtype, communicator: Communicator, backend: Backend) -> bool:
    """Whether a run that computes in `dtype` uses wide products: rank 0's finding, on all ranks. Collective if
    `matmul_precision="auto"` and the dtype has 16 bits on a CPU.

    Raises:
        ConfigError: `matmul_precision="fp32"` on a GPU.
    """
    if backend.has_own_memory:
        if settings.tuning.matmul_precision == "fp32":
            raise ConfigError(
                "Tuning(matmul_precision='fp32') is for CPUs without 16-bit arithmetic, and this run computes on "
                f"{backend.device}; leave it at 'auto', or set precision='32-true'"
            )
        return False
    if dtype not in HALVES or settings.tuning.matmul_precision == "native":
        return False
    name = str(dtype).removeprefix("torch.")
    if settings.tuning.matmul_precision == "fp32":
        rank_zero_info(f"Tuning(matmul_precision='fp32'): products of {name} are computed in fp32 and rounded once")
        return True
    times = communicator.broadcast_object(_slowdown_here(dtype) if communicator.rank == 0 else None)
    if times < SLOW:
        return False
    rank_zero_info(
        f"this CPU has no arithmetic for {name} (a product takes {times:.0f} times as long as in fp32): "
        f"matrix products, attention and convolutions of {name} are computed in fp32 and rounded once; "
        "tuning=Tuning(matmul_precision='native') leaves them to the CPU"
    )
    return True
