"""Settings of the central journal."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field, model_validator

from provision.site.base import Settings, matches
from provision.site.hidden import Secretive

_SPAN = re.compile(r"(\d+)(d|week|month|year)s?")
_HOURS = {"d": 24, "week": 168, "month": 730, "year": 8766}
_HTTPS = re.compile(r"https://[^\s/@]+(/\S*)?")
_PATH = re.compile(r"/\S+")
_SIZE = re.compile(r"\d+[KMGT]")


class LokiSettings(Settings):
    """Grafana Loki and Alloy in place of systemd's own: there is nothing to choose yet."""


class ElasticsearchSettings(Settings):
    """Elasticsearch, to which Filebeat sends: on the collector, with Kibana; with `hosts` one that the site has."""

    hosts: list[Annotated[str, matches(_HTTPS, "an address: https://logs.example.org:9200")]] = Field(
        default_factory=list
    )
    api_key: Secretive | None = None  # "ID:KEY", with the right to write to filebeat-*
    authority: Annotated[str, matches(_PATH, "an absolute path on the nodes")] | None = (
        None  # left out: theirs
    )

    @model_validator(mode="after")
    def _whose(self) -> ElasticsearchSettings:
        if self.hosts and self.api_key is None:
            raise ValueError("api_key is missing: how nodes log in at the site's own Elasticsearch")
        if not self.hosts and (self.api_key is not None or self.authority is not None):
            raise ValueError("api_key and authority are of the site's own Elasticsearch: name its hosts")
        return self


class LogsSettings(Settings):
    """The part of a site file that describes where nodes' journals are gathered: the first node of role monitor."""

    retention: Annotated[str, matches(_SPAN, "a time as journald writes it: 14d, 3month")] = "1month"
    size: Annotated[str, matches(_SIZE, "a size as journald writes it: 500M, 20G")] = (
        "10G"  # of a journal alone
    )
    loki: LokiSettings | None = None
    elasticsearch: ElasticsearchSettings | None = None  # neither: systemd-journal-remote

    @property
    def hours(self) -> str:
        """`retention` as Loki and Elasticsearch write it: "1460h" for "2month"."""
        found = _SPAN.fullmatch(self.retention)
        assert found is not None, "checked with the site file"
        return f"{int(found[1]) * _HOURS[found[2]]}h"

    @model_validator(mode="after")
    def _one_place(self) -> LogsSettings:
        if self.loki is not None and self.elasticsearch is not None:
            raise ValueError("logs go to one place: take loki or elasticsearch")
        return self
