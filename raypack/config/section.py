"""What all settings are."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Frozen, closed to unknown keys, strict about nonsense."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
