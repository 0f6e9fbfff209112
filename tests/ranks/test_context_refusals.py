"""What parts of sequences would train otherwise than whole ones is refused, with a sentence that says what to do."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.ranks.context_layers import LENGTH, VOCABULARY, Functional, Layered, ZeroPlaces, data, fit
from kit.ranks.context_models import Causal
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.errors import AngelPTMError

Outcome = tuple[list[float], int, dict[str, Tensor]]


def outcome(module: Any) -> Outcome:
    return module.losses, module.steps, {name: each.detach().clone() for name, each in module.named_parameters()}


RIGHT: dict[str, Callable[[], Layered]] = {
    "attention": Layered,
    "torch's layer": lambda: Layered("of torch"),
    "a smoothed loss": lambda: Layered(loss="smoothed"),
    "a focal loss": lambda: Layered(loss="focal"),
    "parameters of its own": Functional,
}


def train_right(folder: Path) -> dict[str, Outcome]:
    os.environ.setdefault("RANK", "0")
    found = {}
    for name, make in RIGHT.items():
        torch.manual_seed(0)
        module = make()
        fit(module, str(folder), int(os.environ.get("WORLD_SIZE", "1")), data())
        found[name] = outcome(module)
    return found


def test_what_computes_tokens_alone_learns_what_one_rank_learns(disk: Path) -> None:
    """And keeps no trace of the checks."""
    (whole,), divided = run_ranks(train_right, 1, disk), run_ranks(train_right, 2, disk)
    for name, (losses, steps, weights) in whole.items():
        of_ranks = [each[name] for each in divided]
        mean = torch.tensor([each[0] for each in of_ranks], dtype=torch.float64).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses, dtype=torch.float64), rtol=0, atol=1e-12, msg=name)
        for _, theirs, values in of_ranks:
            assert theirs == steps == 3
            for key, value in weights.items():
                torch.testing.assert_close(values[key], value, rtol=0, atol=1e-9, msg=f"{name}: {key}")


class Compiled(Layered):
    def configure_model(self) -> None:
        super().configure_model()
        self.layers[0].compile()


class Fixed(Layered):
    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        if batch[0].shape[1] not in (LENGTH, LENGTH // 2):
            raise ValueError("another length")
        return super().training_step(batch, batch_idx)  # type: ignore[arg-type]


class Single(Layered):
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:  # type: ignore[override]
        text = batch["input_ids"]
        return super().training_step((text[:, :-1], text[:, 1:], text[:, 1:]), batch_idx)


class Convolved(Layered):
    def configure_model(self) -> None:
        super().configure_model()
        self.head = nn.Sequential(Across(), self.head)


class Across(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.transpose(1, 2)).transpose(1, 2)


def texts(**more: Any) -> DataLoader[Any]:
    rows = torch.randint(3, VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row, **more} for row in rows], batch_size=4)  # type: ignore[arg-type]


PADDED = torch.tensor([1] * 12 + [0] * 4)
PACKED = torch.cat([torch.arange(8), torch.arange(8)])
Case = Callable[[], tuple[Any, DataLoader[Any]]]
WRONG: dict[str, tuple[Case, str]] = {
    "positions that begin at 0": (lambda: (Layered(counts=True), data()), "the output of places differs by"),
    "such positions outside of modules": (
        lambda: (Functional(counts=True), data()),
        "what attention is given differs by",
    ),
    "positions that are zeros at first": (lambda: (ZeroPlaces(), data()), "as many rows of zeros as a part has tokens"),
    "attention by hand": (lambda: (Layered("by hand"), data()), "the output of layers.0.out differs by"),
    "a mask": (lambda: (Layered("with a mask"), data()), "attention was called with a mask of shape (8, 8)"),
    "dropout": (lambda: (Layered("with dropout"), data()), "set the model's attention dropout to 0"),
    "keys of others": (lambda: (Layered("of few keys"), data()), "8 queries and 4 keys, so it is no self-attention"),
    "a running sum": (lambda: (Layered("a running sum"), data()), "the output of layers.0.out differs by"),
    "a convolution": (lambda: (Convolved(), data()), "the output of head.0.convolution differs by"),
    "a sum": (lambda: (Layered(loss="sum"), data()), "the mean of the ranks' losses"),
    "weights, later": (lambda: (Layered(loss="weighted"), data()), "the mean of the ranks' losses"),
    "padding, later": (lambda: (Layered(loss="padded"), data()), "the mean of the ranks' losses"),
    "a shift in the part": (lambda: (Layered(loss="of the next in the part"), data()), "the mean of the ranks' losses"),
    "the last token": (lambda: (Layered(loss="of the last token"), data()), "the mean of the ranks' losses"),
    "pooled features": (lambda: (Layered(loss="of pooled features"), data()), "the mean of the ranks' losses"),
    "squares of texts": (lambda: (Layered(loss="of texts"), data()), "the mean of the ranks' losses"),
    "a balance with a small factor": (lambda: (Layered(loss="balanced"), data()), "the mean of the ranks' losses"),
    "random numbers": (lambda: (Layered(loss="random"), data()), "no random numbers but dropout"),
    "optimization by hand": (lambda: (Layered(by_hand=True), data()), "the Layered optimizes by hand"),
    "compiled": (lambda: (Compiled(), data()), "layers.0 is compiled by torch.compile"),
    "a fixed length": (
        lambda: (Fixed(), data()),
        "raised ValueError: another length; let it take texts of any length, with",
    ),
    "an odd length": (lambda: (Layered(), data(30)), "give a multiple of 4: 28 or 32 tokens"),
    "no sequences": (lambda: (Layered(), DataLoader(torch.zeros(8))), "has no tensor with two dimensions"),  # type: ignore[arg-type]
    "one tensor of tokens and targets": (
        lambda: (Single(), texts()),
        "with tokens and targets that the data set has cut",
    ),
    "a mask of pairs": (lambda: (Causal("llama"), texts(mask=torch.ones(16, 16))), "a mask of pairs of tokens"),
    "padded texts": (lambda: (Causal("llama"), texts(attention_mask=PADDED)), "has no masks of padding"),
    "packed texts": (lambda: (Causal("llama"), texts(position_ids=PACKED)), "knows one text a sequence"),
    "capped scores": (lambda: (Causal("gemma2"), texts()), "changes its scores of attention (softcap)"),
    "attention's dropout": (lambda: (Causal("llama", attention_dropout=0.1), texts()), "attention dropout to 0"),
    "a balance of experts": (
        lambda: (Causal("mixtral", output_router_logits=True), texts()),
        "would train something else than Causal does",
    ),
}


def refusals(folder: Path) -> dict[str, str]:
    """Returns what each case raises."""
    found = {}
    for name, (case, _) in WRONG.items():
        torch.manual_seed(0)
        module, loader = case()
        found[name] = "nothing was raised"
        try:
            fit(module, str(folder), 2, loader)
        except AngelPTMError as error:
            found[name] = str(error)
    return found


def test_what_mixes_tokens_otherwise_is_refused(disk: Path) -> None:
    for found in run_ranks(refusals, 2, disk, limit_s=240):
        for name, (_, words) in WRONG.items():
            assert words in found[name], f"{name}: {found[name]}"
            assert "context_parallel_size" in found[name], found[name]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"context_parallel_size": 0}, "context_parallel_size=0: give a number of ranks, 1"),
        ({"context_parallel": "ring"}, "context_parallel='ring' with context_parallel_size=1"),
        (
            {"context_parallel_size": 2, "expert_parallel_size": 2},
            "context_parallel_size=2 with expert_parallel_size=2",
        ),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2, "tensor_parallel": {"sequence_parallel": True}},
            "context_parallel_size=2 with TensorParallel(sequence_parallel=True)",
        ),
        ({"context_parallel_size": 2, "context_parallel": "rings"}, "use 'auto', 'gather', 'ulysses' or 'ring'"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], words: str) -> None:
    from lightning_ptm import AngelPTMStrategy

    with pytest.raises(AngelPTMError) as raised:
        AngelPTMStrategy(**settings)
    assert words in str(raised.value)
