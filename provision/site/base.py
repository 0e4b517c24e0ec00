"""The base of every model that is part of a site file."""

from __future__ import annotations

import re

from pydantic import AfterValidator, BaseModel, ConfigDict


class Settings(BaseModel):
    """Part of a site file: unknown keys are mistakes, values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


def matches(pattern: re.Pattern[str], wanted: str) -> AfterValidator:
    """For text that must match as a whole; `wanted` says what it should be, with an example."""

    def validate(value: str) -> str:
        if not pattern.fullmatch(value):
            raise ValueError(f"{value!r} is not {wanted}")
        return value

    return AfterValidator(validate)
