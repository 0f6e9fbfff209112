"""Models of Transformers under context parallelism: positions, masks, and labels of causal language models.

In a divided step a model gets the positions of its rank's tokens, masks of its implementation of attention are not made
but described, and its loss counts the labels of whole sequences. Elsewhere its own implementation computes as before.
Does not import transformers: a module without its models has not either.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptm.errors import UsageError
from lightning_ptm.parallel.context import ContextParallel
from lightning_ptm.torch_internals import ATTENTION_OF_CONFIG

_LOSSES = ("ForCausalLM", "ForMaskedLM")
"""Transformers' names of loss functions that take `num_items_in_batch`."""
_IGNORED = -100
_UNKNOWN = ("softcap", "s_aux", "position_bias")
"""Arguments of attention that change scores."""
_TEMPERATURE = "attn_temperature_tuning"
"""Setting by which layers without rotary positions scale late queries, by positions that they count themselves."""
_numbers = itertools.count()


class TransformersModels:
    """Transformers' models in a module, prepared from construction until `close`.

    Args:
        root: the module; it may have none.
        context: this rank's part in its context group.
    """

    def __init__(self, root: nn.Module, context: ContextParallel) -> None:
        self._context = context
        self._undo: list[Callable[[], None]] = []
        # State of the forward in progress.
        self._own: Tensor | None = None
        """Mask of this rank's tokens: the argument of a model, which it passes on to the models in it."""
        self._seen: Tensor | None = None
        """Mask of whole texts in the same forward, (batch, tokens); None if it hides no token."""
        library = sys.modules.get("transformers.modeling_utils")
        kind = None if library is None else library.PreTrainedModel
        models = [] if kind is None else [each for each in root.modules() if isinstance(each, kind)]
        configs = {
            id(each.config): each.config for model in models for each in model.modules() if hasattr(each, "config")
        }
        names: dict[str, str] = {}
        for config in configs.values():
            before = getattr(config, ATTENTION_OF_CONFIG, None)
            if isinstance(before, str):
                if before not in names:
                    names[before] = _registered(before, self)
                setattr(config, ATTENTION_OF_CONFIG, names[before])
                self._undo.append(_setter(config, before))
        for model in models:
            handle = model.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            self._undo.append(handle.remove)
        for each in {
            id(each): each for model in models for each in model.modules() if _depends_on_length(each)
        }.values():
            adds = each.register_forward_pre_hook(self._with_last_position, with_kwargs=True)
            drops = each.register_forward_hook(self._without_last_position)
            self._undo += [adds.remove, drops.remove]

    def close(self) -> None:
        """Restores the models. Idempotent."""
        while self._undo:
            self._undo.pop()()

    @property
    def context(self) -> ContextParallel:
        return self._context

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._context.divided:
            return None
        parameters = inspect.signature(model.forward).parameters
        given: dict[str, Any] = {**dict(zip(parameters, args, strict=False)), **kwargs}
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if not isinstance(tokens, Tensor):
            return None
        size, length = self._context.group.size, tokens.shape[1]
        positions = self._context.positions(length, tokens.device)[None]
        mask = given.get("attention_mask")
        if given.get("position_ids") is not None:
            # Without a mask, Transformers takes other position_ids for several texts in one sequence.
            if mask is None and not torch.equal(*torch.broadcast_tensors(given["position_ids"], positions)):
                raise UsageError(
                    f"{type(model).__name__} was given position_ids that are not 0, 1, ... along each sequence, and no "
                    f"attention_mask, which means several texts in one sequence (packed), and "
                    f"context_parallel_size={size} knows one text a sequence; leave position_ids out, and give each text a "
                    f"sequence of its own, with padding and an attention_mask where lengths differ"
                )
        elif "position_ids" in parameters:
            given["position_ids"] = positions
        if mask is None or mask is not self._own:
            self._own, self._seen = self._masks(model, tokens, mask)
        if "attention_mask" in parameters:  # else positions with a gap are taken for several texts in one sequence
            given["attention_mask"] = self._own
        if "use_cache" in parameters:
            given["use_cache"] = False
        if isinstance(given.get("labels"), Tensor):
            self._refuse_balance(model, given)
            known = sys.modules["transformers.loss.loss_utils"].LOSS_MAPPING
            function = getattr(model, "loss_function", None)
            loss = next((name for name in _LOSSES if known.get(name) is function), None)
            if loss is not None:
                self._count_labels(model, loss, given, parameters)
        return (), given

    def _refuse_balance(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Refuses a loss with a balance of experts, which is no mean over tokens; at the start it hardly differs from one."""
        asked = given.get("output_router_logits")
        asked = getattr(model.config, "output_router_logits", False) if asked is None else asked
        factor = getattr(model.config, "router_aux_loss_coef", 0)
        if asked and factor:
            raise UsageError(
                f"{type(model).__name__} adds a balance of its experts to the loss (its config's router_aux_loss_coef is {factor}), which "
                f"is no mean over tokens, and context_parallel_size={self._context.group.size} gives each rank some tokens; "
                f"set its config's output_router_logits to False, or use context_parallel_size=1"
            )

    def _masks(self, model: nn.Module, tokens: Tensor, mask: Any) -> tuple[Tensor, Tensor | None]:
        """Returns two masks of padding: of this rank's tokens, and of whole texts (None if it hides no token)."""
        if mask is None:
            return torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device), None
        if not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]:
            found = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"that is a {type(mask).__name__}"
            raise UsageError(
                f"{type(model).__name__} was given an attention_mask {found} for {tuple(tokens.shape[:2])} tokens, and "
                f"context_parallel_size={self._context.group.size} knows masks of padding, one number a token; give a mask "
                f"of that shape, or use context_parallel_size=1"
            )
        own = mask.to(torch.bool, copy=True)
        whole = self._context.joined(own.to(torch.uint8)).bool()
        return own, None if bool(whole.all()) else whole

    def _count_labels(self, model: nn.Module, loss: str, given: dict[str, Any], parameters: Mapping[str, Any]) -> None:
        """Gives the loss function labels that were shifted before they were cut, and the number that all ranks count."""
        size = self._context.group.size
        if not any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            raise UsageError(
                f"{type(model).__name__}.forward takes no further arguments for its loss, so it cannot count the labels of "
                f"other ranks (context_parallel_size={size}); compute the loss in training_step, or use "
                f"context_parallel_size=1"
            )
        whole = self._context.joined(given["labels"])
        if loss == "ForCausalLM" and given.get("shift_labels") is None:
            whole = F.pad(whole[:, 1:], (0, 1), value=_IGNORED)
            given["shift_labels"] = self._context.part(whole).contiguous()
        elif given.get("shift_labels") is not None:
            whole = self._context.joined(given["shift_labels"])
        counted = given.get("num_items_in_batch")
        given["num_items_in_batch"] = ((whole != _IGNORED).sum() if counted is None else counted) / size

    # -- rotary positions whose frequencies depend on the length of the text ---------------------------------------------

    def _with_last_position(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Adds the largest position of whole texts, of which the module computes the length."""
        if not self._context.divided:
            return None
        given = {**dict(zip(("x", "position_ids", "layer_type"), args, strict=False)), **kwargs}
        own = given["position_ids"]
        group = self._context.group
        last = group.kept(lambda: group.gather(own.max())).max()
        given["position_ids"] = torch.cat([own, last.expand(*own.shape[:-1], 1)], -1)
        return (), given

    def _without_last_position(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if not self._context.divided:
            return None
        return tuple(each[..., :-1, :] for each in out) if isinstance(out, tuple) else out[..., :-1, :]

    # -- attention ----------------------------------------------------------------------------------------------------

    def attention(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
    ) -> tuple[Tensor, None]:
        """Computes attention in a divided step, by the arguments of Transformers' attention functions."""
        length = self._context.group.size * query.shape[-2]
        unknown = [name for name in _UNKNOWN if given.get(name) is not None]
        late = length >= getattr(module, "floor_scale", 0) and not getattr(module, "use_rope", False)
        if late and getattr(module, _TEMPERATURE, False):
            unknown.append(_TEMPERATURE)
        if unknown:
            raise UsageError(
                f"{type(module).__name__} changes its scores of attention ({', '.join(unknown)}), and "
                f"context_parallel_size={self._context.group.size} knows plain and windowed attention; use "
                f"context_parallel_size=1"
            )
        causal = given.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        window, mask, seen = given.get("sliding_window") or 0, attention_mask, None
        if isinstance(mask, Tensor) and (mask.dim() == 0 or mask.shape == (len(query), 1 + length)):  # made by `mask`
            if mask.dim():
                mask, seen = mask[0, 0], mask[:, 1:].bool()
            window, mask = int(mask), None
            causal, window = window >= 0, max(0, window)
        out = self._context.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            given.get("dropout", 0.0),
            causal,
            scale=given.get("scaling"),
            enable_gqa=True,
            window=window if causal else 0,
            seen=seen,
        )
        return out.transpose(1, 2).contiguous(), None

    def mask(self, *, q_length: int, mask_function: Callable[..., Any], device: Any = None, **_: Any) -> Tensor:
        """Describes a mask in a divided step: the length of a causal window, 0 for all tokens before, -1 for all tokens.

        Where padding hides tokens it is (batch, 1 + tokens of whole texts): that number, and whether each token may be seen.
        """
        size = self._context.group.size
        length = q_length * size
        at = torch.arange(length)
        zero = torch.zeros((), dtype=torch.long)
        found: dict[int, int] = {}
        for query in (length // 3, length // 2, length // 2 + 1, length - 1):
            seen = torch.as_tensor(mask_function(zero, zero, torch.tensor(query), at)).expand(length)
            if bool(seen.all()) and query < length - 1:
                found[query] = -1
                continue
            visible = int(seen.sum())
            if bool(seen[query + 1 :].any()) or not bool(seen[query + 1 - visible : query + 1].all()):
                raise self._unknown_mask()
            found[query] = 0 if visible == query + 1 else visible
        kind = -1 if -1 in found.values() else max(found.values())
        for query, each in found.items():
            whole = query == length - 1 if kind == -1 else query < kind
            if each != (0 if whole else kind):
                raise self._unknown_mask()  # such as one of chunks that see their own tokens only
        window = torch.tensor(kind)
        if self._seen is None:
            return window
        return torch.cat([window.to(self._seen.device).expand(len(self._seen), 1), self._seen.long()], 1)

    def _unknown_mask(self) -> UsageError:
        return UsageError(
            f"a model's attention has a mask that is neither causal nor a sliding window, and "
            f"context_parallel_size={self._context.group.size} knows these only; use context_parallel_size=1"
        )


def _depends_on_length(module: nn.Module) -> bool:
    """Whether a module makes rotary positions with other frequencies for longer texts."""
    kinds = getattr(module, "rope_type", "")
    of_layers = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    return any("dynamic" in str(each) or each == "longrope" for each in of_layers)


def _setter(config: Any, before: str) -> Callable[[], None]:
    return lambda: setattr(config, ATTENTION_OF_CONFIG, before)


def _registered(before: str, models: TransformersModels) -> str:
    """Registers an implementation of attention that is the one named `before` outside of divided steps; returns its name."""
    library = sys.modules["transformers.modeling_utils"]
    masks = sys.modules["transformers.masking_utils"]
    reference = weakref.ref(models)

    def dividing() -> TransformersModels | None:
        found = reference()
        return found if found is not None and found.context.divided else None

    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        divided = dividing()
        if divided is not None:
            return divided.attention(module, *args, **kwargs)
        if before in library.ALL_ATTENTION_FUNCTIONS:
            return library.ALL_ATTENTION_FUNCTIONS[before](module, *args, **kwargs)
        return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)

    def mask(*args: Any, **kwargs: Any) -> Any:
        divided = dividing()
        if divided is not None:
            return divided.mask(*args, **kwargs)
        return masks.ALL_MASK_ATTENTION_FUNCTIONS[before](*args, **kwargs)

    name = f"divided_{next(_numbers)}_{before}"
    library.AttentionInterface.register(name, attention)
    masks.AttentionMaskInterface.register(name, mask)
    return name
