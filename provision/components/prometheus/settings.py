"""Settings of monitoring: the Prometheus server, Alertmanager and the node exporter."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field

from provision.site.base import Settings
from provision.site.hidden import Secretive

_DURATION = re.compile(r"(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
_SIZE = re.compile(r"\d+(KB|MB|GB|TB|PB)")
_SMARTHOST = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):\d{1,5}")


def _duration(value: str) -> str:
    if not value or not _DURATION.fullmatch(value):
        raise ValueError('expected a duration as Prometheus writes it, such as "15s", "30d" or "1h30m"')
    return value


def _size(value: str) -> str:
    if not _SIZE.fullmatch(value):
        raise ValueError('expected a size with its unit, such as "512MB" or "50GB"')
    return value


def _smarthost(value: str) -> str:
    if not _SMARTHOST.fullmatch(value):
        raise ValueError('expected host:port of the mail server, such as "mail.example.org:587"')
    return value


Duration = Annotated[str, AfterValidator(_duration)]
Size = Annotated[str, AfterValidator(_size)]


class Mail(Settings):
    """Alerts by mail."""

    to: list[str] = Field(min_length=1)
    sender: str
    smarthost: Annotated[str, AfterValidator(_smarthost)]
    user: str | None = None
    password: Secretive | None = None
    require_tls: bool = True


class Slack(Settings):
    """Alerts to a Slack channel."""

    url: Secretive  # of an incoming webhook
    channel: str


class Alerts(Settings):
    """Where alerts go; every receiver that is named gets all of them."""

    webhook: Secretive | None = None  # URL that gets Alertmanager's JSON
    mail: Mail | None = None
    slack: Slack | None = None
    repeat: Duration = "4h"  # an alert that goes on is told again after this


class MonitoringSettings(Settings):
    """The part of a site file that describes monitoring."""

    retention: Duration = "30d"
    retention_size: Size | None = None  # the oldest data goes when there is more than this
    interval: Duration = "15s"  # between two scrapes of a target
    alerts: Alerts = Alerts()
