"""The base of every model that is part of a site file."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """Part of a site file: unknown keys are mistakes, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
