"""Words that messages share."""

import pytest

from lightning_ptm.errors import some


@pytest.mark.parametrize(
    ("names", "most", "told"),
    [
        ([], 3, ""),
        (["a"], 3, "a"),
        (["a", "b", "c"], 3, "a, b, c"),
        (["a", "b", "c", "d", "e"], 3, "a, b, c and 2 more"),
    ],
)
def test_the_first_few_of_many_names(names: list[str], most: int, told: str) -> None:
    assert some(names, most) == told
