"""The memory of a weight in pages as code can see it: like a plain parameter's, without neighbours."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.odd import Block, Odd, assert_same
from torch import Tensor, nn

PLACES = ["ram", "all_on_disk", "tight", "lock_free"]


def _saved(weight: Tensor) -> tuple[int, Tensor]:
    """How many bytes torch.save writes, and what it reads again."""
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    return len(file.getvalue()) // 4096, torch.load(file, weights_only=False).detach()


def _beyond(weight: Tensor) -> str:
    """Returns the result of reading beyond the last element."""
    try:
        return str(torch.as_strided(weight, (4,), (1,), weight.numel()).tolist())
    except RuntimeError as error:
        return str(error)


def _before(weight: Tensor) -> str:
    """Returns the result of reading from the beginning of the storage."""
    return str(torch.as_strided(weight.detach(), (2, 2), (1, 1), 0).tolist())


LOOKS: dict[str, Callable[[Tensor], Any]] = {
    "size of the storage": lambda weight: weight.untyped_storage().nbytes(),
    "typed storage": lambda weight: len(weight.detach().storage()),
    "offset": lambda weight: weight.storage_offset(),
    "beyond its end": _beyond,
    "from the beginning": _before,
    "saved": _saved,
    "saved as a view": lambda weight: _saved(weight.detach()[1:]),
    "pickled": lambda weight: pickle.loads(pickle.dumps(weight.detach())).tolist(),
    "copied": lambda weight: copy.deepcopy(weight.detach()).untyped_storage().nbytes(),
    "set to another shape": lambda weight: torch.empty(0).set_(weight.detach().untyped_storage()).numel(),
    "bytes of the storage": lambda weight: bytes(weight.detach().untyped_storage())[:64],
    "of two parameters": lambda weight: weight.untyped_storage().data_ptr() == weight.data_ptr(),
    "array": lambda weight: weight.detach().numpy().tobytes()[:64],
    "base of the array": lambda weight: weight.detach().numpy().base is None,
    "resized": lambda weight: _resized(weight.detach()),
}


def _resized(weight: Tensor) -> str:
    """Returns the result of resizing a copy of the storage's view, in place, to more elements than exist."""
    return str(torch.empty(0).set_(weight.untyped_storage(), 0, (3,), (2,)).tolist())


def looking(look: Callable[[Tensor], Any]) -> type[Odd]:
    """A program whose blocks look at their weights, and note what they see."""

    class Looking(Odd):
        def block(self) -> nn.Module:
            class OfBlock(Block):
                seen: Any = ()

                def forward(self, x: Tensor) -> Tensor:
                    self.seen = [look(weight) for weight in (self.up.weight, self.down.bias, self.norm.weight)]
                    return super().forward(x)

            return OfBlock()

        def step(self, run: Any, x: Tensor) -> Any:
            loss = super().step(run, x)
            for block in self.blocks:
                for each in block.seen:  # type: ignore[union-attr]
                    text = repr(each)
                    run.losses.append(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).clone())
            return loss

    return Looking


@pytest.mark.diagonal
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("look", LOOKS)
def test_as_a_plain_parameter(strategy_at, look: str, place: str) -> None:
    assert_same(looking(LOOKS[look]), strategy_at(place))
