"""Choice of kernels. Apex is not installed where tests run: a stand-in of its interface takes its place."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import fake_apex
from kit.fits import quiet_trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from torch import nn

from lightning_ptm.data import TextBytes
from lightning_ptm.errors import ConfigError
from lightning_ptm.models import GPT, T5
from lightning_ptm.models.kernels import TORCH, check, choose, in_words, is_norm

TINY: dict[str, Any] = {"width": 16, "layers": 1, "heads": 2}


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Apex is installed, on a machine with a CUDA device."""
    for name, module in fake_apex.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: True)


def groups(device: str = "cpu") -> list[dict[str, Any]]:
    return [{"params": [nn.Parameter(torch.zeros(2, device=device))]}]


def built(model: GPT | T5) -> Any:
    model.configure_model()
    return model


def test_torchs_kernels_without_apex(monkeypatch: pytest.MonkeyPatch) -> None:
    for available in (False, True):
        monkeypatch.setattr(CUDAAccelerator, "is_available", lambda available=available: available)
        assert choose("auto") == choose("torch") == choose("apex") == TORCH  # a model that is only planned has torch's
    assert type(TORCH.layer_norm(4)) is nn.LayerNorm and type(TORCH.rms_norm(4, 1e-6)) is nn.RMSNorm
    assert type(TORCH.adamw(groups(), lr=0.1, betas=(0.9, 0.95))) is torch.optim.AdamW


@pytest.mark.usefixtures("apex")
def test_apexs_norms_are_used_on_cuda_machines_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in ("auto", "apex"):
        chosen = choose(wanted)  # type: ignore[arg-type]
        norms = chosen.layer_norm(4), chosen.rms_norm(4, 1e-6)
        assert list(map(type, norms)) == [fake_apex.FusedLayerNorm, fake_apex.FusedRMSNorm] and all(map(is_norm, norms))
    assert choose("torch") == TORCH
    monkeypatch.setattr(CUDAAccelerator, "is_available", lambda: False)
    assert choose("auto") == TORCH


@pytest.mark.usefixtures("apex")
def test_apexs_adamw_is_made_for_parameters_in_ram_only_if_it_is_asked_for() -> None:
    assert type(choose("auto").adamw(groups(), lr=0.1, betas=(0.9, 0.95))) is torch.optim.AdamW
    made = choose("apex").adamw(groups(), lr=0.1, betas=(0.9, 0.95))
    assert type(made) is fake_apex.FusedAdam and made.adam_w_mode == 1
    assert (made.defaults["lr"], made.defaults["betas"]) == (0.1, (0.9, 0.95))


@pytest.mark.usefixtures("apex")
def test_models_have_the_chosen_norms_with_the_same_parameters() -> None:
    for make in (GPT, T5):
        fused, plain = built(make(**TINY, kernels="apex")), built(make(**TINY, kernels="torch"))
        assert fused.hparams["kernels"] == "apex"
        norms = [module for module in fused.modules() if is_norm(module)]
        assert len(norms) >= 3 and {type(each).__module__.partition(".")[0] for each in norms} == {"apex"}
        assert not any(type(each).__module__.startswith("apex") for each in plain.modules())
        plain.load_state_dict(fused.state_dict())
        copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(choose("torch")))]
        assert type(copies[0].chosen) is type(fused.chosen) and copies[1] == TORCH


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^kernels='fused': use 'auto', 'torch' or 'apex'$"):
        GPT(**TINY, kernels="fused")  # type: ignore[arg-type]


def test_apex_that_is_not_there_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    with pytest.raises(
        ConfigError, match=r"kernels='apex', and NVIDIA Apex cannot be imported \(No module named 'apex'\)"
    ):
        check("apex", cuda)
    for name, module in fake_apex.modules(extensions=False).items():  # built without CUDA extensions
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(
        ConfigError, match=r"cannot be imported \(No module named 'amp_C'\), so there are no such kernels"
    ):
        check("apex", cuda)
    monkeypatch.delattr(sys.modules["apex.normalization"], "FusedRMSNorm")  # another package of that name has none
    with pytest.raises(ConfigError, match=r"FusedRMSNorm.* the package apex on PyPI is something else"):
        check("apex", cuda)
    check("auto", cuda)
    check("torch", cuda)


@pytest.mark.usefixtures("apex")
def test_apex_is_refused_in_a_run_on_a_cpu(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(bytes(range(256)) * 8)
    data = TextBytes(path=str(text), sequence_length=16, batch_size=2)
    trainer = quiet_trainer("angel_ptm", max_steps=1, limit_val_batches=0)
    with pytest.raises(
        ConfigError, match=r"kernels='apex', and this run computes on cpu, for which NVIDIA Apex has no kernels"
    ):
        trainer.fit(GPT(**TINY, sequence_length=16, kernels="apex"), datamodule=data)


@pytest.mark.usefixtures("apex")
def test_whose_kernels_they_are_is_said_on_cuda() -> None:
    model, cuda = built(GPT(**TINY)), torch.device("cuda")
    adam = choose("apex").adamw(groups(), lr=0.1, betas=(0.9, 0.95))
    plain = TORCH.adamw(groups(), lr=0.1, betas=(0.9, 0.95))
    assert in_words("auto", model, plain, cuda) == "GPT has norms of Apex and an optimizer of torch (kernels='auto')"
    assert in_words("apex", model, adam, cuda) == "GPT has norms of Apex and an optimizer of Apex (kernels='apex')"
    assert in_words("apex", model, adam, torch.device("cpu")) == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.usefixtures("apex")
def test_apexs_optimizer_takes_parameters_on_cuda() -> None:
    assert type(choose("auto").adamw(groups("cuda"), lr=0.1, betas=(0.9, 0.95))) is fake_apex.FusedAdam
