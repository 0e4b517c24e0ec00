"""Puts the node exporter on every node, Alertmanager and Prometheus on the monitors."""

from __future__ import annotations

from provision.components.prometheus import exports
from provision.components.prometheus.settings import MonitoringSettings
from provision.engine import ops
from provision.engine.deploy import Context, step


@step("*")
def exporter(on: Context) -> None:
    unit, binary = on.profile.unit("node-exporter"), on.profile.path("node-exporter")
    textfiles = on.profile.path("node-exporter.textfiles")
    ops.packages(*on.profile.packages("node-exporter"))
    # Written by root's own timers and hooks, only read by the exporter.
    ops.directory(textfiles)
    dropin = _dropin_path(unit)
    ops.file(dropin, exports.exporter_dropin(binary, textfiles, on.node))
    ops.unit(unit, reads=[dropin])


@step("monitor")
def monitor(on: Context) -> None:
    _alertmanager(on)
    _server(on)


def _alertmanager(on: Context) -> None:
    unit, binary = on.profile.unit("alertmanager"), on.profile.path("alertmanager")
    # Before anything is changed: it fails where a secret that the site file names is not there.
    config = exports.alertmanager_yml(on.site, on.settings(MonitoringSettings))
    ops.packages(*on.profile.packages("alertmanager"))
    ops.file(
        exports.ALERTMANAGER_CONFIG,
        config,
        mode="640",
        group="prometheus",
        secret=True,
        validate="amtool check-config {}",
    )
    dropin = _dropin_path(unit)
    data = on.profile.path("alertmanager.data")
    ops.file(dropin, exports.alertmanager_dropin(binary, data, on.site, on.node))
    ops.unit(unit, reads=[dropin])
    ops.unit(unit, reads=[exports.ALERTMANAGER_CONFIG], reload=True)


def _server(on: Context) -> None:
    unit, binary = on.profile.unit("prometheus"), on.profile.path("prometheus")
    settings = on.settings(MonitoringSettings)
    ops.packages(*on.profile.packages("prometheus"))
    # The server sees changes of these by itself; its configuration is only right where they exist.
    for job, groups in exports.targets(on.site).items():
        ops.file(exports.targets_path(job), exports.targets_json(groups), comment=None)
    ops.file(exports.RULES, exports.rules_yml(), validate="promtool check rules {}")
    ops.file(
        exports.CONFIG,
        exports.prometheus_yml(on.site, on.node, settings),
        validate="promtool check config {}",
    )
    dropin = _dropin_path(unit)
    data = on.profile.path("prometheus.data")
    ops.file(dropin, exports.server_dropin(binary, data, on.node, settings))
    ops.unit(unit, reads=[dropin])
    # A restart would read the whole write-ahead log again.
    ops.unit(unit, reads=[exports.CONFIG, exports.RULES], reload=True)


def _dropin_path(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.service.d/provision.conf"
