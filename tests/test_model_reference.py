"""The oracle itself, held against torch's own modules and hand-computed values."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from raypack.config import ModelConfig
from raypack.layers import oracle
from raypack.model import reference
from raypack.model.decoder import HybridModel

F64 = torch.float64


def config(**changes: object) -> ModelConfig:
    fields = {"layers": 4, "width": 8, "heads": 4, "kv_heads": 2, "head_dim": 4, "window": 3, "ffn_width": 12}
    return ModelConfig(**(fields | {"vocabulary": 11, "experts": 4, "expert_width": 6} | changes))


def state_of(config: ModelConfig) -> dict[str, Tensor]:
    """Random weights under the names that the model's state dict has."""
    width, heads = config.width, config.heads + 2 * config.kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (config.vocabulary, width), "norm.weight": (width,)}
    if not config.tied_head:
        shapes["head.weight"] = (config.vocabulary, width)
    for i in range(config.layers):
        at = f"layers.{i}."
        shapes |= {at + "attention_norm.weight": (width,), at + "ffn_norm.weight": (width,)}
        shapes |= {at + "attention.qkv.weight": (heads * config.head_dim, width)}
        shapes |= {at + "attention.out.weight": (width, config.heads * config.head_dim)}
        if config.qk_norm:
            shapes |= {at + "attention.q_norm": (config.head_dim,), at + "attention.k_norm": (config.head_dim,)}
        if not config.experts:
            shapes |= {at + "ffn.gate_up.weight": (2 * config.ffn_width, width)}
            shapes |= {at + "ffn.down.weight": (width, config.ffn_width)}
            continue
        shapes |= {at + "ffn.router.weight": (config.experts, width), at + "ffn.bias": (config.experts,)}
        shapes |= {at + "ffn.gate_up": (config.experts, 2 * config.expert_width, width)}
        shapes |= {at + "ffn.down": (config.experts, width, config.expert_width)}
        if config.shared_expert_width:
            shapes |= {at + "ffn.shared.gate_up.weight": (2 * config.shared_expert_width, width)}
            shapes |= {at + "ffn.shared.down.weight": (width, config.shared_expert_width)}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator, dtype=F64) * 0.4 for name, shape in shapes.items()}


@pytest.mark.parametrize("changes", [{"qk_norm": True, "shared_expert_width": 5}, {"experts": 0, "tied_head": True}])
def test_the_oracle_takes_the_state_dict_of_a_model(changes: dict) -> None:
    """As it is, every name of every layer kind: a changed parameter changes the loss."""
    linear = {"linear_decay": "gate", "linear_conv": 3, "linear_gate_rank": 2}
    cfg = config(pattern="FSL", layers=3, **linear, **changes)
    model = HybridModel(cfg).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=F64) * 0.4
    state = {name: t.requires_grad_() for name, t in model.state_dict().items()}
    tokens = torch.arange(9) * 3 % 11
    loss = reference.reference_loss(cfg, state, [tokens], [next_labels(tokens)])
    parameters = [t for name, t in state.items() if not name.endswith("ffn.bias")]  # it chooses experts only
    assert all(g.any() for g in torch.autograd.grad(loss, parameters))


VARIANTS = [{}, {"experts": 0}, {"qk_norm": True, "sinks": 1}, {"shared_expert_width": 5}, {"tied_head": True}]


def next_labels(tokens: Tensor) -> Tensor:
    return torch.cat([tokens[1:], torch.tensor([-100])])


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_loss_is_a_sum_over_documents_and_reaches_every_parameter(changes: dict) -> None:
    cfg = config(**changes)
    state = state_of(cfg)
    parameters = {name: t.requires_grad_() for name, t in state.items() if not name.endswith(".bias")}
    documents = [torch.arange(n) * 3 % 11 for n in (1, 2, 9)]
    labels = [next_labels(d) for d in documents]
    losses = [reference.reference_loss(cfg, state, [d], [y]) for d, y in zip(documents, labels, strict=True)]
    total = reference.reference_loss(cfg, state, documents, labels)
    assert float(losses[0].detach()) == 0
    assert total.item() == pytest.approx(sum(x.item() for x in losses), rel=1e-12)
    gradients = torch.autograd.grad(total, list(parameters.values()))
    assert all(g.any() and torch.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("changed", [0, 4, 8])
def test_changing_a_token_leaves_earlier_states_bit_equal(changes: dict, changed: int) -> None:
    cfg = config(**changes)
    state, tokens = state_of(cfg), torch.arange(9) * 3 % 11
    other = tokens.clone()
    other[changed] = (other[changed] + 1) % 11
    before, after = (reference.hidden_states(cfg, state, t) for t in (tokens, other))
    assert torch.equal(before[:changed], after[:changed])
    assert not torch.equal(before[changed], after[changed])


def test_full_attention_equals_torch() -> None:
    q, k, v = (torch.randn(1, h, 9, 4, dtype=F64, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    got = oracle.attention(*(x[0].transpose(0, 1) for x in (q, k, v)), [9])
    assert torch.allclose(got, want, rtol=0, atol=1e-12)


def test_sinks_see_the_first_tokens_of_the_own_document() -> None:
    q, v = torch.zeros((9, 1, 9), dtype=F64), torch.eye(9, dtype=F64).unsqueeze(1)
    out = oracle.attention(q, q, v, [3, 6], window=2, sinks=1)
    assert [row.nonzero().flatten().tolist() for row in out[:, 0]] == [
        [0], [0, 1], [0, 1, 2], [3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7], [3, 7, 8],
    ]  # fmt: skip


def test_cross_entropy_equals_torch() -> None:
    x, weight = torch.randn(6, 3, dtype=F64), torch.randn(5, 3, dtype=F64)
    labels = torch.tensor([0, 4, -100, 2, 1, -100])
    want = torch.nn.functional.cross_entropy(x @ weight.T, labels, reduction="sum")
    assert reference.cross_entropy(x, weight, labels).item() == pytest.approx(want.item(), rel=1e-12)


def test_rope_turns_the_first_pair_by_the_position() -> None:
    x = torch.tensor([[[1.0, 0, 0, 0]]], dtype=F64).expand(3, 1, 4)
    turned = oracle.rope(x, torch.arange(3), 1e4)[:, 0]
    for position, row in enumerate(turned):
        assert row.tolist() == pytest.approx([math.cos(position), 0, math.sin(position), 0])


def test_norm_equals_torch() -> None:
    x, norm = torch.randn(4, 6, dtype=F64), torch.nn.RMSNorm(6, eps=1e-5, dtype=F64)
    assert torch.allclose(oracle.rms_norm(x, norm.weight, 1e-5), norm(x), rtol=0, atol=1e-12)
