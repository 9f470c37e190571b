"""The documents of one attention call, packed one after the other along the token axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import TypeVar

import torch

from raypack.errors import RaypackError

T = TypeVar("T")


class Packing:
    """Lengths of packed documents, in order; documents without tokens are dropped.

    Built once a round from the layout and passed to every layer: what a device kernel wants besides (offsets there,
    block masks) is made on first use and kept.
    """

    def __init__(self, lengths: Iterable[int]) -> None:
        given = tuple(lengths)
        if given and min(given) < 0:
            raise RaypackError(f"document length = {min(given)}: must be at least 0")
        self.lengths: tuple[int, ...] = tuple(n for n in given if n)
        self.offsets: tuple[int, ...] = (0, *accumulate(self.lengths))
        self.tokens: int = self.offsets[-1]
        self.longest: int = max(self.lengths, default=0)
        self._kept: dict[Hashable, object] = {}

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when first asked for `key`."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # type: ignore[return-value]

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """Offsets as int32 [documents + 1] on `device`."""

        def make() -> torch.Tensor:
            host = torch.tensor(self.offsets, dtype=torch.int32)
            return (host.pin_memory() if device.type == "cuda" else host).to(device, non_blocking=True)

        return self.keep(("cu_seqlens", device), make)

    def __repr__(self) -> str:
        return f"Packing({list(self.lengths)})"
