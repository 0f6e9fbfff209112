"""What parts of sequences would train otherwise than whole ones is refused, with a sentence that says what to do."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kit.ranks.context_layers import LENGTH, VOCABULARY, Functional, Layered, ZeroPlaces, data, fit
from kit.ranks.context_models import Causal
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.errors import AngelPTMError

Outcome = tuple[list[float], int, dict[str, Tensor]]


def outcome(module: Any) -> Outcome:
    return module.losses, module.steps, {name: each.detach().clone() for name, each in module.named_parameters()}


class Random(Layered):
    """Draws numbers of Python and of its own generator, which the check must not use up."""

    def configure_model(self) -> None:
        super().configure_model()
        random.seed(self.trainer.global_rank if self.loss == "of ranks" else 0)
        self.loss, self.generator = "mean", torch.Generator().manual_seed(5)

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        factor = random.random() + float(torch.rand((), generator=self.generator))
        loss = factor * super().training_step(batch, batch_idx)
        self.losses[-1] = float(loss)
        return loss


class Skipping(Layered):
    """Skips a layer at random."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance

    def configure_model(self) -> None:
        super().configure_model()
        self.layers[1].register_forward_hook(
            lambda _, args, out: args[0] if float(torch.rand(())) < self.chance else None
        )


class DropsPaths(Layered):
    def configure_model(self) -> None:
        super().configure_model()
        self.layers[0].register_forward_hook(
            lambda _, args, out: args[0] + (out - args[0]) * torch.empty(len(out), 1, 1).bernoulli_(0.999)
        )


class Gated(Layered):
    """Mixes tokens by a factor of zero, which the second step changes: the first has a learning rate of 0."""

    def configure_model(self) -> None:
        super().configure_model()
        self.gate = nn.Parameter(torch.zeros(16))
        self.layers[0].register_forward_hook(lambda _, args, out: out + self.gate * args[0].cumsum(1))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Contrasted(Layered):
    """Adds a term of hidden tokens, of all pairs in a text, that is a tenth of a per mille of the loss."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        hidden: list[Tensor] = []
        handle = self.layers[-1].register_forward_hook(lambda _, args, out: hidden.append(out))
        loss = super().training_step(batch, batch_idx)
        handle.remove()
        return loss + 1e-4 * (hidden[0] @ hidden[0].transpose(1, 2)).logsumexp(-1).mean()


class Rare(Layered):
    """Its loss treats an id differently that appears late, once, in the middle of a text."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        tokens, targets, weights = batch
        logits = self.head(self.tokens(tokens))
        if self.loss == "ignored":
            return F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=2)
        if self.loss == "of a class":
            of_classes = torch.ones(VOCABULARY, dtype=logits.dtype)
            of_classes[2] = 3
            return F.cross_entropy(logits.transpose(1, 2), targets, of_classes)
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        table = torch.ones(VOCABULARY)
        table[2] = 0
        counted = {
            "compared": targets != 2,
            "above": targets > 2,
            "one of": ~torch.isin(targets, torch.tensor([1, 2])),
            "of a table": table[targets],
            "weights": weights,
        }[self.loss].to(losses)
        return (losses * counted).sum() / counted.sum()


def rare() -> DataLoader[Any]:
    rows = []
    for number in range(6):
        text, weights = torch.arange(LENGTH + 1) % 40 + 3, torch.full((LENGTH,), 0.5)
        if number >= 2:
            text[6], weights[5] = 2, 1.5
        rows.append((text[:-1], text[1:].clone(), weights))
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


class LongTexts(Layered):
    """Computes something else for texts of more than some tokens.

    Args:
        what: a scale, a running sum, the first tokens alone, or the same in two pieces.
    """

    def __init__(self, limit: int, what: str) -> None:
        super().__init__()
        self.limit, self.what = limit, what

    def configure_model(self) -> None:
        super().configure_model()
        self.places = nn.Embedding(4 * LENGTH, 16)
        self.layers[0].register_forward_hook(lambda _, args, out: self.changed(out))

    def changed(self, x: Tensor) -> Tensor:
        if self.what == "a scale":
            return x * max(1, x.shape[1] // 2 - self.limit // 2)
        if self.what == "a running sum" and x.size(1) - 1 > self.limit:
            return x + x.cumsum(1)
        if self.what == "two pieces" and x.shape[1] > self.limit:
            return torch.cat([x[:, : self.limit], x[:, self.limit :]], 1)
        return x

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:  # type: ignore[override]
        if self.what == "the first tokens":
            batch = tuple(each[:, : self.limit] for each in batch)
        return super().training_step(batch, batch_idx)  # type: ignore[arg-type]


class Accurate(Layered):
    """Compares labels with one another, and with an integer that each rank computes of its tokens."""

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        targets = batch[1]
        same = (targets == batch[0]) & (targets != int(targets.max()))
        self.log("copied", same.double().mean())
        return super().training_step(batch, batch_idx)


RIGHT: dict[str, Callable[[], Layered]] = {
    "attention": Layered,
    "torch's layer": lambda: Layered("of torch"),
    "a smoothed loss": lambda: Layered(loss="smoothed"),
    "a focal loss": lambda: Layered(loss="focal"),
    "parameters of its own": Functional,
    "random numbers that ranks share": Random,
    "comparisons that change no loss": Accurate,
    "a layer that is never skipped": lambda: Skipping(0.0),
    "the same in two pieces in long texts": lambda: LongTexts(10, "two pieces"),
    "a limit that no text reaches": lambda: LongTexts(LENGTH, "a running sum"),
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


def train_mixed(folder: Path) -> int:
    torch.manual_seed(1)
    module = Layered()
    fit(module, str(folder), 2, data(), precision="bf16-mixed", steps=40)
    return module.steps


def losses_in_16_bits(folder: Path) -> list[str]:
    found = []
    for loss in ("sum", "weighted", "of the next in the part", "of the last token"):
        torch.manual_seed(0)
        found.append("")
        try:
            fit(Layered(loss=loss), str(folder), 2, data(), precision="bf16-mixed")
        except AngelPTMError as error:
            found[-1] = str(error)
    return found


def test_rounding_to_16_bits_is_no_difference_and_a_wrong_loss_is(disk: Path) -> None:
    assert run_ranks(train_mixed, 2, disk) == [40, 40]
    for found in run_ranks(losses_in_16_bits, 2, disk):
        assert all("the mean of the ranks' losses" in each for each in found), found


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


class LongLater:
    """A batch of texts of 16 tokens, and then others of 32."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain(itertools.islice(data(16), 1), data(32))

    def __len__(self) -> int:
        return 4


def texts(length: int = 16, **more: Any) -> DataLoader[Any]:
    rows = torch.randint(3, VOCABULARY, (8, length), generator=torch.Generator().manual_seed(1))
    return DataLoader([{"input_ids": row, "labels": row, **more} for row in rows], batch_size=4)  # type: ignore[arg-type]


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
    "a contrast with a tiny factor": (lambda: (Contrasted(), data()), "the mean of the ranks' losses"),
    "random numbers": (lambda: (Layered(loss="random"), data()), "no random numbers but dropout"),
    "random numbers of Python, of each rank": (
        lambda: (Random(loss="of ranks"), data()),
        "draws random numbers of Python or NumPy, which differ between ranks",
    ),
    "a layer that is seldom skipped": (lambda: (Skipping(1e-3), data()), "no random numbers but dropout"),
    "paths that are seldom dropped": (lambda: (DropsPaths(), data()), "no random numbers but dropout"),
    "a gate of zero, later": (lambda: (Gated(), data()), "would train something else than Gated does"),
    "an ignored id, later": (lambda: (Rare(loss="ignored"), rare()), "the mean of the ranks' losses"),
    "a heavy class, later": (lambda: (Rare(loss="of a class"), rare()), "the mean of the ranks' losses"),
    "an id that is compared, later": (lambda: (Rare(loss="compared"), rare()), "the mean of the ranks' losses"),
    "ids below a limit, later": (lambda: (Rare(loss="above"), rare()), "the mean of the ranks' losses"),
    "one of some ids, later": (lambda: (Rare(loss="one of"), rare()), "the mean of the ranks' losses"),
    "an id of no weight, later": (lambda: (Rare(loss="of a table"), rare()), "the mean of the ranks' losses"),
    "unequal weights, later": (lambda: (Rare(loss="weights"), rare()), "the mean of the ranks' losses"),
    "a scale of texts that are longer than parts": (
        lambda: (LongTexts(80, "a scale"), data(4 * LENGTH)),
        "compares numbers of tokens, and in this batch",
    ),
    "the first tokens alone": (lambda: (LongTexts(20, "the first tokens"), data()), "32 > 20 of whole texts"),
    "a running sum in long texts": (
        lambda: (LongTexts(20, "a running sum"), data(4 * LENGTH)),
        "the output of layers.1.into differs by",
    ),
    "a running sum in long texts, later": (
        lambda: (LongTexts(20, "a running sum"), LongLater()),
        "compares numbers of tokens, and in this batch",
    ),
    "optimization by hand": (lambda: (Layered(by_hand=True), data()), "the Layered uses manual optimization"),
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
    "a mask of queries": (
        lambda: (Causal("llama"), texts(attention_mask=torch.ones(1, 16, 16, dtype=torch.bool).tril())),
        "an attention_mask of shape (4, 1, 16, 16) for (4, 8) tokens",
    ),
    "packed texts": (lambda: (Causal("llama"), texts(position_ids=PACKED)), "knows one text a sequence"),
    "capped scores": (lambda: (Causal("gemma2"), texts()), "changes its scores of attention (softcap)"),
    "attention in chunks of tokens": (lambda: (Causal("llama4"), texts(32)), "is neither causal nor a sliding window"),
    "queries scaled by their own positions": (
        lambda: (Causal("llama4", attention_chunk_size=64, floor_scale=20), texts(32)),
        "changes its scores of attention (attn_temperature_tuning)",
    ),
    "attention's dropout": (lambda: (Causal("llama", attention_dropout=0.1), texts()), "attention dropout to 0"),
    "a balance of experts": (
        lambda: (Causal("mixtral", output_router_logits=True), texts()),
        "adds a balance of its experts to the loss",
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
