"""Environments that launchers give their processes: SLURM's and torchrun's on two machines, all on this one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.fits import quiet_trainer
from kit.models import Linears
from kit.ranks.harness import run_ranks
from lightning.pytorch.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from torch.utils.data import DataLoader

from lightning_ptm import AngelPTMStrategy

ENVIRONMENTS: dict[str, dict[str, str]] = {
    # srun --nodes=2 --ntasks-per-node=1
    "slurm": {
        "SLURM_JOB_ID": "70001",
        "SLURM_JOB_NAME": "train",
        "SLURM_NODELIST": "127.0.0.[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_NODEID": "{rank}",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "1",
        "SLURM_PROCID": "{rank}",
        "SLURM_LOCALID": "0",
    },
    # torchrun --nnodes=2 --nproc-per-node=1, in a pod each
    "torchrun": {
        "RANK": "{rank}",
        "LOCAL_RANK": "0",
        "GROUP_RANK": "{rank}",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "TORCHELASTIC_RUN_ID": "train",
    },
}


def fit(name: str, disk: Path) -> dict[str, Any]:
    rank, port = os.environ["RANK"], os.environ["MASTER_PORT"]
    for variable in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        del os.environ[variable]
    os.environ.update({variable: value.format(rank=rank) for variable, value in ENVIRONMENTS[name].items()})
    if name == "slurm":
        del os.environ["MASTER_ADDR"]  # Lightning takes the first of SLURM_NODELIST
        os.environ["MASTER_PORT"] = port  # in place of one made from the job's number, which may be taken here
    module = Linears(seed=1)
    trainer = quiet_trainer(
        AngelPTMStrategy(disk_path=disk, offload_optimizer="disk"), devices=1, num_nodes=2, max_steps=2
    )
    trainer.fit(module, DataLoader(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), batch_size=2))
    strategy: Any = trainer.strategy
    return {
        "environment": type(strategy.cluster_environment),
        "place": (trainer.global_rank, trainer.local_rank, trainer.node_rank, trainer.world_size),
        "sampler": strategy.distributed_sampler_kwargs,
        "steps": trainer.global_step,
        "weight": module.head.weight.detach().clone(),
    }


def test_devices_that_are_not_those_of_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in ENVIRONMENTS["torchrun"].items():
        monkeypatch.setenv(variable, value.format(rank=0))
    with pytest.raises(ValueError, match=r"devices=3.* does not match the world size \(2\)"):
        quiet_trainer(AngelPTMStrategy(), devices=3)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_run_takes_its_ranks_from_the_launcher_s_environment(name: str, disk: Path) -> None:
    first, second = run_ranks(fit, 2, name, disk)
    expected = SLURMEnvironment if name == "slurm" else TorchElasticEnvironment
    assert first["environment"] is second["environment"] is expected
    assert (first["place"], second["place"]) == ((0, 0, 0, 2), (1, 0, 1, 2))
    assert second["sampler"] == {"num_replicas": 2, "rank": 1}
    assert first["steps"] == second["steps"] == 2
    assert first["weight"].equal(second["weight"])
