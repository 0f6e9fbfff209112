"""Choice of the states that are encoded, by the names that a user gives, and refusals. Runs of them are in
test_state_dtype.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_ptm.config import Settings
from lightning_ptm.errors import ConfigError
from lightning_ptm.runtime.deciding.encoded_states import encoded_traits
from lightning_ptm.update.state_encoding import Bf16, Int8
from lightning_ptm.update.trial.probe import probe


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(48))])


def test_by_default_nothing_is() -> None:
    known = probe(adamw())
    assert encoded_traits(Settings(), [(known,), ()], every_optimizer=True) == ((known,), ())


def test_one_word_is_for_all_states_and_a_dictionary_for_those_it_names() -> None:
    def found(**settings: object) -> list[object]:
        ((known, _),) = encoded_traits(Settings(**settings), [[probe(adamw())] * 2], every_optimizer=True)  # type: ignore[arg-type]
        return [(slot.name, slot.encoding) for slot in known.slots]

    assert found(optimizer_state_dtype="bf16") == [("exp_avg", Bf16), ("exp_avg_sq", Bf16)]
    assert found(optimizer_state_dtype={"exp_avg_sq": "int8"}) == [("exp_avg", None), ("exp_avg_sq", Int8)]


@pytest.mark.parametrize("every_optimizer", [True, False])
def test_a_name_that_no_state_has_is_refused_where_all_are_known(every_optimizer: bool) -> None:
    settings, traits = Settings(optimizer_state_dtype={"exp_average": "int8"}), [(probe(adamw()),)]
    if every_optimizer:
        with pytest.raises(
            ConfigError, match="names exp_average, and the optimizers of this run keep exp_avg, exp_avg_sq"
        ):
            encoded_traits(settings, traits, every_optimizer=True)
    else:
        assert encoded_traits(settings, traits, every_optimizer=False) == (traits[0],)


def test_beside_one_of_whole_parameters_the_states_of_others_can_be_named() -> None:
    matrix, vector = nn.Parameter(torch.zeros(48, 48)), nn.Parameter(torch.zeros(48))
    optimizers = (torch.optim.Muon([matrix]), torch.optim.AdamW([vector]))
    traits = [(probe(each),) for each in optimizers]
    with pytest.raises(ConfigError) as told:
        encoded_traits(Settings(optimizer_state_dtype="int8"), traits, every_optimizer=True)
    remedy = {"exp_avg": "int8", "exp_avg_sq": "int8"}
    assert f"optimizer_state_dtype={remedy}" in str(told.value)
    (muon,), (other,) = encoded_traits(Settings(optimizer_state_dtype=remedy), traits, every_optimizer=True)
    assert muon == traits[0][0]
    assert all(slot.encoding is not None for slot in other.slots)
