"""Models of Transformers, each cut over two ranks by its own plan: the loss and all gradients of the whole model.

All of them in one pair of processes: importing Transformers takes longer than they do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.ranks.harness import run_ranks
from kit.ranks.tensor_models import GPT2_PLAN, IDS, LLAMA, TRANSFORMERS
from torch import Tensor, nn

from lightning_ptm.memory.backend import backend_of
from lightning_ptm.parallel import ColwiseParallel, RowwiseParallel, Rule
from lightning_ptm.parallel.cutting import CutModule
from lightning_ptm.parallel.exchange import RankGroup, TensorGroup
from lightning_ptm.parallel.logits import whole
from lightning_ptm.parallel.rules import plan_of
from lightning_ptm.runtime.tensors.parts import cut

pytest.importorskip("transformers", reason="tests whole models of transformers")
pytestmark = pytest.mark.slow

_EXPERTS = {**LLAMA, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "experts_implementation": "eager"}
_LATENT = {
    **_EXPERTS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "head_dim": 4,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_AS_LLAMA = [
    "Llama",
    "Qwen3",
    "Gemma",
    "Phi3",
    "Olmo2",
    "Mistral",
    "GPTNeoX",
    "Qwen2",
    "Cohere",
    "Granite",
    "Starcoder2",
    "Gemma2",
    "Glm",
    "Glm4",
    "Phi",
    "Helium",
    "Exaone4",
    "SmolLM3",
    "Nemotron",
    "Ernie4_5",
    "Olmo",
    "Olmo3",
    "Cohere2",
    "Arcee",
    "GraniteSWA",
    "VaultGemma",
    "Ministral",
    "Beam",
    "HyperCLOVAX",
    "Jais2",
]
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_AS_LLAMA, LLAMA),
    "Mixtral": {**_EXPERTS, "num_local_experts": 4},
    "Qwen2Moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": {**_EXPERTS, "num_experts": 4},
    "Olmoe": {**_EXPERTS, "num_experts": 4},
    "GraniteMoe": {**_EXPERTS, "num_local_experts": 4},
    "MiniMaxM2": {**_EXPERTS, "num_local_experts": 4},
    "DeepseekV2": _LATENT,
    "DeepseekV3": _LATENT,
}
ROUNDED_TO_FP32 = ("Mixtral", "MiniMaxM2", "DeepseekV2", "DeepseekV3", "GraniteSWA")
"""Models whose routers, or sinks of attention, compute in fp32 whatever the model computes in."""

OTHERS = (
    "GPT2 by a user's plan",
    "Llama with LoRA",
    "Llama with LoRA, its head trained",
    "Llama, frozen but for its norms",
    "Llama, 65 tokens",
    "Llama, tied",
)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Between a model that is cut and the whole one.

    Attributes:
        gradient: the largest one of all gradients, and whose.
        cut, partial: how many parameters are cut, and have partial gradients.
        of_meta: the same parts are those of a model built on the meta device.
    """

    loss: float
    gradient: float
    whose: str
    cut: int
    partial: int
    trained: int
    of_meta: bool


class Held(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss_and_gradients(self, tokens: Tensor) -> tuple[float, dict[str, Tensor]]:
        self.zero_grad(set_to_none=True)
        logits = self.model(input_ids=tokens).logits
        if logits.dtype is not torch.float64:
            logits = whole(logits)  # a loss of parts rounds to what logits are in, and the model is what is compared
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        named = self.named_parameters()
        return loss.item(), {name: each.grad.clone() for name, each in named if each.grad is not None}


def build(name: str) -> Held:
    import transformers

    if name.startswith("GPT2"):
        return Held(transformers.GPT2LMHeadModel(transformers.GPT2Config(**TRANSFORMERS["gpt2"][1])).eval())
    family, _, variant = name.partition(", ")
    family = family.split()[0]
    settings = dict(FAMILIES[family])
    if variant == "65 tokens":
        settings["vocab_size"] = 65
    if variant == "tied":
        settings["tie_word_embeddings"] = True
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    if name.startswith("Llama with LoRA"):
        peft = pytest.importorskip("peft")
        targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"]
        copied = ["lm_head"] if variant else None
        targets = [each for each in targets if each not in (copied or ())]
        adapters = peft.LoraConfig(r=4, target_modules=targets, modules_to_save=copied, init_lora_weights=False)
        model = peft.get_peft_model(model, adapters)
    if "frozen" in variant:
        for path, each in model.named_parameters():
            each.requires_grad_("norm" in path)
    return Held(model)


@contextmanager
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def compare(name: str, group: TensorGroup) -> Difference:
    module = build(name)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for each in module.parameters():  # biases and norms are not 0 and 1
            each.add_(torch.randn(each.shape, generator=generator) * 0.1)
    tokens = torch.randint(3, IDS["vocab_size"], (2, 12), generator=generator)
    loss, expected = module.loss_and_gradients(tokens)
    wanted: Any = GPT2_PLAN if name.startswith("GPT2") else "auto"
    known = CutModule(module, plan_of(module, wanted), group, strict=wanted != "auto")
    boxes, partial = known.boxes(), known.partial
    ours, gradients = module.loss_and_gradients(tokens)
    worst, whose = 0.0, ""
    named = dict(module.named_parameters())
    assert gradients.keys() == expected.keys()
    for path, found in gradients.items():
        summed = group.sum(found) if id(named[path]) in partial else found
        off = float((summed - cut(expected[path], boxes.get(path))).abs().max())
        worst, whose = max((worst, whose), (off, path))
    with torch.device("meta"):
        meta = build(name)
    of_meta = CutModule(meta, plan_of(meta, wanted), group, strict=wanted != "auto").boxes()
    return Difference(abs(ours - loss), worst, whose, len(boxes), len(partial), len(gradients), of_meta == boxes)


Found = dict[str, Difference | str]
"""By name; where something was raised, its text."""


def compare_all() -> Found:
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    dist.init_process_group("gloo")
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    found: Found = {}
    with in_float64():
        for name in (*FAMILIES, *OTHERS):
            try:
                found[name] = compare(name, group)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found


@pytest.fixture(scope="module")
def found() -> list[Found]:
    return run_ranks(compare_all, 2, limit_s=240)


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_a_cut_family_computes_what_it_computes_whole(found: list[Found], name: str) -> None:
    rounding = 1e-6 if name in ROUNDED_TO_FP32 else 1e-12
    for each in (of_rank[name] for of_rank in found):
        assert isinstance(each, Difference), each
        assert each.loss < rounding and each.gradient < rounding, each
        assert each.cut and each.trained and each.of_meta, each


def adapters_gradients() -> dict[str, Tensor]:
    """Returns the gradients of adapters that every rank has whole, trained with dropout."""
    import peft

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))])
    adapters = peft.LoraConfig(r=2, target_modules=["0.0", "0.2"], lora_dropout=0.5, init_lora_weights=False)
    model = peft.get_peft_model(nn.ModuleDict({"blocks": blocks}), adapters)
    plan: dict[str, Rule] = {
        "base_model.model.blocks.*.0": ColwiseParallel(),
        "base_model.model.blocks.*.2": RowwiseParallel(),
    }
    group = RankGroup(dist.group.WORLD, backend_of(torch.device("cpu")))
    known = CutModule(model, plan, group, strict=True, proven=False)
    block: Any = blocks[0]
    block(torch.randn(4, 8)).square().sum().backward()
    boxes = known.boxes()
    named = model.named_parameters()
    return {name: each.grad for name, each in named if each.grad is not None and name not in boxes}


def test_adapters_with_dropout_stay_alike_on_all_ranks() -> None:
    first, second = run_ranks(adapters_gradients, 2)
    assert sorted(name.split(".")[-4:-2] for name in first) == [["0", "lora_A"], ["2", "lora_B"]]
    for name, gradient in first.items():
        assert gradient.any() and torch.equal(second[name], gradient), name


@pytest.mark.parametrize("name", ["Qwen3", "Exaone4", "Qwen3Moe", "Beam"])
def test_norms_of_heads_have_partial_gradients(found: list[Found], name: str) -> None:
    each = found[0][name]
    assert isinstance(each, Difference) and each.partial == 4, each
