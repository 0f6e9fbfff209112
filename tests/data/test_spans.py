"""Span corruption: nothing of a window is lost or told twice, and samples are as long as promised."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ptm.data import SpanCorruption
from lightning_ptm.data.spans import END, FIRST_BYTE, FIRST_SENTINEL, corrupt, random_parts
from lightning_ptm.errors import ConfigError


@st.composite
def cases(draw: st.DrawFn) -> tuple[bytes, int, int, int]:
    """A window, how many bytes to take out, in how many spans, and a seed."""
    text = draw(st.binary(min_size=2, max_size=80))
    noise = draw(st.integers(1, len(text) - 1))
    spans = draw(st.integers(1, min(noise, len(text) - noise)))
    return text, noise, spans, draw(st.integers(0, 2**32))


def pieces(tokens: list[int]) -> list[list[int]]:
    """Splits tokens at sentinels."""
    found: list[list[int]] = [[]]
    for token in tokens:
        if token >= FIRST_SENTINEL:
            found.append([])
        else:
            found[-1].append(token)
    return found


@settings(deadline=None, max_examples=200)
@given(cases())
def test_every_byte_is_given_or_wanted_once_and_sentinels_match(case: tuple[bytes, int, int, int]) -> None:
    text, noise, spans, seed = case
    window = torch.tensor(list(text), dtype=torch.uint8)
    given_tokens, wanted = (t.tolist() for t in corrupt(window, noise, spans, torch.Generator().manual_seed(seed)))
    assert len(given_tokens) == len(text) - noise + spans + 1
    assert len(wanted) == noise + spans + 2
    assert given_tokens.pop() == END
    assert wanted.pop() == END
    sentinels = list(range(FIRST_SENTINEL, FIRST_SENTINEL + spans + 1))
    assert [token for token in given_tokens if token >= FIRST_SENTINEL] == sentinels[:-1]
    assert [token for token in wanted if token >= FIRST_SENTINEL] == sentinels
    kept, taken = pieces(given_tokens), pieces(wanted)
    assert kept.pop() == []  # a window ends in a span that is taken out
    assert taken.pop() == []  # behind the last sentinel
    assert taken.pop(0) == []  # before the first
    assert all(kept) and all(taken)
    rebuilt = [token - FIRST_BYTE for one, two in zip(kept, taken, strict=True) for token in one + two]
    assert bytes(rebuilt) == text
    assert sum(len(piece) for piece in taken) == noise


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 30), st.data())
def test_parts_add_up(total: int, data: st.DataObject) -> None:
    parts = random_parts(
        total, data.draw(st.integers(1, total)), torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    )
    assert parts.sum() == total
    assert parts.min() >= 1


def test_all_places_and_lengths_occur() -> None:
    """Two spans of five bytes, out of ten: every byte is sometimes taken, and spans have all lengths from 1 to 4."""
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(10, dtype=torch.uint8)
    wanted = [corrupt(window, 5, 2, generator)[1].tolist() for _ in range(200)]
    assert {token - FIRST_BYTE for target in wanted for token in target if 1 < token < FIRST_SENTINEL} == set(
        range(1, 10)
    )
    assert {len(pieces(target)[1]) for target in wanted} == {1, 2, 3, 4}


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_bytes(bytes(range(97, 123)) * 400)
    return str(tmp_path / "text.txt")


def ready(path: str, **changes: object) -> SpanCorruption:
    data = SpanCorruption(path, **({"sequence_length": 256, "batch_size": 4} | changes))  # type: ignore[arg-type]
    data.setup("fit")
    return data


def test_as_the_paper_says_15_percent_in_spans_of_3(text: str) -> None:
    data = ready(text)
    assert (data.noise, data.spans) == (38, 13)  # 14.8 % of 256, 2.9 bytes each
    for loader in (data.train_dataloader(), data.val_dataloader()):
        given_tokens, wanted = next(iter(loader))
        assert given_tokens.shape[1] == data.input_length == 256 - 38 + 13 + 1
        assert wanted.shape[1] == data.target_length == 38 + 13 + 2
        assert max(given_tokens.max(), wanted.max()) + 1 == data.tokens_used < data.vocab_size


def test_training_differs_each_time_and_with_the_seed_and_evaluation_does_not(text: str) -> None:
    data = ready(text)
    first, again = (data.windows(data.train_text, training=True)[3][0] for _ in range(2))
    assert not torch.equal(first, again)
    for training in (True, False):
        windows = data.windows(data.train_text, training=training)
        found = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            found.append(windows[3][0])
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2]) != training
    torch.manual_seed(1)
    assert not torch.equal(windows[3][0], windows[4][0])


def test_the_unigram_loss_is_that_of_counted_targets(text: str) -> None:
    """On a text of 26 equally frequent letters, close to the entropy of the targets' own tokens."""
    data = ready(text, validation_fraction=0.5)
    targets = torch.cat([wanted.flatten() for _, wanted in data.val_dataloader()])
    frequency = torch.bincount(targets).double() / targets.numel()
    entropy = torch.special.entr(frequency).sum().item()
    assert data.unigram_loss == pytest.approx(entropy, rel=0.02)
    assert data.unigram_loss > math.log(26)


def test_what_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="noise_density=1"):
        SpanCorruption(text, noise_density=1.0)
    with pytest.raises(ConfigError, match="14 sentinels, and there are 13"):
        SpanCorruption(text, sentinels=13)
    with pytest.raises(ConfigError, match="one window takes"):
        ready(text, sequence_length=10_000, sentinels=600)
