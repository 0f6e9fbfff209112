"""The precision plugin of angel_ptm: dtypes of parameters, master weights and inputs for each `precision` of the Trainer.

| precision | compute parameters and gradients | master states | inputs |
| --- | --- | --- | --- |
| `bf16-mixed` | bfloat16 | fp32 parameters and moments | as they are, forward under autocast |
| `16-mixed` | float16, dynamic loss scale | fp32 parameters and moments | as they are, forward under autocast |
| `bf16-true`, `16-true` | bfloat16, float16 | moments in that dtype | cast |
| `32-true` | each in its own dtype | moments in that dtype | as they are |
| `64-true` | float64 | moments in float64 | cast |

Owns the loss scale. Knows dtypes; pages belong to the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.plugins import precision as of_fabric
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric
from typing_extensions import override

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.runtime.units.parameter_guard import GuardedParameter
from lightning_ptm.torch_internals import buffers_in, marks_of_schedulers, parameters_in
from lightning_ptm.trainer.internals import note_device_and_dtype, skips_backward
from lightning_ptm.trainer.matmul_precision import wide_matmuls
from lightning_ptm.trainer.mixed_operators import promote_operators
from lightning_ptm.update.loss_scale import LossScale

if TYPE_CHECKING:
    from lightning_ptm.runtime.engine.engine import Engine

PrecisionName = Literal["bf16-mixed", "16-mixed", "bf16-true", "16-true", "32-true", "64-true"]

_DTYPES: dict[str, torch.dtype] = {
    "bf16-mixed": torch.bfloat16,
    "16-mixed": torch.float16,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
    "32-true": torch.float32,
    "64-true": torch.float64,
}

_REPLACED = (
    *(Precision, MixedPrecision, HalfPrecision, DoublePrecision),
    *(of_fabric.Precision, of_fabric.MixedPrecision, of_fabric.HalfPrecision, of_fabric.DoublePrecision),
)
"""Lightning's plugins that AngelPTMPrecision replaces."""


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionPlan:
    """The dtypes that the engine uses.

    `compute` is the dtype of compute parameters; with `mixed`, fp32 master weights are kept in addition.
    """

    compute: torch.dtype
    mixed: bool

    @property
    def default_dtype(self) -> torch.dtype | None:
        """The default dtype while modules are built or run; None: torch's own default."""
        return None if self.mixed or self.compute is torch.float32 else self.compute


class AngelPTMPrecision(Precision):
    """The precision plugin of `AngelPTMStrategy`, which replaces Lightning's plugin by it.

    Args:
        precision: the Trainer's precision.
        loss_scale: the dynamic loss scale for `16-mixed`; default: one with torch.amp.GradScaler's rules.
    """

    def __init__(self, precision: PrecisionName = "32-true", loss_scale: LossScale | None = None) -> None:
        if precision not in _DTYPES:
            raise ConfigError(f"precision={precision!r} is not supported by angel_ptm; use one of {', '.join(_DTYPES)}")
        self.precision = precision
        self.plan = PrecisionPlan(_DTYPES[precision], precision.endswith("-mixed"))
        self.loss_scale = (loss_scale or LossScale()) if precision == "16-mixed" else None
        self.wide_matmuls = False
        """Whether products of 16-bit tensors are computed in fp32 (matmul_precision.py)."""
        self.over = False
        """Whether a run has ended and parameters and optimizers are ordinary ones again, so that a user who calls Lightning's
        loops directly steps with them as usual."""
        self._engine: Engine | None = None
        self._device_type = "cpu"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_engine": None}  # a copy has no run

    @classmethod
    def replacing(cls, plugin: of_fabric.Precision) -> AngelPTMPrecision:
        """The plugin that replaces one of Lightning's plugins, a Trainer's or Fabric's, under angel_ptm."""
        if isinstance(plugin, AngelPTMPrecision):
            return plugin
        if type(plugin) not in _REPLACED:
            raise ConfigError(
                f"the precision plugin {type(plugin).__name__} keeps parameters in a form that pages cannot hold; pass "
                f"precision=... with one of {', '.join(_DTYPES)} instead"
            )
        return cls(plugin.precision, _scale_of(getattr(plugin, "scaler", None)))  # type: ignore[arg-type]

    def attach(self, engine: Engine | None, device_type: str = "cpu", *, wide_matmuls: bool = False) -> None:
        """Connects the plugin to the engine of a run, or to none."""
        self.wide_matmuls = wide_matmuls
        self.over = False
        self._engine = engine
        self._device_type = device_type

    def end_run(self, *, ordinary: bool) -> None:
        """Lets the plugin work as Lightning's own once the run has ended: backward and step no longer go to the engine.

        Args:
            ordinary: whether parameters and optimizers are ordinary ones again.
        """
        self.over = ordinary and self.loss_scale is None

    @override
    def convert_module(self, module: nn.Module) -> nn.Module:
        # As Lightning's plugins: `module.to(dtype)` in 16 bits, which converts complex tensors and metrics' states, too, and
        # `module.double()`. Guarded parameters have no values and are skipped.
        dtype = self.plan.default_dtype
        if dtype is None:
            return module
        note_device_and_dtype(module, dtype=dtype)
        halves = dtype is not torch.float64
        for owner in module.modules():
            if halves and isinstance(owner, Metric):
                owner.to(dtype=dtype)
            for name, buffer in buffers_in(owner).items():
                if buffer is not None and (buffer.is_floating_point() or (halves and buffer.is_complex())):
                    buffers_in(owner)[name] = buffer.to(dtype)
            for parameter in parameters_in(owner).values():
                if parameter is None or isinstance(parameter, GuardedParameter):
                    continue
                if parameter.is_floating_point() or (halves and parameter.is_complex()):
                    parameter.data = parameter.data.to(dtype)
        return module

    @override
    def convert_input(self, data: Any) -> Any:
        if self.plan.default_dtype is None:
            return data
        return apply_to_collection(data, function=_of_dtype, dtype=Tensor, dst_type=self.plan.default_dtype)

    @override
    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with self._dtypes(), self.products():
            yield

    def _dtypes(self) -> AbstractContextManager[Any]:
        if self.plan.mixed:
            promote_operators(self._device_type)
            return torch.autocast(self._device_type, dtype=self.plan.compute)
        return self.tensor_init_context()

    def products(self) -> AbstractContextManager[None]:
        """Context of a forward or backward, in which products of 16-bit tensors are computed as they should be."""
        return wide_matmuls() if self.wide_matmuls else nullcontext()

    @override
    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.plan.default_dtype is None else _default_dtype(self.plan.default_dtype)

    @override
    def module_init_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    @override
    def train_step_context(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.forward_context()

    @override
    def pre_backward(self, tensor: Tensor, module: LightningModule) -> Tensor:  # type: ignore[override]
        if self._engine is not None:
            self._engine.loss_is(tensor)
        if self.loss_scale is not None:
            tensor = self.loss_scale.scale(tensor)
        return super().pre_backward(tensor, module)

    @override
    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        in_pages = nullcontext() if self.over else self._running().backward(by_user=_overrides(model, "backward"))
        with in_pages, self.products():
            super().backward(tensor, model, optimizer, *args, **kwargs)

    @override
    def optimizer_step(  # type: ignore[override]
        self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        if self.over:
            return super().optimizer_step(optimizer, model, closure, **kwargs)
        engine = self._running()
        self.arm(optimizer, model, closure)
        if self.loss_scale is None:
            try:
                return super().optimizer_step(optimizer, model, closure, **kwargs)
            except BaseException as error:
                engine.explain(error, "the optimizer's step")
                raise
        # As in Lightning's plugin and GradScaler: the step is taken if the unscaled gradients are finite.
        result = closure()
        self._after_closure(model, optimizer)
        skipped_batch = model.automatic_optimization and result is None
        if not skipped_batch and engine.stepping.unscale(optimizer, self.loss_scale):
            optimizer.step(**kwargs)
        return result

    def arm(self, optimizer: Optimizer, model: LightningModule, closure: Callable[[], Any]) -> None:
        """Allows units to be updated within the backward pass of `closure`, if no hook can intervene: only for Lightning's
        own closure, not one that a user has wrapped around it."""
        # A schedule of a pipeline has several backward passes.
        once = self._running().stage_cut is None
        if (
            once
            and type(closure) is Closure
            and self._nothing_waits_for_gradients(model)
            and has_its_class_s_step(optimizer)
        ):
            self._running().stepping.arm(optimizer)

    @override
    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.over or self._running().stepping.steps_itself(optimizer):
            super().clip_grad_by_norm(optimizer, clip_val)
            return
        self._running().stepping.clip_by_norm(optimizer, float(clip_val), self.loss_scale)

    @override
    def clip_grad_by_value(self, optimizer: Optimizer, clip_val: float) -> None:
        if self.over or self._running().stepping.steps_itself(optimizer):
            super().clip_grad_by_value(optimizer, clip_val)
            return
        self._running().stepping.clip_by_value(optimizer, float(clip_val), self.loss_scale)

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.loss_scale.state_dict() if self.loss_scale is not None else {}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.loss_scale is not None:
            self.loss_scale.load_state_dict(state_dict)

    # Lightning stores a plugin's state under its class name, and looks for no other. The loss scale is also stored, and
    # looked for, under the name of Lightning's own plugin, so that it survives a change of strategy either way.

    @override
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = self.state_dict()
        if state:
            checkpoint[MixedPrecision.__qualname__] = state

    @override
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint.get(MixedPrecision.__qualname__)
        if state and type(self).__qualname__ not in checkpoint:
            self.load_state_dict(state)

    def _nothing_waits_for_gradients(self, model: LightningModule) -> bool:
        """Whether a unit may be updated before the backward pass is over: no hook reads or changes gradients between
        backward and step, and no later step finds them. The step is certain to happen if the optimizer also
        `has_its_class_s_step`."""
        trainer = model.trainer
        if not self.forgets_gradients(model) or self.loss_scale is not None or len(trainer.optimizers) != 1:
            return False
        if trainer.gradient_clip_val:
            return False
        if _overrides(model, "configure_gradient_clipping", "backward"):
            return False
        return not self.gradient_readers(model)

    @staticmethod
    def forgets_gradients(model: LightningModule) -> bool:
        """Whether Lightning always zeroes gradients between two steps; stochastic weight averaging ends with a step that
        finds those of the last one."""
        averages = any(isinstance(each, StochasticWeightAveraging) for each in model.trainer.callbacks)  # type: ignore[attr-defined]
        return model.automatic_optimization and not averages and not _overrides(model, "optimizer_zero_grad")

    @staticmethod
    def forgets_used_gradients(model: LightningModule) -> bool:
        """Whether Lightning zeroes used gradients before more are accumulated or another step uses them; not in the batch
        for which stochastic weight averaging skips the backward pass."""
        forgets = model.automatic_optimization and not _overrides(model, "optimizer_zero_grad")
        return forgets and not skips_backward(model.trainer.fit_loop)

    def steps_after_each_pass(self, model: LightningModule) -> bool:
        """Whether the optimizer uses and forgets all gradients after each pass of the loss: no step is skipped, as after an
        overflow, or left out by the module."""
        return self.loss_scale is None and self.forgets_gradients(model) and not _overrides(model, "optimizer_step")

    def transforms_gradients(self, model: LightningModule) -> bool:
        """Whether each step clips or unscales gradients; the module may clip, or not, in a hook of its own."""
        clips = model.automatic_optimization and bool(model.trainer.gradient_clip_val)
        return self.loss_scale is not None or (clips and not _overrides(model, "configure_gradient_clipping"))

    @staticmethod
    def gradient_readers(model: LightningModule, *, of_grad: bool = False) -> list[str]:
        """Class names of the module and callbacks that have a hook between backward and step.

        Args:
            of_grad: leave out classes with `asks_strategy_for_gradients = True`: they need complete gradients, as the others,
                but do not read `.grad`.
        """
        found = []
        for each in (model, *model.trainer.callbacks):  # type: ignore[attr-defined]
            if _overrides(each, "on_before_optimizer_step", "on_after_backward") and not (
                of_grad and getattr(each, "asks_strategy_for_gradients", False) is True
            ):
                found.append(type(each).__name__)
        return found

    def _running(self) -> Engine:
        if self._engine is None:
            raise UsageError(
                "the Trainer has the precision plugin AngelPTMPrecision without its strategy, so it cannot compute; use "
                "Trainer(strategy='angel_ptm', precision=...), which makes the plugin"
            )
        return self._engine


def _scale_of(scaler: torch.amp.GradScaler | None) -> LossScale | None:
    """The loss scale of a plugin's GradScaler; None: the default one."""
    if scaler is None or not scaler.is_enabled():
        return None
    return LossScale(
        scaler.get_scale(), scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
    )


def _of_dtype(tensor: Tensor, dst_type: torch.dtype) -> Tensor:
    return tensor.to(dst_type) if tensor.is_floating_point() else tensor


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def has_its_class_s_step(optimizer: Optimizer) -> bool:
    """Whether `optimizer.step` is the class's own, and not a replacement that could change gradients after the closure. The
    counting wrapper of schedulers does not count as one."""
    step = vars(optimizer).get("step", type(optimizer).step)
    while getattr(step, marks_of_schedulers()[0], False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return getattr(step, "__func__", step) is type(optimizer).step


def _overrides(thing: Any, *names: str) -> bool:
    """Whether a module or callback has one of these hooks of its own."""
    for name in names:
        method = getattr(thing, name, None)  # of the object, since LambdaCallback stores its hooks there
        if method is not None and not getattr(method, "__module__", "").startswith(_LIGHTNINGS_OWN):
            return True
    return False


_LIGHTNINGS_OWN = ("lightning.pytorch.core", "lightning.pytorch.callbacks.callback")
