"""Windowed attention, short documents and the head stay linear in tokens: in memory, and in work that autograd adds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raypack.kernels.attention import attention
from raypack.model.head import linear_cross_entropy


class Created(TorchDispatchMode):
    """Elements of the tensors that operators return: the largest one and the sum (views count too)."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(out) if isinstance(x, Tensor)]
        self.total += sum(sizes)
        self.largest = max(self.largest, *sizes, 0)
        return out


def measured(run: Callable[[int], Tensor], tokens: int) -> Created:
    with Created() as created:
        run(tokens).sum().backward()
    return created


def attend(lengths: Callable[[int], list[int]], window: int | None, sinks: int = 0) -> Callable[[int], Tensor]:
    def run(tokens: int) -> Tensor:
        qkv = torch.ones(tokens, 4, 8, requires_grad=True)
        return attention(*qkv.split([2, 1, 1], 1), lengths(tokens), window=window, sinks=sinks)

    return run


@pytest.mark.parametrize(
    "run",
    [
        attend(lambda n: [n], 32),
        attend(lambda n: [n], 32, sinks=4),
        attend(lambda n: [100] * (n // 100) + [n % 100], 32),
        attend(lambda n: [1] * n, None),
        attend(lambda n: [300, 4] * (n // 304) + [n % 304], None),
    ],
    ids=["one document", "with sinks", "many documents", "one-token documents", "long and short documents"],
)
def test_twice_the_tokens_make_twice_the_elements_forward_and_backward(run: Callable[[int], Tensor]) -> None:
    """Autograd over slices of keys would make a full-size gradient per chunk: four times instead of twice."""
    small, large = measured(run, 8192), measured(run, 16384)
    assert large.total < 2.1 * small.total
    assert large.largest <= 2 * small.largest


def test_the_head_holds_a_chunk_of_logits_and_the_gradients() -> None:
    x, weight = torch.ones(4096, 8, requires_grad=True), torch.ones(5000, 8, requires_grad=True)
    with Created() as created:
        linear_cross_entropy(x, weight, torch.arange(4096), 64).backward()
    assert created.largest <= 64 * 5000
