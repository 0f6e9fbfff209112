"""What tensor parallelism does with a module: the rules of a plan, and which module each is for.

Knows names and shapes, computes nothing. A plan maps names of modules (or of parameters that a module holds itself), with
`*` for any one part of a name, to rules. Where a user gives none, it is that of the classes in the model: our own models
say theirs in `tensor_parallel_plan`, Transformers' in their configurations.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from lightning_ptm.errors import ConfigError
from lightning_ptm.torch_internals import parameters_in

ATTRIBUTE = "tensor_parallel_plan"
"""Of a class whose modules bring a plan; names in it are those inside of the module."""


@dataclasses.dataclass(frozen=True, slots=True)
class ColwiseParallel:
    """A linear layer, or an embedding, whose outputs ranks divide: each computes its part of them, from the whole input.

    Args:
        parts: how many projections of equal size are packed in it, each of which is divided: 3 for queries, keys and values.
        heads: attributes of the module around it that count what is divided (its heads); each is divided, too.
        gather: the outputs are put together at once; otherwise a layer with `RowwiseParallel` takes each rank's part.
    """

    parts: int = 1
    heads: tuple[str, ...] | str = ()
    gather: bool = False

    @property
    def counts(self) -> tuple[str, ...]:
        """`heads`, as a tuple."""
        return (self.heads,) if isinstance(self.heads, str) else tuple(self.heads)


@dataclasses.dataclass(frozen=True, slots=True)
class RowwiseParallel:
    """A linear layer whose inputs ranks divide, as a layer with `ColwiseParallel` gives them; the ranks' outputs are
    added up.

    Args:
        split: the input is whole, and each rank takes its part of it.
        parts: as for `ColwiseParallel`.
    """

    split: bool = False
    parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class VocabParallel:
    """An embedding of which each rank has some rows; the ranks' outputs are added up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """A module that every rank has whole and uses on its part of something (a norm of its own heads): the ranks' gradients
    of its parameters are added up."""


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """A module that holds parts of parameters itself (a layer of experts): its inputs are whole, and the ranks' outputs are
    added up. Which of its parameters are cut, rules with their names say: `ColwiseParallel` cuts the dimension before
    the last (of a
    vector its only one), `RowwiseParallel` the last."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A module that gives what it is given (nn.Identity), a whole value: each rank takes its part of it, such as its heads of
    an attention's bias. In the backward pass the ranks' gradients are added up, with zeros where they have no part.

    Args:
        dimension: that is divided; a value with one element there is for everybody, and stays.
    """

    dimension: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entering:
    """A module that every rank has whole, and of whose output ranks use some with their parts of something, without a layer
    with `ColwiseParallel` in between: gradients of that are added up (the rotated part of keys that all heads have in
    common).

    Args:
        last: an attribute of the module around it: how many of the last elements of the output these are.
    """

    last: str


Rule: TypeAlias = ColwiseParallel | RowwiseParallel | VocabParallel | Partial | Summed | Part | Entering

_STYLES: Mapping[str, Rule | None] = {
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "packed_colwise": ColwiseParallel(parts=2),
    "packed_rowwise": RowwiseParallel(parts=2),
    "colwise_gather_output": ColwiseParallel(gather=True),
    "colwise_rep": ColwiseParallel(gather=True),
    "rowwise_split_input": RowwiseParallel(split=True),
    "rowwise_rep": RowwiseParallel(split=True),
    "embedding_rowwise": VocabParallel(),
    "embedding_colwise": ColwiseParallel(gather=True),
    "replicated_with_grad_allreduce": Partial(),
    "moe_tp_experts": Summed(),
    "mla_kv_a_proj": Entering(last="qk_rope_head_dim"),
    "replicate": None,
    "local_params": None,  # of parameters that have entries of their own; here all parameters are plain tensors
}
"""By Transformers' word for it; None: nothing is done with such a module."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """Where a rule applies.

    Attributes:
        name: of a module, or of a parameter.
        module: that module, or the one that holds the parameter.
        parameter: its name in the module; None where the rule is the whole module's.
        around: the module around it.
        inside: of an adapted layer, whose own place says where the ranks' own random numbers begin and end.
    """

    name: str
    module: nn.Module
    parameter: str | None
    around: nn.Module
    rule: Rule
    inside: bool = False


def plan_of(root: nn.Module, wanted: Any) -> dict[str, Rule]:
    """The plan of a model: rules by names with `*`.

    Args:
        wanted: the user's setting: "auto" or a plan.

    Raises:
        ConfigError: nothing in the model brings a plan, or one has a rule that is not known here.
    """
    if wanted != "auto":
        return {name: known for name, rule in wanted.items() if (known := _known(name, rule)) is not None}
    found: dict[str, Rule] = {}
    for name, module in root.named_modules():
        prefix = f"{name}." if name else ""
        for inside, rule in _own_plan(module).items():
            known = _known(prefix + inside, rule)
            if known is not None:
                found.setdefault(prefix + inside, known)
    if not found:
        raise ConfigError(
            f"tensor_parallel_size: no module of the {type(root).__name__} has a plan for its layers, and "
            f"TensorParallel(plan='auto') takes plans of the model's classes (this package's models have them, and "
            f"Transformers'); give tensor_parallel=TensorParallel(plan={{'blocks.*.expand': ColwiseParallel(), "
            f"'blocks.*.project': RowwiseParallel()}}), with the names of this model's linear layers (from "
            f"lightning_ptm.parallel import ColwiseParallel, RowwiseParallel)"
        )
    return found


def _own_plan(module: nn.Module) -> Mapping[str, Any]:
    own = getattr(type(module), ATTRIBUTE, None)
    if own is not None:
        return dict(own)
    if "PreTrainedModel" in {base.__name__ for base in type(module).__mro__}:
        return dict(getattr(module, "tp_plan", None) or {})  # the whole model's, with the names of its base model
    return {}


def _known(name: str, rule: Any) -> Rule | None:
    if isinstance(rule, str) and rule in _STYLES:
        return _STYLES[rule]
    if isinstance(rule, Rule):
        return rule
    raise ConfigError(
        f"tensor_parallel's plan has {rule!r} for {name}, which is no rule that is known here; use "
        f"ColwiseParallel(), RowwiseParallel(), "
        f"VocabParallel(), Partial(), Summed(), Part() or Entering() of lightning_ptm.parallel, or one of "
        f"Transformers' words "
        f"({', '.join(_STYLES)})"
    )


def places(root: nn.Module, plan: Mapping[str, Rule], *, strict: bool) -> Iterator[Place]:
    """Where the rules of a plan apply, in the order of the model's modules.

    Args:
        strict: an entry that names nothing is refused: a user's; plans of classes have some for variants of a model.

    Raises:
        ConfigError: an entry names nothing.
    """
    patterns = {name: re.compile(r"[^.]+".join(map(re.escape, name.split("*")))) for name in plan}
    used: set[str] = set()
    for name, module in root.named_modules():
        around = root.get_submodule(name.rpartition(".")[0]) if name else root
        own = [
            (f"{name}.{inside}".lstrip("."), inside) for inside, it in parameters_in(module).items() if it is not None
        ]
        for full, parameter in [(name, None), *own]:
            matching = [key for key, pattern in patterns.items() if pattern.fullmatch(full)]
            used.update(matching)
            if matching:  # the most particular one counts
                rule = plan[min(matching, key=lambda key: key.count("*"))]
                yield Place(full, module, parameter, around, rule)
    missing = next((name for name in plan if name not in used), None)
    if strict and missing is not None:
        raise ConfigError(
            f"tensor_parallel's plan has an entry {missing!r}, and the {type(root).__name__} has no module or parameter of "
            f"such a name; names are those of named_modules() and named_parameters(), with * for numbers"
        )
