"""A strategy that no Trainer has been given: what needs one says so."""

from __future__ import annotations

import pytest
import torch

from lightning_ptm import AngelPTMStrategy, UsageError


def test_a_strategy_of_no_trainer_says_what_to_do():
    strategy = AngelPTMStrategy()
    with pytest.raises(UsageError, match="pass it to a Trainer, and call fit"):
        strategy.root_device  # noqa: B018
    with pytest.raises(UsageError, match="pass it to a Trainer, and call fit"):
        strategy.load_model_state_dict({"state_dict": {}})
    with pytest.raises(UsageError, match="this call needs a run in progress"):
        strategy.plan_text()


def test_parameters_are_whole_before_there_is_a_trainer():
    module = torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    with AngelPTMStrategy().gathered(module):
        assert torch.equal(module.weight, before)
