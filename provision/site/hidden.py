"""Values of a site file that others must not see: named there, kept elsewhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BeforeValidator, SecretStr, model_validator

from provision.site.base import Settings

if TYPE_CHECKING:
    from provision.site.models import Site


class Hidden(Settings):
    """From a file, from the environment, or (least good) as it stands in the site file."""

    file: Path | None = None  # on the controller, relative to the site file
    env: str | None = None  # name of a variable of the controller's environment
    value: SecretStr | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Hidden:
        if [self.file, self.env, self.value].count(None) != 2:
            raise ValueError("expected exactly one of file, env and value")
        return self


def _plain_text(value: Any) -> Any:
    return {"value": value} if isinstance(value, str) else value


Secretive = Annotated[Hidden, BeforeValidator(_plain_text)]  # plain text is a value


class SecretMissing(Exception):
    """The site file names a file or variable for a secret that is not there."""


def reveal(site: Site, hidden: Hidden, key: str) -> str:
    """The text of a secret; `key` is where the site file names it, for the error. Raises SecretMissing."""
    if hidden.value is not None:
        return hidden.value.get_secret_value()
    if hidden.env is not None:
        text = os.environ.get(hidden.env, "").strip()
        if not text:
            raise SecretMissing(
                f"{site.path}: {key}.env: the variable {hidden.env} is not set: export it and run again"
            )
        return text
    assert hidden.file is not None
    path = site.directory / hidden.file.expanduser()
    try:
        text = path.read_text().strip()
    except OSError as error:
        raise SecretMissing(f"{site.path}: {key}.file: cannot read {path}: {error.strerror}") from None
    if not text:
        raise SecretMissing(f"{site.path}: {key}.file: {path} is empty")
    return text
