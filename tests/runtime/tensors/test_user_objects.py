"""Which objects are the user's, and that their attributes are put back past their classes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lightning_ptm.runtime.tensors.user_objects import ObjectsOf


class OfTheUser:
    """With an attribute in a slot of its base class, and a property that cannot be set."""

    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.slot, self.count = 1, 2

    @property
    def twice(self) -> int:
        return 2 * self.count


class Module(nn.Module):
    pass


def test_attributes_are_those_of_the_users_objects_alone() -> None:
    objects = ObjectsOf(Module())
    assert objects.attributes(OfTheUser()) == {"slot": 1, "count": 2}
    assert objects.attributes(SimpleNamespace(a=1)) == {"a": 1}
    locked: Any = OfTheUser()
    locked.lock = threading.Lock()
    for other in (3, [1], torch.ones(1), torch.Generator(), OfTheUser, Module(), locked):
        assert objects.attributes(other) is None


def test_attributes_are_put_back() -> None:
    objects, value = ObjectsOf(Module()), OfTheUser()
    before = objects.attributes(value)
    assert before is not None
    value.slot, value.count, value.more = 5, 6, 7  # type: ignore[attr-defined]
    objects.put(value, before)
    assert objects.attributes(value) == {"slot": 1, "count": 2} and value.twice == 4
