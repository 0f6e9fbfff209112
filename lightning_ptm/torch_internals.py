"""The private names of torch, and of libraries on it other than Lightning, that this package uses; no other file uses any.

Each is fetched once: when this file is imported or, where that would import much of torch (torch._dynamo), at first use. A
name that the installed version lacks raises a ConfigError with that version and the tested ones, so that a patch, read or
comparison never fails silently. Lightning's private names are in trainer/internals.py. Owns nothing.

`tests/test_private_names.py` checks each of these names, and searches other files for private names.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from importlib import metadata
from operator import attrgetter, methodcaller
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # a base class, of which mypy must know

from lightning_ptm.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def private(owner: Any, path: str) -> Any:
    """The value of a private name of a module, a class or an object.

    Args:
        owner: a string is the name of a module, which is imported.
        path: attribute names, joined by dots.

    Raises:
        ConfigError: the installed version has no such name.
    """
    try:
        found = importlib.import_module(owner) if isinstance(owner, str) else owner
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise _missing(owner, path) from error
    return found


def reader(owner: Any, name: str) -> Callable[[Any], Any]:
    """A function that reads a private attribute of objects like `owner`, or of this class. Raises as `private`."""
    checked(owner, name)
    return attrgetter(name)


def writer(owner: Any, name: str) -> Callable[[Any, Any], None]:
    """A function that assigns to such an attribute. Raises as `private`."""
    checked(owner, name)

    def write(written: Any, value: Any) -> None:
        setattr(written, name, value)

    return write


def checked(owner: Any, *names: str) -> tuple[str, ...]:
    """The names themselves, for code that needs them as text, to override or replace a method. Raises as `private`."""
    for name in names:
        if not _is_assigned(owner, name):
            private(owner, name)
    return names


def _is_assigned(owner: Any, name: str) -> bool:
    """Whether a class's `__init__` gives its objects an attribute of this name."""
    if not isinstance(owner, type):
        return False
    makers = (inspect.unwrap(vars(each)["__init__"]) for each in owner.__mro__ if "__init__" in vars(each))
    return any(name in maker.__code__.co_names for maker in makers if inspect.isfunction(maker))


def _missing(owner: Any, path: str) -> ConfigError:
    place = owner if isinstance(owner, str) else _name_of(owner)
    package = place.partition(".")[0]
    package = {"lightning_fabric": "pytorch-lightning"}.get(package, package).replace("_", "-")  # as it is installed
    tested = next((each for each in _requirements() if re.match(rf"{package}(?![\w-])", each)), package)
    return ConfigError(
        f"{package} {metadata.version(package)} has no {place}.{path}, a private name that lightning_ptm uses, so it cannot "
        f'run with this version; install one that it is tested with: pip install "{tested}"'
    )


def _name_of(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    named = owner if isinstance(owner, (type, FunctionType, MethodType)) else type(owner)
    return f"{named.__module__}.{named.__qualname__}"


def _requirements() -> list[str]:
    """The package's requirements, without environment markers."""
    try:
        return [each.partition(";")[0].strip() for each in metadata.requires("lightning-ptm") or ()]
    except metadata.PackageNotFoundError:  # not installed, but on Python's path
        return []


# -- tensors and storages ---------------------------------------------------------------------------------------------

version_of: Callable[[Tensor], int] = reader(Tensor, "_version")
"""Returns how often a tensor was written to in place."""
base_of: Callable[[Tensor], Tensor | None] = reader(Tensor, "_base")
"""The tensor that a view is a view of, for autograd."""
hooks_of: Callable[[Tensor], dict[int, Any] | None] = reader(Tensor, "_backward_hooks")
put_hooks: Callable[[Tensor, Any], None] = writer(Tensor, "_backward_hooks")
accumulation_hooks_of: Callable[[Tensor], dict[int, Any] | None] = reader(Tensor, "_post_accumulate_grad_hooks")
put_accumulation_hooks: Callable[[Tensor, Any], None] = writer(Tensor, "_post_accumulate_grad_hooks")
sparse_indices: Callable[[Tensor], Tensor] = private(Tensor, "_indices")
"""Indices of a sparse tensor, which need not be coalesced."""
sparse_values: Callable[[Tensor], Tensor] = private(Tensor, "_values")
make_subclass: Callable[..., Any] = private(Tensor, "_make_subclass")
make_wrapper_subclass: Callable[..., Any] = private(Tensor, "_make_wrapper_subclass")
negated_view: Callable[[Tensor], Tensor] = private(torch, "_neg_view")
can_share_data: Callable[[Tensor, Tensor], bool] = private(torch, "_has_compatible_shallow_copy_type")
"""Whether `first.data = second` works."""
swap_tensors: Callable[[Tensor, Tensor], None] = private(torch, "_C._swap_tensor_impl")
"""Exchanges the tensors of two Python objects; torch.utils.swap_tensors exchanges the objects' attributes, too."""
is_alias: Callable[[Tensor, Tensor], bool] = private(torch, "_C._is_alias_of")
has_storage: Callable[[Tensor], bool] = private(torch, "_C._has_storage")
is_zeros_without_memory: Callable[[Tensor], bool] = private(Tensor, "_is_zerotensor")
storage_id: Callable[[torch.UntypedStorage], int] = reader(torch.UntypedStorage, "_cdata")
"""The address of the storage object (not of its bytes), by which torch identifies it."""
storage_references: Callable[[int], int] = private(torch, "_C._storage_Use_Count")
"""The reference count of the storage with a `storage_id`."""
offset_in_checkpoint: Callable[[Any], Any] = reader(torch.UntypedStorage, "_checkpoint_offset")
"""The file offset of bytes that torch.load has not read."""
no_torch_function: Any = private(torch, "_C._disabled_torch_function_impl")
"""The `__torch_function__` of a tensor class without overrides."""
WithoutDispatch: type[Any] = private(torch, "_C._DisableTorchDispatch")
"""Context in which dispatch modes and tensor classes get no operators."""
foreach_norm: Callable[..., tuple[Tensor, ...]] = private(torch, "_foreach_norm")
group_by_device_and_dtype: Callable[..., Any] = private(
    "torch.utils._foreach_utils", "_group_tensors_by_device_and_dtype"
)
parse_to: Callable[..., Any] = private(torch, "_C._nn._parse_to")
"""The arguments of `Tensor.to`, in order."""
is_fake: Callable[[Any], bool] = private("torch._subclasses.fake_tensor", "is_fake")
is_wrapper: Callable[[Any], bool] = private("torch.utils._python_dispatch", "is_traceable_wrapper_subclass")
"""Whether a tensor is a wrapper of others, which its `__tensor_flatten__` lists."""

tree_leaves: Callable[[Any], list[Any]] = private("torch.utils._pytree", "tree_leaves")
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = private("torch.utils._pytree", "tree_flatten")
tree_unflatten: Callable[[Any, Any], Any] = private("torch.utils._pytree", "tree_unflatten")
tree_map: Callable[[Callable[[Any], Any], Any], Any] = private("torch.utils._pytree", "tree_map")
tree_map_only: Callable[..., Any] = private("torch.utils._pytree", "tree_map_only")

# -- autograd ---------------------------------------------------------------------------------------------------------

graph_task: Callable[[], int] = private(torch, "_C._current_graph_task_id")
"""Id of this thread's current backward pass; -1: none."""
is_executed: Callable[[Any], bool] = private(torch, "_C._will_engine_execute_node")
"""Whether the backward pass in progress executes a node."""


def is_reached(node: Any) -> bool:
    """Whether the backward pass in progress computes the gradient of a tensor with this node (`get_gradient_edge`)."""
    try:
        return is_executed(node)
    except RuntimeError:
        return True  # torch raises for a leaf, and only for one whose gradient autograd.grad returns


nodes_made: Callable[[], int] = private(torch, "_C._autograd._get_sequence_nr")
"""Returns how many autograd nodes this thread has made so far."""
number_of_node: Callable[[Any], int] = methodcaller(checked(torch.autograd.Function, "_sequence_nr")[0])


@cache
def node_numbering() -> Callable[[Any, int], None]:
    """A function that sets a node's sequence number: of the nodes that are ready, a backward pass executes the one with the
    highest number."""
    (name,) = checked(torch.autograd.Function, "_set_sequence_nr")
    return lambda node, number: getattr(node, name)(number)


saving_hooks: Callable[[bool], tuple[Any, Any] | None] = private(torch, "_C._autograd._top_saved_tensors_default_hooks")
"""The pair (pack, unpack) of saved-tensor hooks in force."""
at_end_of_backward: Callable[[Callable[[], object]], None] = private(
    torch.autograd.Variable, "_execution_engine.queue_callback"
)
"""Calls a function at the end of the backward pass in progress."""
transform_level: Callable[[], int | None] = private(torch, "_C._functorch.maybe_current_level")
"""Nesting depth of torch.func transforms; None: outside of any."""
transforms: Callable[[], Any] = private(torch, "_C._functorch.get_interpreter_stack")
TransformType: Any = private(torch, "_C._functorch.TransformType")
is_wrapped_by_transform: Callable[[Tensor], bool] = private(torch, "_C._functorch.is_functorch_wrapped_tensor")
unwrapped: Callable[[Tensor], Tensor] = private(torch, "_C._functorch.get_unwrapped")
comparisons_of_recomputed: dict[str, Any] = private("torch.utils.checkpoint", "_allowed_determinism_checks_to_fns")
"""Metadata comparisons of torch.utils.checkpoint, by the names that `determinism_check` takes."""
RecomputationHook: type[Any] = private("torch.utils.checkpoint", "_recomputation_hook")

# -- operators --------------------------------------------------------------------------------------------------------

_an_operator = torch.ops.aten.mm.default

OpOverload: type[Any] = private("torch._ops", "OpOverload")
HigherOrderOperator: type[Any] = private("torch._ops", "HigherOrderOperator")
schema_of: Callable[[Any], Any] = reader(_an_operator, "_schema")
packet_of: Callable[[Any], Any] = reader(_an_operator, "_overloadpacket")
"""The operator that an overload belongs to."""
can_decompose: Callable[[Any], bool] = methodcaller(checked(_an_operator, "_can_decompose")[0])
modes_of_thread: Callable[[], list[Any]] = private("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack")
number_of_modes: Callable[[], int] = private(torch, "_C._len_torch_dispatch_stack")
without_modes: Callable[[], Any] = private("torch.utils._python_dispatch", "_disable_current_modes")
dispatch_key_of_device: Callable[[str], str] = private(torch, "_C._dispatch_key_for_device")
keys_behind: Callable[[Any], Any] = private(torch, "_C._dispatch_keyset_full_after")
"""The dispatch keys after a given one."""
close_library: Callable[[torch.library.Library], None] = private(torch.library.Library, "_destroy")

scaled_attention: Any = private(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu.default")
scaled_attention_backward: Any = private(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward.default")
PRODUCTS: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in checked(
        torch.ops.aten,
        "_addmm_activation",
        "_grouped_mm",
        "_native_multi_head_attention",
        "_transformer_encoder_layer_fwd",
    )
)
"""Further operators that are matrix products, with other computation fused in."""
SOFTMAX_NAMES = checked(torch.ops.aten, "_softmax", "_log_softmax")
VIEW_NAMES = checked(torch.ops.aten, "_unsafe_view", "_reshape_alias")
"""Operators that return views, although the first one's schema does not say so."""
GATHER_NAME, SCATTER_NAME = checked(torch.ops.c10d, "_allgather_base_", "_reduce_scatter_base_")
"""The operators of all_gather_into_tensor and reduce_scatter_tensor."""


def has_arithmetic(name: str) -> bool:
    """Whether oneDNN, which this torch must have, supports this processor's 16-bit arithmetic; `name` is "bf16" or "fp16"."""
    return bool(private(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported")())


# -- modules ----------------------------------------------------------------------------------------------------------

_a_module = nn.Module()

parameters_in: Callable[[nn.Module], dict[str, nn.Parameter | None]] = reader(_a_module, "_parameters")
"""The dict of a module's own parameters; entries put there are registered without a check."""
buffers_in: Callable[[nn.Module], dict[str, Tensor | None]] = reader(_a_module, "_buffers")
children_in: Callable[[nn.Module], dict[str, Any]] = reader(_a_module, "_modules")
unsaved_buffers_in: Callable[[nn.Module], set[str]] = reader(_a_module, "_non_persistent_buffers_set")
CONTENTS_OF_MODULE = checked(
    _a_module,
    "_parameters",
    "_buffers",
    "_modules",
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
"""The attributes of a module that its `state_dict` is made from."""
apply_of: Callable[[Any], Callable[..., Any]] = reader(nn.Module, "_apply")
"""The method by which a module moves or casts its parameters and buffers."""
forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = reader(_a_module, "_forward_hooks")
"""Hooks that get a module's output."""
_hooks_in: list[Callable[[nn.Module], dict[int, Any]]] = [
    forward_hooks_of,
    reader(_a_module, "_forward_pre_hooks"),
    reader(_a_module, "_backward_hooks"),
    reader(_a_module, "_backward_pre_hooks"),
]


def hooks_of_module(module: nn.Module) -> list[int]:
    """Returns the numbers of the hooks on calls of a module and on their backward; no two hooks have one."""
    return [number for hooks in _hooks_in for number in hooks(module)]


compiled_call_of: Callable[[nn.Module], Any] = reader(_a_module, "_compiled_call_impl")
"""The function made by `module.compile()`; None: not compiled."""
put_compiled_call: Callable[[nn.Module, Any], None] = writer(_a_module, "_compiled_call_impl")
PARAMETERS, CALL, COMPILED_CALL = checked(_a_module, "_parameters", "_call_impl", "_compiled_call_impl")
(RESET_PARAMETERS,) = checked(nn.MultiheadAttention, "_reset_parameters")
"""The name of MultiheadAttention's method for what other modules call `reset_parameters`."""
(PUT_ON,) = checked("torch.nn.utils.parametrize", "_maybe_set")
"""The function of torch.nn.utils.parametrize that assigns data to a parametrized parameter."""
BatchNorm: type[nn.Module] = private("torch.nn.modules.batchnorm", "_BatchNorm")
IncompatibleKeys: Any = private("torch.nn.modules.module", "_IncompatibleKeys")
fill_flat_weights: Callable[[nn.RNNBase], None] = private(nn.RNNBase, "_init_flat_weights")


@cache
def flat_weight_names() -> tuple[str, str]:
    """Attribute names of recurrent layers: the list of their parameters, and weak references to them."""
    weights, references = checked(nn.RNN(1, 1, device="meta"), "_flat_weights", "_flat_weight_refs")
    return weights, references


log_softmax_backward: Callable[..., Tensor] = private(torch, "_log_softmax_backward_data")
"""The gradient of log_softmax's input, from that of its result, the result, a dimension and the input's dtype."""


@cache
def ignored_by_ddp() -> str:
    """The attribute of a module with the names of the parameters and buffers that DistributedDataParallel ignores."""
    marked = nn.Module()
    private(DistributedDataParallel, "_set_params_and_buffers_to_ignore_for_model")(marked, ())
    return checked(marked, "_ddp_params_and_buffers_to_ignore")[0]


# -- optimizers -------------------------------------------------------------------------------------------------------

_an_optimizer = optim.SGD.__new__(optim.SGD)
optim.Optimizer.__setstate__(_an_optimizer, {"defaults": {}, "param_groups": []})

OPTIMIZER_HOOKS = checked(
    _an_optimizer,
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
hooks_before_step: Callable[[optim.Optimizer], OrderedDict[int, Any]] = reader(
    _an_optimizer, "_optimizer_step_pre_hooks"
)
hooks_after_step: Callable[[optim.Optimizer], OrderedDict[int, Any]] = reader(
    _an_optimizer, "_optimizer_step_post_hooks"
)
devices_of_fused_steps: Callable[[], list[str]] = private(
    "torch.utils._foreach_utils", "_get_fused_kernels_supported_devices"
)
devices_of_captured_steps: Callable[[], list[str]] = private(
    "torch.optim.optimizer", "_get_capturable_supported_devices"
)


@cache
def marks_of_schedulers() -> tuple[str, str]:
    """Attributes that learning rate schedulers set: on their wrapper of an optimizer's `step`, and on the optimizer once that
    was called."""
    optimizer = optim.SGD([torch.zeros(1)])
    optimizer.step = MethodType(lambda optimizer: None, optimizer)  # type: ignore[method-assign]
    optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0)
    optimizer.step()
    (around,) = checked(optimizer.step, "_wrapped_by_lr_sched")
    (called,) = checked(optimizer, "_opt_called")
    return around, called


# -- ranks ------------------------------------------------------------------------------------------------------------

AllgatherOptions: type[Any] = private("torch._C._distributed_c10d", "AllgatherOptions")
BroadcastOptions: type[Any] = private("torch._C._distributed_c10d", "BroadcastOptions")
backend_of_group: Callable[[dist.ProcessGroup, torch.device], Any] = private(dist.ProcessGroup, "_get_backend")
gather_by_backend: Callable[[Any, Tensor, Tensor, Any], dist.Work] = private(
    "torch._C._distributed_c10d", "Backend._allgather_base"
)
broadcast_by_backend: Callable[[Any, list[Tensor], Any], dist.Work] = private(
    "torch._C._distributed_c10d", "Backend.broadcast"
)
default_store: Callable[[], Any] = private("torch.distributed.distributed_c10d", "_get_default_store")
_MAKES_GROUPS: ModuleType = importlib.import_module("torch.distributed.distributed_c10d")
(_GLOO_GROUP,) = checked(_MAKES_GROUPS, "ProcessGroupGloo")
_gloo_group: type[Any] = getattr(_MAKES_GROUPS, _GLOO_GROUP)
_gloo_options: Callable[[], Any] = private("torch._C._distributed_c10d", "ProcessGroupGloo._Options")
_put_devices: Callable[[Any, list[Any]], None] = writer(_gloo_options, "_devices")
_put_threads: Callable[[Any, int], None] = writer(_gloo_options, "_threads")
_put_timeout: Callable[[Any, timedelta], None] = writer(_gloo_options, "_timeout")


class _OnDevices(_gloo_group):
    """A group of gloo as torch makes it, but for its devices."""

    devices: ClassVar[list[Any]] = []
    """The devices of groups that are created inside `gloo_groups_on`."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = _gloo_options()
        _put_devices(options, self.devices)
        _put_threads(options, 2 * len(self.devices))
        _put_timeout(options, timeout)
        super().__init__(store, rank, size, options)


def gloo_devices() -> list[Any]:
    """Returns new devices of gloo for the interfaces that torch would choose. Each has a thread that moves the bytes of its
    groups, and wakes up 100 to 200 times a second where there are none."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [_gloo_group.create_device(interface=name) for name in names] or [_gloo_group.create_default_device()]


@contextmanager
def gloo_groups_on(devices: list[Any]) -> Iterator[None]:
    """Context in which new groups of gloo get these devices, which others may have, too; without, each makes its own."""
    before = getattr(_MAKES_GROUPS, _GLOO_GROUP)
    _OnDevices.devices = devices
    setattr(_MAKES_GROUPS, _GLOO_GROUP, _OnDevices)
    try:
        yield
    finally:
        setattr(_MAKES_GROUPS, _GLOO_GROUP, before)
        _OnDevices.devices = []


def collectives_so_far() -> int:
    """Returns the number of collectives of the group of all ranks; 0 if there is none, or if its backend counts none."""
    group: Any = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if group is None:
        return 0
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return 0


# -- torch.compile ----------------------------------------------------------------------------------------------------

forget_compiled_code: Callable[[CodeType], None] = private("torch._C._dynamo.eval_frame", "reset_code")
HIGHER_ORDER_FOLDER = Path(private("torch._higher_order_ops", "__file__")).parent
"""Folder of the functions that torch compiles to call higher-order operators."""


def not_traced(function: F) -> F:
    """Decorator: torch.compile does not trace the function's own code, but the functions that it calls."""
    skipped: F = private("torch._dynamo.decorators", "skip")(function)
    return skipped


def stop_compiled_code_before(kind: type[Tensor]) -> None:
    """Makes torch.compile trace no operator with a tensor of this class."""
    private("torch._dynamo.config", "nontraceable_tensor_subclasses").add(kind)


@cache
def _optimized_module() -> type[nn.Module]:
    found: type[nn.Module] = private("torch._dynamo", "OptimizedModule")
    return found


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled a module as a whole, in place or not."""
    return isinstance(module, _optimized_module()) or compiled_call_of(module) is not None


def uncompiled(module: nn.Module) -> nn.Module:
    """The module that `torch.compile(module)` was given; any other module itself."""
    found: nn.Module = module._orig_mod if isinstance(module, _optimized_module()) else module  # type: ignore[assignment]
    return found


# -- transformers -----------------------------------------------------------------------------------------------------
# Attributes of its models, and perhaps of others; it is not imported for them.

INIT_WEIGHTS = "_init_weights"
"""A method (module) that initializes a module's parameters."""
MAY_BE_MISSING, MAY_BE_UNEXPECTED = "_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected"
"""Patterns of names of weights that files may lack, or may have without effect."""
ATTENTION_OF_CONFIG = "_attn_implementation"
"""The attribute of a configuration that names the implementation of attention, which models read at each call."""

CAPTURES_OUTPUTS = "_output_capturing_hooks_installed"
"""Attribute of a model of Transformers that has hooks, from the first forward that returns hidden states."""


_ATTENTION = "scaled_dot_product_attention"


@contextmanager
def attention_by(attend: Callable[..., Any]) -> Iterator[None]:
    """Context in which functions of `torch.nn.functional` call `attend` for their attention."""
    before = getattr(functional, _ATTENTION)
    setattr(functional, _ATTENTION, attend)
    try:
        yield
    finally:
        setattr(functional, _ATTENTION, before)
