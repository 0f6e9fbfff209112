"""Logits of which every rank has a part, against whole ones: what they answer, what they exchange, and what a loss keeps."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from kit.ranks.harness import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_ptm.memory.backend import backend_of
from lightning_ptm.parallel.exchange import RankGroup
from lightning_ptm.parallel.logits import DividedLogits, logits_of, whole
from lightning_ptm.runtime.autograd.recompute import _FirstResults

BATCH, LENGTH, VOCABULARY = 3, 5, 24
IGNORED = 7


def values(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (BATCH, LENGTH, VOCABULARY)) -> Tensor:
    return (3 * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).to(dtype)


def targets(ignored: float = 0.3) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    found = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
    return found.masked_fill(torch.rand(found.shape, generator=generator) < ignored, IGNORED)


def mean(logits: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCABULARY), targets().flatten(), ignore_index=IGNORED, **options)


def causal(logits: Tensor) -> Tensor:
    """Returns the loss of Transformers' ForCausalLMLoss."""
    logits = logits.float()
    labels = F.pad(targets(), (0, 1), value=-100)[..., 1:].contiguous()
    loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1).to(logits.device), reduction="sum")
    return loss / torch.tensor(7.0)


def cropped(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().flatten(0, 1), targets()[:, 1:].flatten())


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "sum": lambda x: mean(x, reduction="sum"),
    "of each": lambda x: mean(x, reduction="none").square().sum(),
    "smoothed": lambda x: mean(x, label_smoothing=0.1),
    "smoothed, of each": lambda x: mean(x, label_smoothing=0.2, reduction="none").square().sum(),
    "causal": causal,
    "cropped": cropped,
    "by sequence": lambda x: F.cross_entropy(x.transpose(1, 2), targets(), reduction="none").mean(1).square().sum(),
    "of a module": lambda x: nn.CrossEntropyLoss(ignore_index=IGNORED)(x.flatten(0, 1), targets().flatten()),
    "of one": lambda x: F.cross_entropy(x[0, 1], targets()[0, 1]),
    "of chosen rows": lambda x: F.cross_entropy(x[targets() > 5], targets()[targets() > 5]),
    "capped": lambda x: mean(torch.tanh(x / 3) * 2.5),
    "of two": lambda x: mean(x) + cropped(2 * x),
    "all ignored": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((BATCH * LENGTH,), -100), reduction="sum"),
}
"""That exchange a few numbers a row."""

WHOLE: dict[str, Callable[[Tensor], Any]] = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "items": lambda x: (x[..., 3], x[0, 1, 2].item(), x[..., ::2], x[1:, :, 4:9]),
    "comparison": lambda x: x == x.max(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy().copy()),
    "list": lambda x: x.tolist(),
    "copy": lambda x: copy.deepcopy(x.detach()),
    "pickle": lambda x: pickle.loads(pickle.dumps(x.detach())),
    "file": lambda x: saved(x.detach()),
    "joined": lambda x: torch.cat([x, x.view(BATCH, LENGTH, -1)], 1),
    "view of all": lambda x: x.view(-1),
    "reshaped over the vocabulary": lambda x: x.reshape(-1, VOCABULARY // 2),
    "cast": lambda x: (x.float().logsumexp(-1), x.bfloat16().sum(-1), x.to("cpu", torch.float16).exp()),
    "iteration": lambda x: [each.sum() for each in x],
    "transposed": lambda x: (x.transpose(1, 2).contiguous(), x.permute(2, 0, 1).float(), x.mT),
    "negative ends": lambda x: (x[:, -1], x[..., -2:, :], x[None, ..., 1:3, :]),
    "matmul": lambda x: F.linear(x, torch.eye(VOCABULARY, dtype=x.dtype)),
    "bounds": lambda x: x.clamp(min=-1).topk(3).values,
    "probability targets": lambda x: F.cross_entropy(x.flatten(0, 1), values().flatten(0, 1).softmax(-1)),
    "weights of classes": lambda x: F.cross_entropy(
        x.flatten(0, 1), targets().flatten(), weight=torch.arange(VOCABULARY, dtype=x.dtype)
    ),
    "log_softmax and nll_loss": lambda x: F.nll_loss(x.flatten(0, 1).log_softmax(-1), targets().flatten()),
    "written to": lambda x: written_to(x.clone()),
    "past the protocol": lambda x: past_the_protocol(x),
    "function": lambda x: Squares.apply(x),
}


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def written_to(x: Tensor) -> Tensor:
    flat = x.view(-1, VOCABULARY)
    x[..., 3] = -4.0
    x.mul_(0.5)
    return F.cross_entropy(flat, targets().flatten())


def past_the_protocol(x: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return x.exp()


class Squares(torch.autograd.Function):
    """Is given tensors as they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x * x).sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient * ctx.saved_tensors[0]


def make_group() -> RankGroup:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))


def parted(group: RankGroup, given: Tensor) -> tuple[Tensor, Tensor]:
    """This rank's part, a leaf, and logits of it."""
    part = given.chunk(group.size, -1)[group.index].clone().requires_grad_()
    return part, logits_of(part * 1, group)


def gathered(group: RankGroup, given: Tensor) -> tuple[Tensor, Tensor]:
    part = given.chunk(group.size, -1)[group.index].clone().requires_grad_()
    return part, group.put_together(part * 1)


def in_both_ways(group: RankGroup, ask: Callable[[Tensor], Any], given: Tensor) -> list[tuple[Any, Tensor | None]]:
    """Returns the result, and the part's gradient: of whole logits and of divided ones."""
    found = []
    for make in (gathered, parted):
        part, logits = make(group, given)
        answer = ask(logits)
        if isinstance(answer, Tensor) and answer.requires_grad:
            answer.double().square().sum().backward()
        found.append((whole(answer), part.grad))
    return found


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return run_ranks(compare_all, 2)


def compare_all() -> dict[str, Any]:
    group = make_group()
    told: dict[str, Any] = {}
    for name, loss in LOSSES.items():
        before = group.exchanges
        _, logits = parted(group, values())
        loss(logits).backward()
        told[f"exchanges: {name}"] = group.exchanges - before
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            told[f"{name} {dtype}"] = in_both_ways(group, loss, values(dtype))
    for name, ask in WHOLE.items():
        told[f"whole: {name}"] = in_both_ways(group, ask, values())
    return told


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_parts_is_that_of_whole_logits(found: list[dict[str, Any]], name: str, dtype: torch.dtype) -> None:
    rounds = torch.float32 if name == "causal" and dtype is torch.float64 else dtype  # which it computes in
    rounding = {torch.float64: 1e-14, torch.float32: 1e-5, torch.bfloat16: 2e-2}[rounds]
    for of_rank in found:
        (expected, gradient), (loss, ours) = of_rank[f"{name} {dtype}"]
        assert loss.dtype is expected.dtype
        torch.testing.assert_close(loss, expected, rtol=rounding, atol=0.0)
        torch.testing.assert_close(ours, gradient, rtol=rounding, atol=rounding * float(gradient.abs().max()))


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_exchanges_once(found: list[dict[str, Any]], name: str) -> None:
    assert [each[f"exchanges: {name}"] for each in found] == [2 if name == "of two" else 1] * 2


@pytest.mark.parametrize("name", WHOLE)
def test_everything_else_is_that_of_whole_logits_to_the_bit(found: list[dict[str, Any]], name: str) -> None:
    for of_rank in found:
        (expected, gradient), (answer, ours) = of_rank[f"whole: {name}"]
        torch.testing.assert_close(answer, expected, rtol=0, atol=0, equal_nan=True)
        assert (gradient is None) == (ours is None)
        assert gradient is None or torch.equal(ours, gradient)


def ask_of_the_graph() -> None:
    group = make_group()
    seen: list[list[Tensor]] = []
    for make in (gathered, parted):
        part, logits = make(group, values())
        of_hook: list[Tensor] = []
        logits.retain_grad()
        loss = mean(logits)
        logits.register_hook(lambda gradient, kept=of_hook: kept.append(whole(gradient)) or 2 * gradient)
        (asked,) = torch.autograd.grad(mean(logits), logits, retain_graph=True)
        of_hook.clear()
        loss.backward()
        assert logits.requires_grad and not logits.is_leaf and logits.grad_fn is not None
        seen.append([whole(asked), *of_hook, whole(logits.grad), part.grad])
    assert len(seen[0]) == 4
    for expected, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-16)


def follow_what_is_said_of_the_graph() -> None:
    group = make_group()
    seen: list[list[Any]] = []
    for make in (gathered, parted):
        part, logits = make(group, values())
        logits.retain_grad()
        mean(logits).backward()
        logits.grad = None
        kept: list[Any] = [logits.grad, part.grad]
        for write in (False, True):
            leaf = logits.detach()
            if write:
                leaf = leaf.clone()
                leaf[..., 3] = 1.0
            leaf.requires_grad = True
            (mean(leaf) + Squares.apply(leaf) + leaf.logsumexp(-1).sum()).backward()
            kept += [leaf.requires_grad, leaf.is_leaf, whole(leaf.grad)]
        teacher = logits * 2
        teacher.detach_()
        kept += [teacher.requires_grad, teacher.grad_fn, mean(teacher).requires_grad, teacher.sum()]
        seen.append([*kept, *_reentrant(make, group)])
    for expected, ours in zip(*seen, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-14, atol=1e-16)


def _reentrant(make: Callable[..., tuple[Tensor, Tensor]], group: RankGroup) -> tuple[Tensor, Tensor | None]:
    part, logits = make(group, values())
    loss = checkpoint(mean, logits, use_reentrant=True)
    loss.backward()
    return loss.detach(), part.grad


def look_without_exchanges() -> None:
    group = make_group()
    _, logits = parted(group, values())
    assert isinstance(logits, Tensor) and type(logits) is DividedLogits
    assert logits.shape == (BATCH, LENGTH, VOCABULARY) and logits.size(-1) == VOCABULARY and logits.numel() == 360
    assert logits.dtype is torch.float64 and logits.device.type == "cpu" and len(logits) == BATCH and logits.dim() == 3
    assert logits.stride() == values().stride() and logits.is_contiguous()
    assert logits.transpose(1, 2).stride() == values().transpose(1, 2).stride()
    assert f"{logits}" == repr(logits) == str(logits) and repr(logits).startswith(
        f"DividedLogits(part {group.index + 1} of 2 of the vocabulary, shape=(3, 5, 24)"
    )
    for view in (logits[:, -1], logits[None], logits.view(-1, VOCABULARY), logits.detach(), logits.float(), logits / 2):
        assert type(view) is DividedLogits
    assert group.exchanges == 0


def keep_what_is_saved() -> None:
    group = make_group()
    kept: dict[str, int] = {}
    for dtype in (torch.float32, torch.bfloat16):
        for make in (gathered, parted):
            given = values(dtype, (4, 8, 512))
            _, logits = make(group, given)
            storages: dict[int, int] = {}

            def save(tensor: Tensor, seen: dict[int, int] = storages) -> Tensor:
                seen[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
                loss = F.cross_entropy(logits.float().view(-1, 512), torch.zeros(32, dtype=torch.int64))
            loss.backward()
            kept[f"{make.__name__} {dtype}"] = sum(storages.values())
    assert kept["parted torch.float32"] <= 0.55 * kept["gathered torch.float32"], kept
    assert kept["parted torch.bfloat16"] <= 0.30 * kept["gathered torch.bfloat16"], kept


def ask_again_in_a_recomputed_forward() -> None:
    group = make_group()
    part = values().chunk(2, -1)[group.index].clone().requires_grad_()
    held = _FirstResults()

    def loss(given: Tensor) -> Tensor:
        again = torch._C._current_graph_task_id() != -1
        with held.inside(again=again):
            logits = logits_of(given * 1, group)
            return mean(logits) + logits.argmax(-1).sum()

    checkpoint(loss, part, use_reentrant=False).backward()
    assert group.exchanges == 2
    torch.testing.assert_close(part.grad, in_both_ways(group, mean, values())[1][1] / 2 / mean(values()))


def go_where_they_cannot() -> None:
    group = make_group()
    with FlopCounterMode(display=False):
        _, logits = parted(group, values())
        torch.testing.assert_close(mean(logits), mean(values()))
    compiled = torch.compile(mean, backend="eager")
    torch.testing.assert_close(compiled(parted(group, values())[1]), mean(values()))
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", torch.bfloat16):
            loss = mean(parted(group, values(dtype))[1])
            expected = mean(values(dtype))
        assert loss.dtype is expected.dtype is torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def lose_nothing_at_edges() -> None:
    group = make_group()
    _, logits = parted(group, values())
    flat = logits.flatten(0, 1)
    nothing = F.cross_entropy(flat, torch.full((15,), -100))
    nothing.backward()
    assert nothing.isnan() and F.cross_entropy(flat[:0], targets().flatten()[:0]).isnan()
    for wrong in (VOCABULARY, -3):
        for given in (flat, values().flatten(0, 1)):
            with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
                F.cross_entropy(given, torch.full((15,), wrong))
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(flat, targets().flatten()[:-1])
    masked = values().index_fill(-1, torch.arange(12), -torch.inf)  # all of one rank's
    safe = targets() % 12 + 12
    loss = F.cross_entropy(parted(group, masked)[1].flatten(0, 1), safe.flatten())
    torch.testing.assert_close(loss, F.cross_entropy(masked.flatten(0, 1), safe.flatten()), rtol=1e-15, atol=0)


BODIES = (
    ask_of_the_graph,
    follow_what_is_said_of_the_graph,
    look_without_exchanges,
    keep_what_is_saved,
    ask_again_in_a_recomputed_forward,
    go_where_they_cannot,
    lose_nothing_at_edges,
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_divided_logits(body: Callable[[], None]) -> None:
    run_ranks(body, 2)
