"""Rules of tensor parallelism, and the modules of a model that the rules of a plan match.

Knows names and shapes, computes nothing. A plan maps names of modules (or of a module's own parameters) to rules, with `*`
for any one component of a name. The default plan comes from the classes in the model: this package's models define it in
`tensor_parallel_plan`, Transformers' models in their configurations.
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
"""Class attribute with the plan of a module class; names in it are relative to the module."""


@dataclasses.dataclass(frozen=True, slots=True)
class ColwiseParallel:
    """Linear layer, or embedding, whose outputs are divided over ranks: each computes its part from the whole input.

    Args:
        parts: number of equal projections packed in the layer, each of which is divided (3 for queries, keys and values).
        heads: names of attributes of the module around it that count its heads; their values are divided, too.
        gather: whether the outputs are gathered at once; otherwise a layer with `RowwiseParallel` takes each rank's part.
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
    """Linear layer whose inputs are divided over ranks; the ranks' outputs are summed.

    Args:
        split: whether the input is whole and each rank takes its part; otherwise a layer with `ColwiseParallel` gives parts.
        parts: as for `ColwiseParallel`.
    """

    split: bool = False
    parts: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class VocabParallel:
    """Embedding whose rows are divided over ranks; the ranks' outputs are summed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Partial:
    """Module that every rank has whole and applies to its own part of the activations (a norm of its own heads).

    The ranks' gradients of its parameters are summed.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Summed:
    """Module with a forward of its own that computes with cut parameters (a layer of experts).

    Its inputs are whole, and the ranks' outputs are summed. Separate rules with the parameters' names cut them:
    `ColwiseParallel` cuts the last but one dimension (of a vector its only one), `RowwiseParallel` the last.
    """


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """nn.Identity with a whole input, of which each rank takes its part, such as its heads of an attention bias.

    In the backward pass the ranks' gradients are summed, with zeros outside of their parts.

    Args:
        dimension: the dimension that is divided; a value of size 1 there is broadcast, and stays whole.
    """

    dimension: int


@dataclasses.dataclass(frozen=True, slots=True)
class Entering:
    """Whole module of whose output the last elements go directly to divided computation, without `ColwiseParallel` between.

    The gradients of these elements are summed over the ranks. Example: the rotary part of keys that all heads share.

    Args:
        last: name of an attribute of the module around it, with the number of these elements.
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
    "local_params": None,  # its parameters have entries of their own; here all parameters are plain tensors
}
"""Rules by Transformers' names of styles; None: the module is left as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A module or parameter that a rule applies to.

    Attributes:
        name: name of the module or parameter.
        module: the module, or the module that has the parameter.
        parameter: name of the parameter in the module; None if the rule is for the whole module.
        around: the module around it.
        rule: the rule.
        inside: whether it is inside an adapted layer; the place of that layer begins and ends the divided region.
    """

    name: str
    module: nn.Module
    parameter: str | None
    around: nn.Module
    rule: Rule
    inside: bool = False


def plan_of(root: nn.Module, wanted: Any) -> dict[str, Rule]:
    """Returns the plan of a model: rules by names with `*`.

    Args:
        wanted: the user's setting: "auto" or a plan.

    Raises:
        ConfigError: no module of the model has a plan, or a plan has an unknown rule.
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
        f"tensor_parallel's plan has {rule!r} for {name}, which is not a known rule; use ColwiseParallel(), "
        f"RowwiseParallel(), VocabParallel(), Partial(), Summed(), Part() or Entering() of lightning_ptm.parallel, or one of "
        f"Transformers' styles ({', '.join(_STYLES)})"
    )


def places(root: nn.Module, plan: Mapping[str, Rule], *, strict: bool) -> Iterator[Place]:
    """Yields the modules and parameters that the rules of a plan match, in the order of the model's modules.

    Args:
        strict: whether an entry that matches nothing is an error. It is in users' plans; plans of classes have entries for
            variants of a model.

    Raises:
        ConfigError: an entry matches nothing, with `strict`.
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
            if matching:  # the most specific one applies
                rule = plan[min(matching, key=lambda key: key.count("*"))]
                yield Place(full, module, parameter, around, rule)
    missing = next((name for name in plan if name not in used), None)
    if strict and missing is not None:
        raise ConfigError(
            f"tensor_parallel's plan has an entry {missing!r}, and the {type(root).__name__} has no module or parameter of "
            f"such a name; names are those of named_modules() and named_parameters(), with * for numbers"
        )
