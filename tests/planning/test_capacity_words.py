"""Errors for users about a tier that is too small."""

from __future__ import annotations

import pytest

from lightning_ptm.planning.capacity_words import uses_in_words, with_uses
from lightning_ptm.terms import Tier

MIB = 1 << 20


def test_the_largest_uses_are_named_and_the_rest_is_one_number() -> None:
    uses = {"gradients": 8 * MIB, "staging": MIB, "states": 60 * MIB, "nothing": 0, "masters": 30 * MIB, "buffers": MIB}
    told = "the host tier is for states 60 MiB, masters 30 MiB, gradients 8 MiB, others 2 MiB"
    assert uses_in_words(Tier.HOST, uses) == told
    assert with_uses("too much; raise host_memory", Tier.HOST, uses) == f"too much; raise host_memory ({told})"


@pytest.mark.parametrize(("uses", "told"), [({"a": 1}, "the disk tier is for a 1 B"), ({}, ""), ({"a": 0}, "")])
def test_few_uses(uses: dict[str, int], told: str) -> None:
    assert uses_in_words(Tier.DISK, uses) == told
    assert with_uses("too much", Tier.DISK, uses) == ("too much" + (f" ({told})" if told else ""))
