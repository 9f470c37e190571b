"""The documents of one attention call, packed one after the other along the token axis."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import NamedTuple, TypeVar

from raypack.errors import RaypackError

T = TypeVar("T")


class Kept(dict[Hashable, object]):
    """What was made so far, by key; as long as the round that it belongs to."""

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when first asked for `key`."""
        if key not in self:
            self[key] = make()
        return self[key]  # type: ignore[return-value]


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
        self.kept = Kept()

    def __repr__(self) -> str:
        return f"Packing({list(self.lengths)})"


class Span(NamedTuple):
    """Query rows [query, query_end) over key rows [key, key_end): all of them, or row i over the first i + 1."""

    query: int
    query_end: int
    key: int
    key_end: int
    causal: bool = False
