"""Settings of the cluster's own certificates."""

from __future__ import annotations

from pydantic import Field

from provision.site.base import Settings


class CertificatesSettings(Settings):
    """The part of a site file that describes certificates; implied by what uses them."""

    days: int = Field(
        397, ge=2, le=825
    )  # that a node's certificate is valid; it is renewed in the last third
