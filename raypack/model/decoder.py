"""The block loop: a decoder whose layers are of the kinds of `layers`, each with an MLP or MoE."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from raypack.comm.wire import Wire
from raypack.config import ModelConfig
from raypack.kernels.attention import Kernel
from raypack.layers.frame import Frame
from raypack.layers.kinds import host_plan_of, kind_of, kinds_of
from raypack.layers.projections import Projections
from raypack.model.head import linear_cross_entropy
from raypack.model.mlp import SwiGLU
from raypack.model.moe import MoE, Routing
from raypack.model.stopwatch import Stopwatch
from raypack.plan.names import LAYER_KINDS, OTHER_KIND
from raypack.registry import resolve


@dataclass
class RoutingSlot:
    """Router decisions of one layer in one round: filled by the first forward, read by every replay."""

    routing: Routing | None = None


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, config: ModelConfig, letter: str, chunk_tokens: int) -> None:
        super().__init__()
        self.chunk_tokens = chunk_tokens
        self.attention_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.attention = resolve(kind_of(config, letter).module, {}, f"layer kind {letter}")(config, letter)
        self.ffn_norm = nn.RMSNorm(config.width, config.norm_eps)
        self.ffn: MoE | SwiGLU
        if config.experts:
            self.ffn = MoE(
                config.width,
                config.experts,
                config.experts_active,
                config.expert_width,
                config.shared_expert_width,
                chunk_tokens=chunk_tokens,
            )
        else:
            self.ffn = SwiGLU(config.width, config.ffn_width, chunk_tokens=chunk_tokens)

    def forward(self, x: torch.Tensor, frame: Frame, wire: Wire, slot: RoutingSlot) -> torch.Tensor:
        """[rows, width] -> [rows, width], replaying in backward what `frame.recompute` says."""
        full = frame.recompute == "full"
        x = _replayed(self._attend, x, frame, wire) if full else self._attend(x, frame, wire)
        # More rows than a chunk are recomputed chunk by chunk anyway; once more around them would be a third forward.
        if frame.recompute == "none" or len(x) > self.chunk_tokens:
            return self._feed(x, slot)
        return _replayed(self._feed, x, slot)

    def _attend(self, x: torch.Tensor, frame: Frame, wire: Wire) -> torch.Tensor:
        return x + self.attention(self.attention_norm(x), frame, wire)

    def _feed(self, x: torch.Tensor, slot: RoutingSlot) -> torch.Tensor:
        normed = self.ffn_norm(x)
        if isinstance(self.ffn, SwiGLU):
            return x + self.ffn(normed)
        y, slot.routing = self.ffn(normed, slot.routing)
        return x + y


def _replayed(function: Callable[..., torch.Tensor], *args: object) -> torch.Tensor:
    """Without early stop, so that every rank of a group replays the same exchanges whatever it saved."""
    with set_checkpoint_early_stop(False):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


class HybridModel(nn.Module):
    """Token embedding, the layers of `config.kinds`, a norm, and a head that only exists inside the loss.

    Args:
        config: the model.
        chunk_tokens: rows of logits (and of feed-forward activations) alive at once.
    """

    def __init__(self, config: ModelConfig, chunk_tokens: int = 2048) -> None:
        super().__init__()
        self.config, self.chunk_tokens = config, chunk_tokens
        self.embed = nn.Embedding(config.vocabulary, config.width)
        for kind in kinds_of(config):
            host_plan_of(kind)  # what leads nowhere shows here, not in a step
        self.parts = ("embed", *(LAYER_KINDS.get(letter, OTHER_KIND) for letter in config.kinds), "head")
        self.layers = nn.ModuleList(Layer(config, letter, chunk_tokens) for letter in config.kinds)
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.head = None if config.tied_head else nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(
        self,
        tokens: torch.Tensor,
        labels: torch.Tensor,
        frame: Frame,
        wire: Wire,
        slots: list[RoutingSlot] | None = None,
        watch: Stopwatch | None = None,
    ) -> torch.Tensor:
        """Sum of the token losses of this rank's rows: 0-dim, at least fp32, never divided here.

        Args:
            tokens: int64 [rows].
            labels: int64 [rows], -100 = none.
            slots: one a layer: router decisions to use, or to fill.
            watch: marked between layers, where there is one.
        """
        slots = slots if slots is not None else self.slots()
        x = F.embedding(tokens, self.embed.weight)
        parts = self.parts
        for layer, slot, before, part in zip(self.layers, slots, parts[:-2], parts[1:-1], strict=True):
            x = watch.between(x, before, part) if watch else x
            with record_function(f"layer {part}"):
                x = layer(x, frame, wire, slot)
        x = watch.between(x, *parts[-2:]) if watch else x
        weight = self.embed.weight if self.head is None else self.head.weight
        loss = linear_cross_entropy(self.norm(x), weight, labels, self.chunk_tokens)
        if watch:
            watch.mark("forward", "head")
        return loss

    def use_kernel(self, kernel: Kernel | None) -> None:
        """Let `kernel` compute the softmax attention of every layer; None = the best for device and dtype."""
        for module in self.modules():
            if isinstance(module, Projections):
                module.kernel = kernel

    def slots(self) -> list[RoutingSlot]:
        return [RoutingSlot() for _ in self.layers]

    @property
    def expert_layers(self) -> list[MoE]:
        return [layer.ffn for layer in self.layers if isinstance(layer.ffn, MoE)]


def expert_counts(slots: list[RoutingSlot]) -> list[torch.Tensor]:
    """Tokens of each expert, for each MoE layer of one round."""
    return [slot.routing.counts for slot in slots if slot.routing is not None]


@torch.no_grad()
def initialize(module: nn.Module, config: ModelConfig, seed: int, prefix: str = "") -> None:
    """Fill parameters from `seed` and their own names: the same weights in any world and in any order of calls.

    Matrices: normal, std 0.02, the projections back into the residual stream divided by sqrt(2 x layers). Norms: 1.
    Embeddings: std 1 where the head does not share them, and routers 1 / sqrt(width): tokens must differ by more than
    what the first updates add to all of them alike, else a router soon sends all tokens to the same experts.
    Convolutions start near the identity: 1 is added to the tap of the token itself.
    """
    for name, parameter in module.named_parameters():
        full_name = prefix + name
        if "norm" in full_name:
            parameter.fill_(1.0)
            continue
        std = 0.02
        if full_name == "embed.weight" and not config.tied_head:
            std = 1.0
        elif full_name.endswith("router.weight"):
            std = config.width**-0.5
        elif full_name.endswith(("attention.out.weight", "ffn.down.weight", "ffn.down", "shared.down.weight")):
            std /= (2 * config.layers) ** 0.5
        digest = hashlib.sha256(f"{seed}:{full_name}".encode()).digest()
        generator = torch.Generator(device=parameter.device).manual_seed(int.from_bytes(digest[:7], "big"))
        values = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        parameter.copy_(values.normal_(0.0, std, generator=generator))
        if full_name.endswith("attention.conv"):
            parameter[:, -1] += 1
    for name, buffer in module.named_buffers():
        if name.endswith("bias"):
            buffer.zero_()
