"""Things that are made on first use and then kept: tensors on a device beside data that never changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class Kept(dict[Hashable, object]):
    """What was made so far, by key; as long as the round that it belongs to."""

    def keep(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returned when first asked for `key`."""
        if key not in self:
            self[key] = make()
        return self[key]  # type: ignore[return-value]
