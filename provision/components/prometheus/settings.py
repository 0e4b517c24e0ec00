"""Settings of monitoring: the Prometheus server, Alertmanager and the node exporter."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field

from provision.components.dcgm_exporter.settings import DcgmExporterSettings
from provision.components.grafana.settings import GrafanaSettings
from provision.components.ipmi_exporter.settings import IpmiExporterSettings
from provision.components.slurm_exporter.settings import SlurmExporterSettings
from provision.site.base import Settings, matches
from provision.site.hidden import Secretive

_DURATION = re.compile(r"(?=\d)(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?")
_SIZE = re.compile(r"\d+(KB|MB|GB|TB|PB)")
_PATH = re.compile(r"/\S+")
_SMARTHOST = re.compile(r"(\[[0-9A-Fa-f:]+\]|[^\s:\[\]]+):\d{1,5}")


Duration = Annotated[str, matches(_DURATION, "a duration as Prometheus writes it: 15s, 30d, 1h30m")]
Size = Annotated[str, matches(_SIZE, "a size with its unit: 512MB, 50GB")]
Authority = Annotated[str, matches(_PATH, "an absolute path on the monitors")]
Smarthost = Annotated[str, matches(_SMARTHOST, "host:port of the mail server: mail.example.org:587")]


class Mail(Settings):
    """Alerts by mail."""

    to: list[str] = Field(min_length=1)
    sender: str
    smarthost: Smarthost
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


class RemoteWrite(Settings):
    """Another Prometheus, or what takes its samples, that gets all of them, too."""

    url: str
    user: str | None = None
    password: Secretive | None = None
    authority: Authority | None = None  # whose certificate it has; left out: one that the monitors know


class Federation(Settings):
    """Another Prometheus whose samples are taken over."""

    server: str  # host:port
    match: list[str] = Field(min_length=1)  # selectors: '{job="node"}'
    scheme: Literal["http", "https"] = "https"
    user: str | None = None
    password: Secretive | None = None
    authority: Authority | None = None


class MonitoringSettings(Settings):
    """The part of a site file that describes monitoring."""

    retention: Duration = "30d"
    retention_size: Size | None = None  # the oldest data goes when there is more than this
    interval: Duration = "15s"  # between two scrapes of a target
    alerts: Alerts = Alerts()
    remote_write: list[RemoteWrite] = Field(default_factory=list)
    federation: list[Federation] = Field(default_factory=list)
    slurm: SlurmExporterSettings = SlurmExporterSettings()
    dcgm: DcgmExporterSettings | None = None
    ipmi: IpmiExporterSettings | None = None
    grafana: GrafanaSettings | None = None
