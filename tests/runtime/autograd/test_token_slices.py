"""Modules on slices of their tokens: numbers, what is saved, random numbers, and what is refused."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_ptm.errors import ConfigError
from lightning_ptm.forecasting.counting import Counter, anatomy
from lightning_ptm.memory.malloc import malloc_in_use_bytes
from lightning_ptm.runtime.autograd.recompute import Recompute, once
from lightning_ptm.runtime.autograd.saved_tensors import kept_in_place
from lightning_ptm.runtime.autograd.slices import CutArguments
from lightning_ptm.runtime.autograd.slices_check import CallBytes
from lightning_ptm.runtime.autograd.token_slices import TokenCut, chosen_count, most_slices, token_slices_of
from lightning_ptm.runtime.units.discovery import Unit

SAMPLES, TOKENS, WIDTH, SLICES = 2, 9, 4, 3
CUT = TokenCut(SLICES)


BY_TRIAL = TokenCut(SLICES, by_trial=True)


def sliced(module: nn.Module, cut: TokenCut = CUT, *, whole: bool = False) -> Callable[..., Any]:
    unit = Unit(1, "mlp", module, (), ())
    return Recompute(module, lambda _: None, lambda _: dict).in_token_slices(unit, cut, lambda: whole)


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * WIDTH, WIDTH)
    return nn.Sequential(*layers).double()


def gradients(module: nn.Module, call: Callable[..., Any], x: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    result = call(x)
    (result * torch.linspace(-1, 1, result.numel(), dtype=x.dtype).view_as(result)).sum().backward()
    return [result.detach(), x.grad, *(each.grad.clone() for each in module.parameters() if each.grad is not None)]  # type: ignore[list-item]


@pytest.mark.parametrize("shape", [(SAMPLES, TOKENS, WIDTH), (TOKENS, WIDTH), (SAMPLES, TOKENS, 2, WIDTH)])
def test_results_and_gradients_are_those_of_all_tokens(shape: tuple[int, ...]) -> None:
    module, x = mlp(), torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    module[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    ours, theirs = gradients(module, sliced(module), x), gradients(module, module, x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours[0].stride() == theirs[0].stride()


class Gated(nn.Module):
    """Takes a tensor of other dimensions by keyword, and returns a tuple with a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor, *, gate: Tensor, power: int) -> tuple[Tensor, int]:
        return self.linear(x) * gate.unsqueeze(-1) ** power, power


def test_keywords_and_tuples() -> None:
    module, gate = Gated(), torch.rand(SAMPLES, TOKENS, dtype=torch.float64)
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    call = sliced(module)
    assert call(x, gate=gate, power=2)[1] == 2
    ours, theirs = (
        gradients(module, lambda x, f=forward: f(x, gate=gate, power=2)[0], x) for forward in (call, module)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_only_inputs_are_saved_for_the_backward() -> None:
    module, x = mlp(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    call = sliced(module)
    for _ in range(2):  # the second is checked, and so is not measured
        call(x)
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):  # type: ignore[func-returns-value]
        call(x)
    assert sum(each.nbytes for each in saved) == x.nbytes


def test_each_slice_draws_its_own_random_numbers_and_repeats_them() -> None:
    module, x = mlp(dropout=0.5), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)

    def by_hand(x: Tensor) -> Tensor:
        found = [module(each) for each in reversed(x.split(TOKENS // SLICES, 1))]
        return torch.cat(found[::-1], 1)

    call = sliced(module)
    results = []
    for forward in call, by_hand:
        torch.manual_seed(5)
        results.append(gradients(module, forward, x))
        results[-1].append(torch.rand(1, dtype=torch.float64))  # the generator goes on from there
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-14)


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(self.linear(x), x, x)


class Balances(Attends):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.linear(x)
        return found, found.mean()


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Attends(), "its results for a token depend on the other tokens"),
        (Balances(), r"result 1 has shape \(\), without a dimension of tokens, and depends on them"),
    ],
)
def test_modules_in_which_tokens_meet_are_refused_by_name(module: nn.Module, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"mlp \(\w+\) cannot be computed in slices of its tokens: {reason}"):
        sliced(module)(torch.randn(SAMPLES, TOKENS, WIDTH, requires_grad=True))


def test_what_is_computed_as_a_whole() -> None:
    module = Attends()
    x = torch.randn(SAMPLES, TOKENS, WIDTH)
    assert torch.equal(sliced(module, whole=True)(x), module(x))
    with torch.no_grad():
        assert torch.equal(sliced(module)(x), module(x))


def test_which_modules_are_sliced() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp(), "attention": Attends()}) for _ in range(2))
    units = [Unit(0, "", root, (), ()), *(Unit(1 + at, f"layers.{at}", root.layers[at], (), ()) for at in range(2))]
    assert token_slices_of(units, 8) == {}
    assert token_slices_of(units, {"layers.*": 2, "*.mlp": ("tokens", 4)}) == {
        "layers.0.mlp": TokenCut(4),
        "layers.1.mlp": TokenCut(4),
    }
    assert token_slices_of(units, {"*.mlp": ("tokens", 1)}) == {}
    with pytest.raises(ConfigError, match=r"each module named '\*.ffn', and there is none"):
        token_slices_of(units, {"*.ffn": ("tokens", 4)})
    with pytest.raises(ConfigError, match=r"compute layers in slices of its tokens, and it contains layers.0"):
        token_slices_of(units, {"layers": ("tokens", 4)})


def test_which_modules_are_tried() -> None:
    root = nn.Module()
    root.layers = nn.ModuleList(nn.ModuleDict({"mlp": mlp(), "attention": Attends()}) for _ in range(2))
    units = [Unit(0, "", root, (), ()), *(Unit(1 + at, f"layers.{at}", root.layers[at], (), ()) for at in range(2))]
    tried = token_slices_of(
        units, {"layers.1.*": ("tokens", 1), "layers.0.mlp": ("tokens", 4), "auto": ("tokens", "auto")}
    )
    assert tried == {
        "layers.0.mlp": TokenCut(4),
        **{name: TokenCut(None, by_trial=True) for name in ("layers.0.attention", "layers.0.attention.linear")},
    } | {
        f"layers.1.{name}": TokenCut(None, by_trial=True)
        for name in ("mlp", "mlp.0", "mlp.1", "mlp.2", "mlp.3", "attention", "attention.linear")
    }
    assert token_slices_of(units, {"auto": ("tokens", 1)}) == {}
    for layer in root.layers:
        layer.compile()
    with pytest.raises(ConfigError, match=r"torch.compile compiles layers.0 and all other units as a whole"):
        token_slices_of(units, {"auto": ("tokens", 4)})


@pytest.mark.parametrize(
    ("module", "calls"),
    [
        (mlp(), 3),
        (Attends(), 1),  # refused by the check
        (nn.Sequential(nn.Linear(WIDTH, WIDTH)), 1),  # saves its input only
    ],
    ids=["MLP", "attention", "projection"],
)
def test_modules_are_found_by_a_trial(module: nn.Module, calls: int) -> None:
    module.double()
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    call = sliced(module, BY_TRIAL)
    for _ in range(2):
        ours, theirs = (gradients(module, forward, x) for forward in (call, module))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert tokens_at_once(module, call, x) == TOKENS // calls


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1, 131072, 512), 128), ((8, 16384, 2048), 128), ((4096, 8192, 4), 8192), ((2, 512, 64), 1), ((9,), 1)],
)
def test_a_chosen_slice_has_1024_tokens_or_more(shape: tuple[int, ...], most: int) -> None:
    x = torch.empty(shape, device="meta")
    assert most_slices(CutArguments.of((x.transpose(0, 1) if x.dim() > 2 else x,), {})) == most


@pytest.mark.parametrize(
    ("saved", "weights", "most", "slices"),
    [
        (9, 0, 128, 8),  # a feed-forward with GELU: 4.5 times its input and result
        (9, 0, 5, 4),
        (9, 8, 128, 2),  # slices save less than they add to the gradients of weights
        (9, 9, 128, 1),
        (2, 0, 128, 1),
        (4.1, 0, 128, 4),
    ],
)
def test_the_number_of_slices_follows_what_is_saved(saved: float, weights: int, most: int, slices: int) -> None:
    assert chosen_count(most, CallBytes(saved, 1, 1), weights) == slices


def test_the_number_of_slices_is_equal_in_each_run_and_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_ptm.runtime.autograd.token_slices._LEAST_TOKENS", 4)
    x = torch.randn(2, 96, WIDTH, dtype=torch.float64)
    for cut in TokenCut(None), TokenCut(None, by_trial=True):
        module = mlp()
        call = sliced(module, cut)
        ours, theirs = (gradients(module, forward, x) for forward in (call, module))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        for _ in range(3):
            assert tokens_at_once(module, call, x) == 96 // 8
        assert tokens_at_once(module, call, x[:, :3]) == 3  # so short a text is not cut
        assert tokens_at_once(module, call, x[:1, :12]) == 6
    root = nn.Sequential(nn.Sequential(mlp()))
    units = [Unit(0, "", root, (), ()), Unit(1, "0", root[0], (), ())]
    planned = [Counter(anatomy(root, units), units, token_slices={"0.0": TokenCut(count)}) for count in (None, 8, 4)]
    for each in planned:
        with each.counting():
            root(x)
    chosen, eight, four = (each.works()[1] for each in planned)
    assert chosen == eight
    assert chosen.slice_bytes < four.slice_bytes


@pytest.mark.parametrize("cut", [TokenCut(None), TokenCut(None, by_trial=True)], ids=["named", "by trial"])
@pytest.mark.parametrize("first", ["one sample", "frozen"])
def test_the_number_of_slices_does_not_depend_on_earlier_calls(
    cut: TokenCut, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is resumed begins with another call."""
    monkeypatch.setattr("lightning_ptm.runtime.autograd.token_slices._LEAST_TOKENS", 4)
    x, found = torch.randn(8, 96, WIDTH, dtype=torch.float64), []
    for resumed in True, False:
        module = nn.Sequential(nn.Linear(WIDTH, 256), nn.GELU(), nn.Linear(256, WIDTH)).double()
        call = sliced(module, cut)
        if not resumed:
            module.requires_grad_(first != "frozen")
            tokens_at_once(module, call, x if first == "frozen" else x[:1])
            module.requires_grad_(True)
        found.append(tokens_at_once(module, call, x))
    assert found[0] == found[1] < 96


def test_a_module_that_is_worth_while_once_it_is_trained_is_cut_then() -> None:
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double().requires_grad_(False)
    x, call = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64), sliced(module, BY_TRIAL)
    for trained in False, True, False, True:
        module.requires_grad_(trained)
        assert tokens_at_once(module, call, x) == (TOKENS // SLICES if trained else TOKENS)


class Both(nn.Module):
    """Attention, then an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.values, self.result = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        given = self.values(self.norm(x)).unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.result(nn.functional.scaled_dot_product_attention(*given, is_causal=True).squeeze(1))
        return x + self.mlp(x)  # type: ignore[no-any-return]


class Peak(TorchDispatchMode):
    """The most bytes in use after an operation."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, malloc_in_use_bytes())
        return result


def test_with_as_many_slices_as_are_chosen_the_module_does_not_hold_the_peak() -> None:
    peaks = {}
    for count in 2, None, 32:
        torch.manual_seed(0)
        block = Both(64)
        recompute = Recompute(block, lambda _: None, lambda _: dict, kept_in_place)
        block.mlp.forward = recompute.in_token_slices(  # type: ignore[method-assign]
            Unit(-1, "mlp", block.mlp, (), ()), TokenCut(count), lambda: False
        )
        call = recompute.of(Unit(1, "block", block, (), ()), block.forward)
        for _ in range(3):  # the first two calls are checked
            x = torch.randn(32, 256, 64, requires_grad=True)
            before = malloc_in_use_bytes()
            with Peak() as peak:
                call(x).sum().backward()
        peaks[count] = peak.bytes - before
    assert peaks[None] < 1.05 * peaks[32]
    assert peaks[None] < 0.9 * peaks[2]


def test_a_hook_of_the_users_changes_the_gradient_of_all_slices_once() -> None:
    module, x = mlp(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    module[0].weight.register_hook(lambda gradient: 0.5 * gradient)  # type: ignore[index, union-attr]
    theirs, ours = gradients(module, module, x), gradients(module, sliced(module), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


class Exchanged(torch.autograd.Function):
    """Twice its input, as if another rank had as much."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return once(lambda: 2 * x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


class Divided(nn.Linear):
    """A layer whose results are exchanged."""

    def forward(self, x: Tensor) -> Tensor:
        return Exchanged.apply(super().forward(x))  # type: ignore[no-any-return]


def test_a_recomputed_unit_around_gets_no_results_that_the_check_exchanged() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(Divided(4, 4), nn.GELU())
    x = torch.randn(2, 11, 4)
    plain = gradients(block, block.forward, x)
    recompute = Recompute(block, lambda _: None, lambda _: dict, kept_in_place)
    block[0].forward = recompute.in_token_slices(Unit(-1, "0", block[0], (), ()), CUT, lambda: False)  # type: ignore[method-assign]
    call = recompute.of(Unit(1, "block", block, (), ()), block.forward)
    for ours, theirs in zip(gradients(block, call, x), plain, strict=True):
        torch.testing.assert_close(ours, theirs)


class Tied(nn.Module):
    """Multiplies by a weight that is not one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.outside = [nn.Parameter(torch.rand(WIDTH, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * self.outside[0]  # type: ignore[no-any-return]


def test_a_module_that_reads_weights_of_others_is_refused_or_not_cut() -> None:
    """They would have no gradient."""
    module, x = Tied(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"mlp \(Tied\) .* neither an argument nor a parameter of the module"):
        sliced(module)(x)
    found = []
    for forward in module, sliced(module, BY_TRIAL):
        module.outside[0].grad = None
        found.append([*gradients(module, forward, x), module.outside[0].grad])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_a_weight_of_others_that_is_trained_later_is_refused() -> None:
    module, x = Tied(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    module.outside[0].requires_grad_(False)
    call = sliced(module)
    torch.testing.assert_close(gradients(module, call, x), gradients(module, module, x), rtol=1e-12, atol=1e-14)
    for _ in range(3):  # the next call is not checked before it
        call(x)
    module.outside[0].requires_grad_()
    with pytest.raises(ConfigError, match="neither an argument nor a parameter of the module"):
        gradients(module, call, x)


@dataclasses.dataclass
class Output:
    hidden: Tensor


class Returns(nn.Module):
    """Returns an object, and multiplies by a tensor that an attribute has."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.gate: Tensor | None = None

    def forward(self, x: Tensor) -> Output:
        return Output(self.inside(x) * self.gate)


def test_a_module_that_is_not_cut_is_called_as_it_is() -> None:
    module, x = Returns(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    weight = torch.rand(WIDTH, dtype=torch.float64, requires_grad=True)
    found = []
    for forward in module, sliced(module, BY_TRIAL):
        module.gate, weight.grad = weight * 2, None
        found.append([*gradients(module, lambda x, f=forward: f(x).hidden, x), weight.grad])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def tokens_at_once(module: nn.Module, call: Callable[..., Any], x: Tensor) -> int:
    """Returns the tokens of the last call of the module's last layer in a call; earlier ones may be those of a check."""
    last, lengths = [*module.modules()][-1], list[int]()

    def forward(given: Tensor, forward: Callable[..., Tensor] = last.forward) -> Tensor:
        lengths.append(given.shape[-2])
        return forward(given)

    last.forward = forward  # type: ignore[method-assign]  # no hook, which would make another kind of calls
    with torch.enable_grad():
        call(x.clone().requires_grad_())
    del last.forward
    return lengths[-1]


def mixed(tokens: Tensor) -> Tensor:
    return tokens + tokens.mean(1, keepdim=True)


@pytest.mark.parametrize("what", ["a weight of others", "other tokens"])
def test_a_module_found_by_a_trial_is_whole_while_it_has_a_hook_that_slices_would_change(what: str) -> None:
    module, x = mlp(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    weight = torch.rand(4 * WIDTH, dtype=torch.float64, requires_grad=True)
    call = sliced(module, BY_TRIAL)
    for _ in range(3):  # no check is due before the next call
        call(x.clone().requires_grad_())
    handle = module[1].register_forward_hook(  # type: ignore[index]
        lambda layer, given, result: mixed(result) if what == "other tokens" else result * weight
    )
    found = []
    for forward in module, call:
        weight.grad = None
        found.append([*gradients(module, forward, x), weight.grad])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert tokens_at_once(module, call, x) == TOKENS
    handle.remove()
    assert tokens_at_once(module, call, x) == TOKENS // SLICES


def test_a_module_with_new_hooks_in_each_call_is_left_whole() -> None:
    module, x = mlp(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    call = sliced(module, BY_TRIAL)
    assert tokens_at_once(module, call, x) == TOKENS // SLICES
    for _ in range(64):
        handle = module[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
        call(x.clone().requires_grad_())
        handle.remove()
    assert tokens_at_once(module, call, x) == TOKENS


class Drops(nn.Module):
    """An MLP with dropout, whose tokens meet once `mixes` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp(dropout=0.5)
        self.mixes = False

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(x)
        return mixed(found) if self.mixes else found  # type: ignore[no-any-return]


@pytest.mark.parametrize("between", ["refused", "hooked"])
def test_a_unit_is_recomputed_in_the_slices_of_its_forward_whatever_a_later_trial_finds(between: str) -> None:
    """With the random numbers that these have drawn."""
    module, x = Drops(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    block = nn.Sequential(module)

    def by_hand(x: Tensor) -> Tensor:
        found = [module(each) for each in reversed(x.split(TOKENS // SLICES, 1))] if not module.mixes else [module(x)]
        return torch.cat(found[::-1], 1)

    recompute = Recompute(block, lambda _: None, lambda _: dict, kept_in_place)
    cut = recompute.in_token_slices(Unit(-1, "0", module, (), ()), BY_TRIAL, lambda: False)
    found = []
    for forward in by_hand, recompute.of(Unit(1, "block", block, (), ()), block.forward):
        if forward is not by_hand:
            module.forward = cut  # type: ignore[method-assign]
        module.zero_grad()
        torch.manual_seed(5)
        module.mixes = False
        given = [x.clone().requires_grad_() for _ in range(2)]
        first = forward(given[0])
        handle = None
        if between == "refused":
            module.mixes = True
        else:
            handle = module.inside[1].register_forward_hook(lambda *_: None)  # type: ignore[index]
        second = forward(given[1])
        first.square().sum().backward()
        second.square().sum().backward()
        if handle is not None:
            handle.remove()
        found.append([first, second, *(each.grad for each in (*given, *module.parameters()))])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("write", [lambda module: module.eval(), lambda module: setattr(module, "mixes", True)])
def test_a_slice_is_recomputed_with_the_state_that_its_module_had_in_the_forward(
    write: Callable[[Drops], None],
) -> None:
    x, found = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64), []
    for in_slices in True, False:
        module = Drops()
        call = sliced(module) if in_slices else module
        torch.manual_seed(5)
        given = x.clone().requires_grad_()
        parts = [given] if in_slices else reversed(given.split(TOKENS // SLICES, 1))
        result = torch.cat([call(each) for each in parts][::-1], 1)
        write(module)
        result.square().sum().backward()
        found.append([result, given.grad, *(each.grad for each in module.parameters())])
        assert module.mixes or not module.training  # as it was written
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


class Scaled(nn.Module):
    """An MLP whose result depends on the number of tokens."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.inside = mlp()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) * (1 + self.by * x.shape[1])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("dtype", "by"), [(torch.float64, 1e-9), (torch.float32, 2e-4)], ids=str)
def test_a_small_dependence_on_the_number_of_tokens_is_refused(dtype: torch.dtype, by: float) -> None:
    module, x = Scaled(by).to(dtype), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=dtype)
    with pytest.raises(ConfigError, match=r"mlp \(Scaled\) .* depend on"):
        sliced(module)(x)
    assert tokens_at_once(module, sliced(module, BY_TRIAL), x) == TOKENS
    module.by = 0
    assert tokens_at_once(module, sliced(module, BY_TRIAL), x) == TOKENS // SLICES


class Leaks(nn.Module):
    """An MLP whose tokens depend a little on others."""

    def __init__(self, by: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inside = mlp()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x) + self.by(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "by",
    [
        lambda x: 1e-6 * x.cumsum(1),
        lambda x: 1e-6 * x[:, :1],
        lambda x: 1e-6 * torch.cat([0 * x[:, :1], x[:, :-1]], 1),
        lambda x: 1e-6 * x.flip(1).cumsum(1).flip(1),
    ],
    ids=["earlier", "first", "previous", "later"],
)
def test_a_small_dependence_on_earlier_or_later_tokens_is_refused(
    by: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    module, x = Leaks(by).to(dtype), torch.randn(SAMPLES, TOKENS, WIDTH).to(dtype)
    with pytest.raises(ConfigError, match="have a gradient with respect to another token"):
        sliced(module)(x)
    assert tokens_at_once(module, sliced(module, BY_TRIAL), x) == TOKENS


class InFp32(nn.Module):
    """An fp64 MLP after a norm that computes in fp32, as Llama's does."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: Tensor) -> Tensor:
        found = x.float() * x.float().square().mean(-1, keepdim=True).add(1e-6).rsqrt()
        return self.inside((found @ torch.eye(WIDTH)).double())  # type: ignore[no-any-return]


def test_rounding_is_that_of_the_coarsest_dtype_in_the_module() -> None:
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    ours, theirs = (gradients(module := InFp32(), make(module), x) for make in (sliced, lambda module: module))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


class Mixes(nn.Module):
    """An MLP whose tokens meet once `mixes` is set; at first a weight of zero hides that, with `hidden`."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        self.inside = mlp()
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.0 if hidden else 1.0, dtype=torch.float64))
        self.mixes = hidden

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(x)
        return x + self.gate * (mixed(found) if self.mixes else found)  # type: ignore[no-any-return]


@pytest.mark.parametrize("hidden", [True, False])
def test_a_module_whose_tokens_meet_later_is_whole_then(hidden: bool) -> None:
    module, x = Mixes(hidden=hidden), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    call = sliced(module, BY_TRIAL)
    for _ in range(3):
        ours, theirs = gradients(module, call, x), gradients(module, module, x)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
        module.mixes = True
        with torch.no_grad():
            module.gate.add_(0.5)


class Counts(nn.Module):
    """An MLP whose result comes to depend on the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inside(x) * (1.0 if self.calls < 5 else 0.5)  # type: ignore[no-any-return]


class CountsWithGraph(Counts):
    """Counts in a buffer the calls of which a graph is recorded."""

    def __init__(self) -> None:
        super().__init__()
        del self.calls
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return self.inside(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("build", [Counts, CountsWithGraph])
def test_a_module_that_counts_its_calls_is_not_found_by_a_trial(build: type[Counts]) -> None:
    found = []
    for by_trial in True, False:
        module, x = build(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64).fill_(0.5)
        call = sliced(module, BY_TRIAL) if by_trial else module
        found.append([gradients(module, call, x) for _ in range(6)])
        assert int(module.calls) == 6
    torch.testing.assert_close(*found, rtol=0, atol=0)


class Dilated(nn.Module):
    """An MLP whose results have that of the 16th token before added, as a dilated convolution adds it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: Tensor) -> Tensor:
        found = self.inside(x)
        return found + nn.functional.pad(found, (0, 0, 16, 0))[:, : x.shape[1]]  # type: ignore[no-any-return]


def test_a_module_that_reaches_over_many_tokens_is_refused_or_not_cut() -> None:
    module, x = Dilated(), torch.randn(SAMPLES, 60, WIDTH, dtype=torch.float64)
    with pytest.raises(ConfigError, match=r"mlp \(Dilated\) .* its results for a token depend on the other tokens"):
        sliced(module)(x)
    ours, theirs = (gradients(module, forward, x) for forward in (sliced(module, BY_TRIAL), module))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize(("shape", "slices"), [((1024, 16, 32), 2), ((4096, 4, 32), 2), ((64, 256, 32), 8)])
def test_the_check_needs_no_more_memory_than_slices(shape: tuple[int, ...], slices: int) -> None:
    torch.manual_seed(0)
    module, peaks = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)), []
    call = Recompute(module, lambda _: None, lambda _: dict, kept_in_place).in_token_slices(
        Unit(1, "mlp", module, (), ()), TokenCut(slices), lambda: False
    )
    for _ in range(3):  # the first two calls are checked
        x = torch.randn(shape, requires_grad=True)
        before = malloc_in_use_bytes()
        with Peak() as peak:
            call(x).sum().backward()
        peaks.append(peak.bytes - before)
    assert max(peaks[:2]) < 1.3 * peaks[2]


class OfTexts(nn.Module):
    """Adds numbers of each text, which it holds or gets."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()
        self.numbers: Any = None

    def forward(self, x: Tensor, numbers: Any = None) -> Tensor:
        numbers = self.numbers if numbers is None else numbers
        return self.inside(x) + torch.as_tensor(numbers, dtype=x.dtype).view(len(x), 1, 1)  # type: ignore[no-any-return]


@pytest.mark.parametrize("given", ["held", "tensor", "list"])
def test_short_texts_with_numbers_of_their_own(given: str) -> None:
    """The check takes fewer texts, if that is possible."""
    module, x = OfTexts(), torch.randn(900, 6, WIDTH, dtype=torch.float64)
    numbers = torch.arange(900.0, dtype=torch.float64)
    module.numbers = numbers
    more = {"held": (), "tensor": (numbers,), "list": (numbers.tolist(),)}[given]
    forward = sliced(module)
    ours, theirs = (gradients(module, lambda x, f=f: f(x, *more), x) for f in (forward, module))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("module", [Attends(), Dilated()], ids=["all", "the 16th before"])
def test_short_texts_whose_tokens_meet_are_refused(module: nn.Module) -> None:
    with pytest.raises(ConfigError, match=r"cannot be computed in slices of its tokens"):
        sliced(module.double())(torch.randn(300, 60, WIDTH, dtype=torch.float64))


made: list[weakref.ref[Tensor]] = []


class ReturnsGated(nn.Module):
    """Returns an object; a sigmoid's node saves its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = mlp()

    def forward(self, x: Tensor) -> Output:
        found = self.inside(x).sigmoid()
        made.append(weakref.ref(found))
        return Output(found * x)


@pytest.mark.parametrize("cut", [BY_TRIAL, CUT], ids=["by trial", "named"])
def test_a_check_that_fails_leaves_no_graph(cut: TokenCut) -> None:
    module, x = ReturnsGated(), torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64)
    call = sliced(module, cut)
    made.clear()
    if cut is CUT:
        with pytest.raises(ConfigError, match=r"it returns a Output, whose tensors slices cannot put together"):
            call(x)
    else:
        assert call(x).hidden.shape == x.shape
    gc.collect()
    assert made
    assert [each for each in made if each() is not None] == []


class OnlyOthers(nn.Module):
    """Returns tokens without a graph, and a number with one that has no dimension of tokens."""

    def __init__(self, *, of_tokens: bool) -> None:
        super().__init__()
        self.inside = mlp()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.of_tokens = of_tokens

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.inside(x).detach(), (0 * x).sum() if self.of_tokens else self.scale * 2


def test_results_with_a_graph_may_all_be_without_a_dimension_of_tokens() -> None:
    x = torch.randn(SAMPLES, TOKENS, WIDTH, dtype=torch.float64, requires_grad=True)
    for cut in CUT, BY_TRIAL:
        module = OnlyOthers(of_tokens=False)
        torch.testing.assert_close(sliced(module, cut)(x), module(x), rtol=1e-12, atol=1e-14)
    with pytest.raises(ConfigError, match="a result without a dimension of tokens is computed from them"):
        sliced(OnlyOthers(of_tokens=True))(x)
    whole = OnlyOthers(of_tokens=True)
    torch.testing.assert_close(sliced(whole, BY_TRIAL)(x), whole(x), rtol=0, atol=0)
