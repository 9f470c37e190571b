"""The network as settings."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Annotated, Literal

from pydantic import Field, model_validator

from raypack.config.units import Experts, Features, Heads, Layers, Location, Plain, Section, Share, Title, Tokens, Unit
from raypack.plan.names import LAYER_KINDS


class ModelConfig(Section):
    """The network. `pattern` is repeated until `layers` layers are there: F = full, S = sliding-window, L = linear
    attention."""

    preset: Location = Field("", description="model preset or .toml file; the other settings of the model override it")
    name: Title = Field("custom", description="what tables call this model")
    pattern: str = Field(
        "FSSS",
        max_length=1000,
        description="layer kinds, repeated; F full attention, S sliding window, L linear attention",
    )
    own_layers: str = Field(
        "",
        max_length=1000,
        description="layer kinds of one's own; LETTER=package.module:object, with commas between several",
    )
    layers: Layers = Field(8, ge=1, description="number of layers")
    width: Features = Field(128, ge=1, description="hidden size: features of a token between the layers")
    heads: Heads = Field(8, ge=1, description="query heads of an attention layer")
    kv_heads: Heads = Field(4, ge=1, description="key and value heads; divides heads")
    head_dim: Features = Field(16, ge=2, le=4096, description="size of one head; even, for RoPE")
    qk_norm: bool = Field(False, description="RMSNorm on each query and key head")
    window: Tokens = Field(256, ge=1, description="tokens that a query of an S layer sees, itself included")
    sinks: Tokens = Field(0, ge=0, description="first tokens of a document that every query of an S layer also sees")
    linear_decay: Literal["none", "head", "gate"] = Field(
        "head",
        description="how the state of an L layer fades; not at all, by a fixed factor of each KV head, or by a gate of "
        "each channel that the data opens",
    )
    linear_gate_rank: Features = Field(16, ge=1, description="L layers: rank of the gate's projection")
    linear_feature: Literal["none", "relu", "elu", "silu"] = Field(
        "none", description="L layers: feature map of queries and keys; elu is elu + 1"
    )
    linear_norm: bool = Field(True, description="L layers: RMSNorm on each head's output")
    linear_conv: Tokens = Field(
        0, ge=0, le=64, description="L layers: taps of the short causal convolution before attention; 0 = none"
    )
    linear_chunk: Tokens = Field(64, ge=1, le=1024, description="L layers: tokens worked on at once; a power of two")
    ffn_width: Features = Field(512, ge=1, description="hidden size of a dense SwiGLU layer; used where experts = 0")
    experts: Experts = Field(0, ge=0, description="experts of a mixture-of-experts layer; 0 = dense layers")
    experts_active: Experts = Field(2, ge=1, description="experts chosen for each token (top-k)")
    expert_width: Features = Field(128, ge=1, description="hidden size of one expert")
    shared_expert_width: Features = Field(0, ge=0, description="hidden size of the expert of all tokens; 0 = none")
    vocabulary: Annotated[int, Unit("token ids")] = Field(
        257, ge=2, le=2**31 - 1, description="token ids that the model knows; all of the corpus must be below it"
    )
    tied_head: bool = Field(False, description="the output head shares the embedding's weights")
    rope_base: Plain = Field(10_000.0, gt=1, le=1e12, description="base of the rotary position embedding (RoPE)")
    norm_eps: Plain = Field(1e-6, gt=0, le=1, description="added to the mean square inside RMSNorm")
    dropout: Share = Field(0.0, ge=0, description="must be 0; a mask that fits every plan is not there")

    @model_validator(mode="after")
    def _possible(self) -> ModelConfig:
        unknown = sorted(set(self.pattern) - set(LAYER_KINDS) - set(self.own_kinds))
        if not self.pattern or unknown:
            known = ", ".join(f"{letter} ({name})" for letter, name in LAYER_KINDS.items())
            raise ValueError(f"pattern = {self.pattern!r} must be made of {known}, or of letters that own_layers names")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads = {self.heads} must be a multiple of kv_heads = {self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim = {self.head_dim} must be even, RoPE turns pairs")
        if self.linear_chunk & (self.linear_chunk - 1):
            raise ValueError(f"linear_chunk = {self.linear_chunk} must be a power of two")
        if self.linear_conv == 1:
            raise ValueError("linear_conv = 1 would only scale each channel: give 2 taps or more, or 0 for none")
        if self.experts and self.experts_active > self.experts:
            raise ValueError(f"experts_active = {self.experts_active} exceeds experts = {self.experts}")
        if self.dropout > 0:
            raise ValueError(
                f"dropout = {self.dropout} is refused: a mask that does not depend on the plan needs a counter-based "
                "generator, which the attention kernels lack; set it to 0"
            )
        return self

    @property
    def kinds(self) -> str:
        """The kind of every layer, first to last."""
        return "".join(islice(cycle(self.pattern), self.layers))

    @property
    def own_kinds(self) -> dict[str, str]:
        """`own_layers` by letter.

        Raises:
            ValueError: an entry that is no LETTER=package.module:object.
        """
        found = {}
        for entry in filter(None, self.own_layers.replace(" ", "").split(",")):
            letter, _, name = entry.partition("=")
            if len(letter) != 1 or not letter.isupper() or letter in LAYER_KINDS or ":" not in name:
                raise ValueError(
                    f"own_layers: {entry!r} must be LETTER=package.module:object with a letter that is not one of "
                    f"{', '.join(LAYER_KINDS)}"
                )
            found[letter] = name
        return found
