"""Settings of the central journal."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from provision.site.base import Settings, matches
from provision.site.hidden import Secretive

_SPAN = re.compile(r"\d+(d|week|month|year)s?")
_HTTPS = re.compile(r"https://[^\s/@]+(/\S*)?")
_PATH = re.compile(r"/\S+")
_SIZE = re.compile(r"\d+[KMGT]")


class LokiSettings(Settings):
    """Grafana Loki and Alloy in place of systemd's own: there is nothing to choose yet."""


class ElasticsearchSettings(Settings):
    """An Elasticsearch that the site has, to which Filebeat sends."""

    hosts: list[Annotated[str, matches(_HTTPS, "an address: https://logs.example.org:9200")]] = Field(
        min_length=1
    )
    api_key: Secretive  # "ID:KEY", with the right to write to filebeat-*
    authority: Annotated[str, matches(_PATH, "an absolute path on the nodes")] | None = (
        None  # left out: theirs
    )


class LogsSettings(Settings):
    """The part of a site file that describes where nodes' journals are gathered: the first node of role monitor."""

    retention: Annotated[str, matches(_SPAN, "a time as journald writes it: 14d, 3month")] = "1month"
    size: Annotated[str, matches(_SIZE, "a size as journald writes it: 500M, 20G")] = "10G"  # Loki knows none
    loki: LokiSettings | None = None
    elasticsearch: ElasticsearchSettings | None = None  # neither: systemd-journal-remote

    @model_validator(mode="after")
    def _one_place(self) -> LogsSettings:
        if self.loki is not None and self.elasticsearch is not None:
            raise ValueError("logs go to one place: take loki or elasticsearch")
        return self
