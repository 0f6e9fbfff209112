"""Optimizers of our own, each with one property that pages must not get wrong. Small, and written for the tests alone."""

from __future__ import annotations

import math
import random
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer


class ByParameter(Optimizer):
    """Plain descent; a subclass changes the step of one parameter."""

    def __init__(self, params: Any, lr: float = 0.05, **more: Any) -> None:
        super().__init__(params, {"lr": lr, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.before()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.one(p, p.grad, group)
        return loss

    def before(self) -> None:
        """Once a step."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])


# -- to be refused ----------------------------------------------------------------------------------------------------


class Projected(ByParameter):
    """Takes the radial part off a step that is nearly orthogonal to the weights, as AdamP does."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        move = g
        if p.dim() > 1:
            rows, along = g.reshape(len(g), -1), p.reshape(len(p), -1)
            if torch.cosine_similarity(rows, along, dim=1).abs().max() < 0.1 / math.sqrt(rows.shape[1]):
                move = (g.reshape(-1) - p.reshape(-1) * 1e-3).reshape(p.shape)
        p.sub_(move, alpha=group["lr"])


class Factored(ByParameter):
    """Rows of a second moment instead of all of it, for large matrices only."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        if p.dim() == 2 and min(p.shape) >= 128:
            rows = state.setdefault("rows", torch.zeros(p.shape[0], 1))
            p.sub_(g / (rows.add_(g.square().mean(1, keepdim=True)).sqrt() + 1e-6), alpha=group["lr"])
        else:
            whole = state.setdefault("whole", torch.zeros_like(p))
            p.sub_(g / (whole.addcmul_(g, g).sqrt() + 1e-6), alpha=group["lr"])


class Filters(ByParameter):
    """Centres the gradients of convolutions."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g - g.mean((1, 2, 3), keepdim=True) if p.dim() == 4 else g, alpha=group["lr"])


class NoDecayOfVectors(ByParameter):
    """Tells weights from biases by their dimensions."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.mul_(0.99 if p.dim() > 1 else 1.0).sub_(g, alpha=group["lr"])


class ClipsByItself(ByParameter):
    """Divides all gradients by their norm when that is large."""

    scale = 1.0

    def before(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for g in gradients:
            g.div_(norm.clamp(min=100.0) / 100.0)


class OfGroups(ByParameter):
    """A group follows the one before it."""

    def before(self) -> None:
        sums = [sum(float(p.grad.sum()) for p in group["params"] if p.grad is not None) for group in self.param_groups]
        self.param_groups[-1]["lr_scale"] = 0.5 if sums[0] > 0 else 1.0

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * group.get("lr_scale", 1.0))


class CountsOnClass(ByParameter):
    """Optimizer whose rate falls with the number of steps that all objects of the class have taken."""

    steps: ClassVar[int] = 0

    def before(self) -> None:
        type(self).steps += 1

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / type(self).steps)


CALLS = {"steps": 0}


class CountsInModule(ByParameter):
    """Optimizer that counts its steps in a dictionary of its module."""

    def before(self) -> None:
        CALLS["steps"] += 1

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / CALLS["steps"])


class Noisy(ByParameter):
    """Rounds at random."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g + torch.rand_like(g) * 1e-6, alpha=group["lr"])


class NoisyInPython(ByParameter):
    """Skips a step now and then."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] * random.random())


class SkipsEmpty(ByParameter):
    """Leaves a parameter without any gradient alone, moments and all."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if bool(g.any()):
            p.mul_(0.99).sub_(g, alpha=group["lr"])


class SkipsBroken(ByParameter):
    """Leaves a parameter alone whose gradient is not finite."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        if bool(g.isfinite().all()):
            p.sub_(g, alpha=group["lr"])


class EveryFifth(ByParameter):
    """Every fifth step is scaled by a norm."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        p.sub_(g / (1.0 + g.norm()) if state["step"] % 11 == 0 else g, alpha=group["lr"])


class Quantized(ByParameter):
    """Keeps large moments in blocks with a common scale, as 8-bit optimizers do."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        moment = self.state[p].setdefault("moment", torch.zeros_like(p))
        moment.lerp_(g, 0.1)
        if p.numel() >= 4096:
            scale = moment.abs().max().clamp(min=1e-12) / 127
            moment.copy_((moment / scale).round() * scale)
        p.sub_(moment, alpha=group["lr"])


class WithLoss(ByParameter):
    """Scales its step by the loss."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure() if closure is not None else torch.ones(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * loss.detach(), alpha=group["lr"])
        return loss


class Sharpness(ByParameter):
    """Evaluates the model at weights a little uphill."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        moved = [p for group in self.param_groups for p in group["params"]]
        for p in moved:
            p.add_(1e-3)
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(1e-3).sub_(p.grad, alpha=group["lr"])
        return loss


class Switched(ByParameter):
    """Has weights for training and others for evaluation."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


class Ahead(Optimizer):
    """Wraps another optimizer."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


class OfAList(torch.optim.SGD):
    """Keeps a list of the parameters, and wants a closure, as Lightning has one for it."""

    def __init__(self, params: Any) -> None:
        self.all = list(params)
        super().__init__(self.all, lr=0.1)

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class OfTheModel(ByParameter):
    """Reaches weights by the model."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model.parameters())
        self.model = model


class Marked(ByParameter):
    """Leaves parameters that carry a mark without decay."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.mul_(1.0 if getattr(p, "no_decay", False) else 0.9).sub_(g, alpha=group["lr"])


class NormedDecay(ByParameter):
    """Element-wise without decay; with it the step follows a norm, as LARS does."""

    def __init__(self, params: Any, lr: float = 0.05, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay=weight_decay)

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g * p.norm() if group["weight_decay"] else g, alpha=group["lr"])


class OwnRate(ByParameter):
    """Warms its learning rate up by itself."""

    def before(self) -> None:
        for group in self.param_groups:
            group["lr"] = min(group["lr"] * 1.5, 0.1)


class KeepsStateOfNoParameter(ByParameter):
    """Counts in its state, for no parameter."""

    def before(self) -> None:
        state: Any = self.state
        state["steps"] = state.get("steps", 0) + 1

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state: Any = self.state
        p.sub_(g, alpha=group["lr"] / state["steps"])


class LateState(ByParameter):
    """Makes a state in its third step."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 3:
            state["slow"] = p.clone()
        if "slow" in state:
            p.lerp_(state["slow"].lerp_(p, 0.5), 0.5)
        p.sub_(g, alpha=group["lr"])


# -- to be right ------------------------------------------------------------------------------------------------------


class GroupStep(ByParameter):
    """Counts in a key of the group that its first step makes, and makes states then, as pytorch_optimizer's classes do."""

    def before(self) -> None:
        for group in self.param_groups:
            if "step" not in group:
                group["step"] = 0
                for p in group["params"]:
                    self.state[p].update(moment=torch.zeros_like(p), weight=0.0)
            group["step"] += 1

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["weight"] = 0.9 * state["weight"] + 1.0
        state["moment"].lerp_(g, 0.1)
        p.sub_(state["moment"], alpha=group["lr"] / (1 - 0.9 ** group["step"]) / state["weight"])


class Remembers(ByParameter):
    """Keeps what it has computed for a step in a list that all groups share, as torch_optimizer's RAdam does."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr, buffer=[[None, None] for _ in range(10)])

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        known = group["buffer"][state["step"] % 10]
        if known[0] != state["step"]:
            known[0], known[1] = state["step"], group["lr"] / (1 - 0.5 ** state["step"])
        p.sub_(g, alpha=known[1])


class OnObject(ByParameter):
    """Has settings on the object, that its defaults do not tell."""

    def __init__(self, params: Any, lr: float = 0.05, *, sign: bool = False) -> None:
        super().__init__(params, lr)
        self.sign = sign
        self.rule = self.by_sign if sign else self.by_value

    def by_sign(self, g: Tensor) -> Tensor:
        return g.sign()

    def by_value(self, g: Tensor) -> Tensor:
        return g

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(self.rule(g), alpha=group["lr"])


class NewTensors(ByParameter):
    """Gives a parameter another tensor in every step, and a state, too."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        state = self.state[p]
        state["moment"] = state["moment"] * 0.9 + g if "moment" in state else g.clone()
        p.data = p.data - group["lr"] * state["moment"]


class ScratchGradient(ByParameter):
    """Adds its decay to the gradient itself."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(g.add_(p, alpha=0.1).neg_(), alpha=-group["lr"])


class LastGradient(ByParameter):
    """Keeps the very tensor of the last gradient."""

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        last = self.state[p].get("last")
        p.sub_(g if last is None else g * 1.5 - last * 0.5, alpha=group["lr"])
        self.state[p]["last"] = g


class WantsClosure(ByParameter):
    """Insists on a closure, which it calls once."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Logs(AdamW):
    """torch's AdamW, with a counter and a list of its steps on the object, and a cache on the class."""

    cache: ClassVar[dict[str, str]] = {}

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, **settings)
        self.own = 0
        self.log: list[int] = []

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.cache.setdefault("name", type(self).__name__)
        self.own += 1
        self.log.append(self.own)
        return super().step(closure)


SEEN: list[str] = []


class LogsInModule(AdamW):
    """torch's AdamW, with a list of its steps in the module."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        SEEN.append("step")
        return super().step(closure)


class LogsOnClass(AdamW):
    """torch's AdamW, with a list of its steps on the class, which the first one makes."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        cls: Any = type(self)
        cls.log = [*getattr(cls, "log", ()), "step"]
        return super().step(closure)


def logs_in_a_closure(params: Any) -> AdamW:
    """torch's AdamW, with a count of its steps in the function that makes its class."""
    count = 0

    class Logged(AdamW):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            nonlocal count
            count += 1
            return super().step(closure)

        def counted(self) -> int:
            return count

    return Logged(params)


class WithFunction(ByParameter):
    """Has a function that acts on the object."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, lr)
        self.rule = lambda p, g: self.state[p].setdefault("moment", torch.zeros_like(p)).lerp_(g, 0.1)

    def one(self, p: Tensor, g: Tensor, group: dict[str, Any]) -> None:
        p.sub_(self.rule(p, g), alpha=group["lr"])


class Named(SGD):
    """Optimizer with torch's class name and another formula."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.999)
        return loss


Named.__name__ = Named.__qualname__ = "SGD"
