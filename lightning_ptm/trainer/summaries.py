"""Model summaries of a module that ranks have sliced: they count whole parameters, as Lightning's ModelSummary would before.

Owns a summary class that counts them; reads no values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary
from lightning.pytorch.utilities.model_summary.model_summary import ModelSummary as Summary
from torch import nn
from torch.nn.parameter import UninitializedParameter
from typing_extensions import override

from lightning_ptm.planning.tensor_slices import TensorSlice
from lightning_ptm.trainer.internals import depth_of_summary, summary_of


class WholeSummary(Summary):
    """A ModelSummary that counts the elements of whole parameters.

    Args:
        boxes: slices of parameters that are parts of larger ones, by name.
    """

    def __init__(self, module: LightningModule, max_depth: int, boxes: Mapping[str, TensorSlice]) -> None:
        named = dict(module.named_parameters(remove_duplicate=False))
        self._whole_numel = {id(named[name]): math.prod(box.shape) for name, box in boxes.items()}
        super().__init__(module, max_depth=max_depth)

    def _numel(self, parameters: Iterator[nn.Parameter], *, trained: bool = False) -> int:
        counted = [each for each in parameters if not isinstance(each, UninitializedParameter)]
        return sum(
            self._whole_numel.get(id(each), each.numel()) for each in counted if each.requires_grad or not trained
        )

    @property
    @override
    def param_nums(self) -> list[int]:
        return [self._numel(self._model.get_submodule(name).parameters()) for name in self.layer_names]

    @property
    @override
    def total_parameters(self) -> int:
        return self._numel(self._model.parameters())

    @property
    @override
    def trainable_parameters(self) -> int:
        return self._numel(self._model.parameters(), trained=True)


def of_whole_parameters(
    trainer: Trainer, boxes: Mapping[str, TensorSlice]
) -> Iterator[tuple[ModelSummary, Callable[[Trainer, LightningModule], Summary]]]:
    """The Trainer's summary callbacks, each with a function that makes a summary of whole parameters."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelSummary) and summary_of(type(callback)) is summary_of(ModelSummary):
            yield callback, partial(_summary, depth_of_summary(callback), boxes)


def _summary(max_depth: int, boxes: Mapping[str, TensorSlice], trainer: Trainer, module: LightningModule) -> Summary:
    return WholeSummary(module, max_depth, boxes)
