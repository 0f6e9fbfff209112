"""The state that a unit's forward reads outside of its module: found, restored, and put back."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_ptm.runtime.autograd.outer_state import OuterState
from lightning_ptm.runtime.tensors.user_objects import ObjectsOf


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Any = 1.0

    def now(self) -> Any:
        return self.scale


class Box:
    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


WAYS: dict[str, Callable[[Around], Any]] = {
    "itself": lambda around: around,
    "in a tuple": lambda around: (1, around),
    "a method": lambda around: around.now,
    "a weak reference": weakref.ref,
    "a closure": lambda around: lambda: around.scale,
    "an object": lambda around: Box(inner=[Box(module=around)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_attributes_of_modules_around_are_restored_and_put_back(way: str) -> None:
    around = Around()
    state = OuterState([WAYS[way](around)], {id(around)}, ObjectsOf(around))
    assert state.unchanged()
    around.scale, around.more = 2.0, 3
    assert not state.unchanged()
    back = state.restore()
    assert around.scale == 1.0 and not hasattr(around, "more")
    around.scale = 4.0  # a change within a recomputed forward is dropped
    back()
    assert (around.scale, around.more) == (2.0, 3)


def test_attributes_and_containers_of_objects_are_restored_and_put_back() -> None:
    box: Any = Box(scale=1, by_name={"a": 1}, known={1}, last=[1, 2])
    state = OuterState([box], (), ObjectsOf(Around()))
    box.scale, box.by_name["a"], box.more = 2, 2, 3
    box.known.add(2)
    box.last.append(3)
    back = state.restore()
    assert vars(box) == {"scale": 1, "by_name": {"a": 1}, "known": {1}, "last": [1, 2]}
    back()
    assert vars(box) == {"scale": 2, "by_name": {"a": 2}, "known": {1, 2}, "last": [1, 2, 3], "more": 3}


def test_other_modules_and_long_containers_are_left_alone() -> None:
    other, box = Around(), Box(long=list(range(2000)))
    state = OuterState([other, box], (), ObjectsOf(other))
    other.scale = 2.0
    box.long.append(1)  # type: ignore[attr-defined]
    assert state.unchanged()


def test_no_graph_is_kept() -> None:
    weight = torch.ones(3, requires_grad=True)
    box: Any = Box(loss=(weight * 2).sum())
    node = weakref.ref(box.loss)
    state = OuterState([box], (), ObjectsOf(Around()))
    box.loss = None
    gc.collect()
    assert node() is None
    state.restore()
    assert float(box.loss) == 6.0


def test_an_object_that_has_got_a_lock_is_left_alone() -> None:
    box: Any = Box(scale=1)
    state = OuterState([box], (), ObjectsOf(Around()))
    box.scale, box.lock = 2, threading.Lock()
    back = state.restore()
    assert box.scale == 2
    del box.lock
    back()
    assert box.scale == 2
