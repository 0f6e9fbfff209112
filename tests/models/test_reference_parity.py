"""The models compute what Hugging Face's do with the same weights: logits and gradients within 1e-5 in fp32."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ptm.models import GPT, T5, T5MoE
from lightning_ptm.models.moe import Expert, MixtureOfExperts
from lightning_ptm.models.t5 import Attention, Block, FeedForward, shifted

transformers = pytest.importorskip("transformers")

Pairs = Iterable[tuple[Tensor, list[Tensor]]]
"""Our parameter, and theirs of which it is the concatenation, transposed where need be."""


def copy_weights(pairs: Pairs) -> None:
    with torch.no_grad():
        for ours, theirs in pairs:
            ours.copy_(torch.cat(theirs))


def check_gradients(model: nn.Module, pairs: Pairs, gradient_of: dict[int, Tensor]) -> None:
    """Every parameter of `model` is in `pairs`, and its gradient is that of its counterparts.

    Only experts, who may have no token, can have no gradient.
    """
    seen = set()
    experts = {id(p) for module in model.modules() if isinstance(module, Expert) for p in module.parameters()}
    idle = 0
    for ours, theirs in pairs:
        seen.add(id(ours))
        expected = torch.cat(
            [gradient_of[tensor.data_ptr()].as_strided(tensor.shape, tensor.stride()) for tensor in theirs]
        )
        actual = torch.zeros_like(ours) if ours.grad is None else ours.grad
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        compared = bool(expected.abs().max() > 1e-4)
        assert compared or id(ours) in experts
        idle += not compared
    assert seen == {id(parameter) for parameter in model.parameters()}
    assert idle <= len(experts) // 2


def gradients_of(model: nn.Module) -> dict[int, Tensor]:
    """By the address of the parameter, so that slices and transposes of it find theirs."""
    return {p.data_ptr(): torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()}


# ---- GPT against GPT-2 ----


def gpt_pairs(ours: GPT, theirs: Any) -> Pairs:
    body = theirs.transformer
    yield ours.token_embedding.weight, [body.wte.weight]
    yield ours.position_embedding.weight, [body.wpe.weight]
    yield ours.norm.weight, [body.ln_f.weight]
    yield ours.norm.bias, [body.ln_f.bias]
    for block, other in zip(ours.blocks, body.h, strict=True):
        for norm, other_norm in ((block.attention_norm, other.ln_1), (block.feed_forward_norm, other.ln_2)):
            yield norm.weight, [other_norm.weight]
            yield norm.bias, [other_norm.bias]
        for linear, conv in (
            (block.attention.query_key_value, other.attn.c_attn),
            (block.attention.project, other.attn.c_proj),
            (block.feed_forward.expand, other.mlp.c_fc),
            (block.feed_forward.project, other.mlp.c_proj),
        ):
            yield linear.weight, [conv.weight.t()]
            yield linear.bias, [conv.bias]


def test_gpt_is_gpt2() -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 24, "n_layer": 3, "n_head": 4, "n_inner": 40}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0))
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = GPT(61, 24, 3, 4, sequence_length=16, feed_forward_width=40, tie_head=True)
    ours.configure_model()
    copy_weights(gpt_pairs(ours, theirs))
    tokens = torch.randint(61, (2, 17))
    logits, expected = ours(tokens[:, :-1]), theirs(tokens[:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    ours.loss((tokens[:, :-1], tokens[:, 1:])).backward()
    F.cross_entropy(expected.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    check_gradients(ours, gpt_pairs(ours, theirs), gradients_of(theirs))


# ---- T5 and T5-MoE against T5 and Switch Transformers ----


def attention_pairs(ours: Attention, theirs: Any) -> Pairs:
    yield ours.query.weight, [theirs.q.weight]
    yield ours.key_value.weight, [theirs.k.weight, theirs.v.weight]
    yield ours.project.weight, [theirs.o.weight]


def feed_forward_pairs(ours: nn.Module, theirs: Any) -> Pairs:
    if isinstance(ours, MixtureOfExperts):
        yield ours.router.weight, [theirs.router.classifier.weight]
        for index, expert in enumerate(ours.experts):
            assert isinstance(expert, Expert)
            other = theirs.experts[f"expert_{index}"]
            yield expert.expand, [other.wi.weight]
            yield expert.project, [other.wo.weight]
        return
    assert isinstance(ours, FeedForward)
    yield ours.project.weight, [theirs.wo.weight]
    if ours.gate is None:
        yield ours.expand.weight, [theirs.wi.weight]
    else:
        yield ours.gate.weight, [theirs.wi_0.weight]
        yield ours.expand.weight, [theirs.wi_1.weight]


def t5_pairs(ours: T5, theirs: Any) -> Pairs:
    yield ours.embedding.weight, [theirs.shared.weight]
    for stack, other_stack in ((ours.encoder, theirs.encoder), (ours.decoder, theirs.decoder)):
        first = other_stack.block[0].layer[0].SelfAttention
        yield stack.position.embedding.weight, [first.relative_attention_bias.weight]
        yield stack.norm.weight, [other_stack.final_layer_norm.weight]
        for block, other in zip(stack.blocks, other_stack.block, strict=True):
            assert isinstance(block, Block)
            yield block.attention_norm.weight, [other.layer[0].layer_norm.weight]
            yield from attention_pairs(block.attention, other.layer[0].SelfAttention)
            if block.cross_attention is not None and block.cross_norm is not None:
                yield block.cross_norm.weight, [other.layer[1].layer_norm.weight]
                yield from attention_pairs(block.cross_attention, other.layer[1].EncDecAttention)
            last = other.layer[-1]
            yield block.feed_forward_norm.weight, [last.layer_norm.weight]
            dense = last.mlp if hasattr(last, "mlp") else last.DenseReluDense
            yield from feed_forward_pairs(block.feed_forward, dense)


SIZES = {"vocab_size": 61, "d_model": 24, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
OURS = {"vocab_size": 61, "width": 24, "head_width": 8, "feed_forward_width": 40, "layers": 2, "heads": 4}
DISTANCES = {"buckets": 8, "max_distance": 20}
THEIR_DISTANCES = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}


def compare(ours: T5, theirs: Any, tokens: Tensor, targets: Tensor, padding: Tensor | None = None) -> None:
    for name, parameter in theirs.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    ours.configure_model()
    copy_weights(t5_pairs(ours, theirs))
    previous = shifted(targets)
    attention_mask = None if padding is None else (~padding).long()
    expected = theirs(input_ids=tokens, decoder_input_ids=previous, attention_mask=attention_mask).logits
    logits = ours(tokens, previous, padding)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    for each in (logits, expected):
        F.cross_entropy(each.flatten(0, 1), targets.flatten()).backward()
    check_gradients(ours, t5_pairs(ours, theirs), gradients_of(theirs))


@pytest.mark.parametrize("kind", ["relu", "gated-gelu"])
def test_t5_is_t5(kind: str) -> None:
    """Sequences are longer than the largest distance, and some are padded."""
    torch.manual_seed(0)
    config = transformers.T5Config(**SIZES, **THEIR_DISTANCES, feed_forward_proj=kind, tie_word_embeddings=True)
    theirs = transformers.T5ForConditionalGeneration(config)
    padding = torch.arange(48)[None, :] >= torch.tensor([48, 31, 40])[:, None]
    ours = T5(**OURS, **DISTANCES, gated=kind == "gated-gelu")
    compare(ours, theirs, torch.randint(1, 61, (3, 48)), torch.randint(1, 61, (3, 37)), padding)


@pytest.mark.parametrize("capacity", [64, 7])
def test_t5_moe_is_switch_transformers(capacity: int) -> None:
    """Tests room for all tokens, and so little that many are dropped. One sequence: theirs is capacity by sequence."""
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        **SIZES,
        **THEIR_DISTANCES,
        num_experts=4,
        expert_capacity=capacity,
        encoder_sparse_step=2,
        decoder_sparse_step=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        router_jitter_noise=0.0,
        tie_word_embeddings=True,
    )
    theirs = transformers.SwitchTransformersForConditionalGeneration(config)
    # Both stacks have 32 tokens: 32 * factor / 4 experts is the capacity.
    ours = T5MoE(experts=4, capacity_factor=capacity / 8, jitter=0.0, **OURS, **DISTANCES)
    compare(ours, theirs, torch.randint(1, 61, (1, 32)), torch.randint(1, 61, (1, 32)))
    _, routings = ours.hidden(torch.randint(1, 61, (1, 32)), torch.randint(1, 61, (1, 32)))
    assert all((routing.dropped > 0) == (capacity == 7) for routing in routings)
