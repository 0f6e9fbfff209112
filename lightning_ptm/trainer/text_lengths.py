"""Comparisons of numbers of tokens that a step makes while it is tried on a short text, and their results for other lengths.

A step may do something else for long texts: another scale above 512 tokens, or the first 512 tokens alone. A short text does
not come there. So sizes of tensors that are numbers of tokens are integers that know what they are for other lengths, as do
their sums, differences, products and quotients. Comparisons of them, and slices of tensors, are recorded.
Knows no context group and no module.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_OWN_CODE = "lightning_ptm."
_SIGNS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}

_Of = Callable[[int], Any]
"""Returns a number, given that of a text's tokens."""


@dataclasses.dataclass(frozen=True, slots=True)
class LengthComparison:
    """A comparison of a number of tokens.

    Attributes:
        left, right: the numbers that are compared.
        result: its result for the short text.
    """

    sign: str
    left: _Of
    right: _Of
    result: bool

    def at(self, tokens: int) -> bool:
        """Returns its result for a text of so many tokens; that for the short text where a quotient in it has the divisor 0,
        since a step that is right there makes no such comparison."""
        try:
            return _SIGNS[self.sign](self.left(tokens), self.right(tokens))
        except ZeroDivisionError:
            return self.result

    def words(self, tokens: int) -> str:
        """Returns it in numbers of a text of so many tokens, or says that a quotient in it has the divisor 0 there."""
        try:
            return f"{self.left(tokens)} {self.sign} {self.right(tokens)}"
        except ZeroDivisionError:
            return f"'{self.sign}' of a quotient with divisor 0"


class _Tokens(int):
    """A number of tokens, or an integer that is computed from one.

    Attributes:
        of: returns it for texts of other lengths.
        add: records a comparison.
    """

    of: _Of
    add: Callable[[FrameType, LengthComparison], None]

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)


def _tokens(value: int, of: _Of, add: Callable[[FrameType, LengthComparison], None]) -> _Tokens:
    made = _Tokens(value)
    made.of, made.add = of, add
    return made


def _of(value: Any) -> _Of:
    return value.of if isinstance(value, _Tokens) else lambda _: value


def _end(bound: int) -> _Of:
    """Returns how many tokens are before the end of a slice, or after it if that is counted from the text's end."""
    of = _of(bound)
    return lambda tokens: abs(of(tokens))


def _arithmetic(name: str) -> Callable[[_Tokens, Any], Any]:
    compute = getattr(int, name)

    def computed(self: _Tokens, other: Any) -> Any:
        value = compute(self, other)
        if type(value) is not int or type(other) not in (int, _Tokens):
            return value
        ours, theirs = self.of, _of(other)
        return _tokens(value, lambda tokens: compute(ours(tokens), theirs(tokens)), self.add)

    return computed


def _comparison(name: str, sign: str) -> Callable[[_Tokens, Any], Any]:
    compare = getattr(int, name)

    def compared(self: _Tokens, other: Any) -> Any:
        if type(other) not in (int, float, _Tokens):
            return compare(self, other)
        plain = int(other) if isinstance(other, _Tokens) else other
        result = _SIGNS[sign](int(self), plain)
        self.add(sys._getframe(1), LengthComparison(sign, self.of, _of(other), result))
        return result

    return compared


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv"):
    setattr(_Tokens, f"__{_name}__", _arithmetic(f"__{_name}__"))
for _sign, _way in _SIGNS.items():
    setattr(_Tokens, f"__{_way.__name__}__", _comparison(f"__{_way.__name__}__", _sign))

Found = Mapping[tuple[str, int, str], Sequence[LengthComparison]]
"""Comparisons by the file and line that make them, and their sign."""


class TextLengths(TorchFunctionMode):
    """Context in which sizes of tensors that are numbers of tokens record comparisons.

    Args:
        samples: number of texts of a batch.
        tokens: number of tokens of the short text, or part, that is computed.
    """

    _READS = (Tensor.shape.__get__, Tensor.size)  # type: ignore[attr-defined]

    def __init__(self, samples: int, tokens: int) -> None:
        super().__init__()
        self._samples, self._number = samples, tokens
        self.found: dict[tuple[str, int, str], list[LengthComparison]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in self._READS:
            dim = self._dim_of_tokens(args[0])
            if dim is None:
                return out
            number = _tokens(self._number, lambda tokens: tokens, self._add)
            if isinstance(out, torch.Size):
                return torch.Size((*out[:dim], number, *out[dim + 1 :]))
            asked = args[1] if len(args) > 1 else (kwargs or {})["dim"]
            return number if asked in (dim, dim - args[0].dim()) else out
        if func is Tensor.__getitem__:
            self._add_slice(args[0], args[1])
        return out

    def _dim_of_tokens(self, tensor: Tensor) -> int | None:
        """Returns the dimension of a tensor that has the text's tokens, behind one of texts."""
        shape = tensor.shape
        if len(shape) > 1 and shape[0] in (1, self._samples) and shape[1] == self._number:
            return 1
        return 2 if len(shape) == 4 and shape[0] == self._samples and shape[2] == self._number else None

    def _add_slice(self, tensor: Tensor, index: Any) -> None:
        """Compares the number of tokens with where a slice of them begins and ends: torch takes fewer if there are none."""
        items = index if isinstance(index, tuple) else (index,)
        dim = self._dim_of_tokens(tensor)
        if dim is None or len(items) <= dim or not all(isinstance(each, (int, slice)) for each in items[: dim + 1]):
            return
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_name == "__torch_function__":
            frame = frame.f_back
        for bound in (items[dim].start, items[dim].stop) if isinstance(items[dim], slice) else ():
            if type(bound) in (int, _Tokens):
                last = _end(bound)
                compared = LengthComparison(">", lambda tokens: tokens, last, self._number > last(self._number))
                self._add(frame, compared)

    def _add(self, frame: FrameType, comparison: LengthComparison) -> None:
        if not str(frame.f_globals.get("__name__", "")).startswith(_OWN_CODE):
            self.found.setdefault((frame.f_code.co_filename, frame.f_lineno, comparison.sign), []).append(comparison)


def pairs(whole: Found, divided: Found) -> Iterator[tuple[LengthComparison, LengthComparison]]:
    """Yields the comparisons that both have made, of whole texts and of parts, in an order that is equal on all ranks."""
    for place in sorted(whole.keys() & divided.keys()):
        yield from zip(whole[place], divided[place], strict=False)
