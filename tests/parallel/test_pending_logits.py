"""`slice_loss`: unchanged models of Transformers that compute their loss in slices, alone and in pages."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import lightning as L
import pytest
import torch
from kit.memory import strategy_with
from kit.twins import compare
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ptm.errors import ConfigError, UsageError
from lightning_ptm.models import slice_loss
from lightning_ptm.parallel.pending_logits import PendingLogits
from lightning_ptm.torch_internals import TorchDispatchMode

transformers = pytest.importorskip("transformers", reason="tests models of transformers")

VOCABULARY, TOKENS = 101, 5
_IDS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_IDS, **_SIZES, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": _LLAMA,
    "GPT2LMHeadModel": {**_IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4, "output_router_logits": True},
    "BertForMaskedLM": {**_IDS, **_SIZES},
    "T5ForConditionalGeneration": {**_T5, "decoder_start_token_id": 0},
}
CONFIGS = {"GPT2LMHeadModel": "GPT2Config", "T5ForConditionalGeneration": "T5Config"}


def build(name: str, **changes: Any) -> Any:
    sizes = {**MODELS[name], **changes}
    config = CONFIGS.get(name, name.partition("For")[0] + "Config")
    torch.manual_seed(0)
    return getattr(transformers, name)(getattr(transformers, config)(**sizes))


def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.masked_fill(ids % 4 == 0, -100)}


def learnt(model: Any, **more: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)  # dropout
    model.zero_grad()
    loss = model(**batch(), **more).loss
    loss.backward()
    return loss.detach(), {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def assert_near(ours: Any, theirs: Any, tolerance: float = 3e-6) -> None:
    assert (ours[0] - theirs[0]).abs() <= tolerance * theirs[0].abs()
    assert ours[1].keys() == theirs[1].keys()
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).abs().max() <= tolerance * gradient.abs().max() + 1e-12, name


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_learns_what_it_learns_with_whole_logits(name: str) -> None:
    expected = learnt(build(name))
    one = learnt(slice_loss(build(name)))
    assert torch.equal(one[0], expected[0])
    assert all(torch.equal(one[1][each], gradient) for each, gradient in expected[1].items())
    model = slice_loss(build(name), tokens=TOKENS)
    assert_near(learnt(model), expected, 2e-5)
    assert isinstance(model(**batch()).logits, PendingLogits)
    assert "forward" not in vars(model.get_output_embeddings())


@pytest.mark.filterwarnings("ignore")
def test_a_sum_over_a_batch_of_several_ranks_and_autocast() -> None:
    more = {"num_items_in_batch": torch.tensor(37)}
    sliced = slice_loss(build("LlamaForCausalLM"), tokens=TOKENS)
    assert_near(learnt(sliced, **more), learnt(build("LlamaForCausalLM"), **more))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_near(learnt(sliced), learnt(build("LlamaForCausalLM")), 0.02)
        bert = slice_loss(build("BertForMaskedLM"), tokens=TOKENS)
        assert_near(learnt(bert), learnt(build("BertForMaskedLM")), 0.02)
    # Its loss of logits in 16 bits is in 16 bits.
    whole, sliced = (learnt(model.to(torch.bfloat16)) for model in (build("BertForMaskedLM"), bert))
    assert torch.equal(whole[0], sliced[0]) and whole[0].dtype is torch.bfloat16


class Largest(TorchDispatchMode):
    """The most elements of logits that a result has: `tokens`, in rows of the vocabulary."""

    tokens = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Not the transposed weight of a head.
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == VOCABULARY and out.is_contiguous():
            self.tokens = max(self.tokens, out.numel() // VOCABULARY)
        return out


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_the_largest_logits_are_those_of_a_slice(name: str) -> None:
    model = slice_loss(build(name), tokens=TOKENS)
    with Largest() as largest:
        loss = model(**batch()).loss
    assert largest.tokens == TOKENS
    with Largest() as largest:
        loss.backward()
    assert largest.tokens == 0


@pytest.mark.filterwarnings("ignore")
def test_a_model_that_computes_with_its_logits_has_whole_ones() -> None:
    sizes = {"final_logit_softcapping": 3.0}
    MODELS["Gemma2ForCausalLM"] = _LLAMA
    try:
        expected = learnt(build("Gemma2ForCausalLM", **sizes))
        model = slice_loss(build("Gemma2ForCausalLM", **sizes), tokens=TOKENS)
    finally:
        del MODELS["Gemma2ForCausalLM"]
    ours = learnt(model)
    assert torch.equal(ours[0], expected[0])
    assert all(torch.equal(ours[1][each], gradient) for each, gradient in expected[1].items())


def test_logits_are_as_before_where_no_loss_is_trained() -> None:
    model, plain = slice_loss(build("LlamaForCausalLM"), tokens=TOKENS), build("LlamaForCausalLM")
    ids = batch()["input_ids"]
    assert torch.equal(model(ids).logits, plain(ids).logits)
    with torch.no_grad():
        assert torch.equal(model(**batch()).logits, plain(**batch()).logits)
    assert torch.equal(model.generate(ids, max_new_tokens=3), plain.generate(ids, max_new_tokens=3))
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)
    assert isinstance(copy.deepcopy(model)(**batch()).logits[0, 0, 0].item(), float)  # a copy is as it was


def test_adapters_and_compiled_models() -> None:
    peft = pytest.importorskip("peft", reason="tests adapters")
    adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "lm_head"], lora_dropout=0.0, init_lora_weights=False)
    found = []
    for tokens in (TOKENS, 10**6):
        model = peft.get_peft_model(slice_loss(build("LlamaForCausalLM"), tokens), adapters)
        found.append(learnt(model))
    assert torch.equal(found[0][0], found[1][0])  # the head's adapter needs whole logits
    model = slice_loss(build("LlamaForCausalLM"), TOKENS)
    model.compile(backend="eager")
    assert torch.equal(learnt(model)[0], learnt(build("LlamaForCausalLM"))[0])


def test_logits_of_a_training_forward_refuse_to_be_used_after_it() -> None:
    logits = slice_loss(build("LlamaForCausalLM"), tokens=TOKENS)(**batch()).logits
    assert logits.shape == (2, 12, VOCABULARY) and "PendingLogits(shape=(2, 12, 101)" in f"{logits}"
    with pytest.raises(UsageError, match="logits of a training forward were used after it"):
        logits.argmax(-1)
    with pytest.raises(UsageError, match="do not use slice_loss"):
        torch.stack([logits])


class OwnHead(nn.Linear):
    pass


def test_what_is_the_users_own_is_refused() -> None:
    own_head, own_loss, twice = (build("LlamaForCausalLM") for _ in range(3))
    own_head.lm_head = OwnHead(32, VOCABULARY)
    own_loss.loss_function = lambda logits, labels, **_: logits.mean()
    for model, reason in (
        (own_head, "its head is a OwnHead"),
        (own_loss, "its loss_function is of test_pending_logits"),
        (slice_loss(twice), "its forward was replaced"),
        (nn.Linear(2, 2), "its class is of torch.nn"),
        (build("LlamaForCausalLM").model, "it has no head"),
    ):
        with pytest.raises(ConfigError, match=f"slice_loss got a {type(model).__name__}, and {reason}"):
            slice_loss(model)


class Held(L.LightningModule):
    """A model of Transformers in a LightningModule."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = slice_loss(build(name), tokens=TOKENS)
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)


def samples() -> DataLoader[Any]:
    one = batch()
    rows = [{key: value[at % 2].roll(at) for key, value in one.items()} for at in range(8)]
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


TIGHT = {"device_memory": "least", "offload_parameters": "disk", "offload_optimizer": "disk"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("LlamaForCausalLM", {}),
        ("GPT2LMHeadModel", TIGHT),
        ("BertForMaskedLM", TIGHT | {"recompute": "all"}),
    ],
)
def test_runs_in_pages_have_the_numbers_of_a_plain_trainer(name: str, settings: dict[str, Any], tmp_path: Any) -> None:
    strategy = strategy_with(page_size="64KiB", disk_path=str(tmp_path), debug={"poison": True}, **settings)
    module = compare(lambda: Held(name), strategy, samples())
    assert len(module.losses) == 4
