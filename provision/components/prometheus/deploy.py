"""Puts the node exporter on every node, Alertmanager and Prometheus on the monitors."""

from __future__ import annotations

from provision.components.prometheus import exports
from provision.components.prometheus.service import serve
from provision.components.prometheus.settings import MonitoringSettings
from provision.components.storage import exports as storage
from provision.engine import ops
from provision.engine.deploy import Context, step

_GROUP = "prometheus"  # whom the packages run the services of the family as


@step("*", after=[("certificates", "self")])
def exporter(on: Context) -> None:
    unit, binary = on.profile.unit("node-exporter"), on.profile.path("node-exporter")
    textfiles = on.profile.path("node-exporter.textfiles")
    option = on.profile.option("node-exporter.web-config")
    ops.packages(*on.profile.packages("node-exporter"))
    ops.file(exports.CURL, exports.curl_config(on.secrets["monitoring.password"]), mode="600", secret=True)
    # Written by root's own timers and hooks, only read by the exporter.
    ops.directory(textfiles)
    fabric = on.site.file.networks.fabric
    dropin = exports.exporter_dropin(
        binary,
        textfiles,
        unit,
        option,
        on.node,
        _storage_units(on) if on.site.enabled("storage") else [],
        fabric=fabric is not None and fabric.kind in ("infiniband", "roce"),
        clock=on.limited("clock") is None,
    )
    serve(on, unit, dropin, group=_GROUP)
    ends = f"{textfiles}/{exports.CERTIFICATE_END}"
    ops.ensure(
        "the certificate's end as a metric",
        test=f'[ "$(cat {ends} 2>/dev/null)" = "$({exports.CERTIFICATE_END_SCRIPT})" ] || exit 1',
        make=f"({exports.CERTIFICATE_END_SCRIPT}) >{ends}.new && mv -f {ends}.new {ends}",
        owns=(ends,),
    )


def _storage_units(on: Context) -> list[str]:
    """Units of shared file systems on this node; a server that is only installed need not run."""
    mounts = [each.unit for each in storage.mounts(on.site, on.node)]
    serving = storage.serving_unit(on.site, on.node)
    return [*mounts, f"{on.profile.unit(serving)}.service"] if serving else mounts


@step("monitor", after=[("certificates", "self")])
def monitor(on: Context) -> None:
    _alertmanager(on)
    _server(on)


def _alertmanager(on: Context) -> None:
    unit, binary = on.profile.unit("alertmanager"), on.profile.path("alertmanager")
    # Before anything is changed: it fails where a secret that the site file names is not there.
    config = exports.alertmanager_yml(on.site, on.settings(MonitoringSettings))
    ops.packages(*on.profile.packages("alertmanager"))
    _private(exports.ALERTMANAGER_CONFIG, config, validate="amtool check-config {}")
    if len(on.site.with_role("monitor")) > 1:
        ops.file(exports.PEERS, exports.peers_yml(unit))
    data = on.profile.path("alertmanager.data")
    serve(on, unit, exports.alertmanager_dropin(binary, data, unit, on.site, on.node), group=_GROUP)
    ops.unit(unit, reads=[exports.ALERTMANAGER_CONFIG], reload=True)


def _server(on: Context) -> None:
    unit, binary = on.profile.unit("prometheus"), on.profile.path("prometheus")
    settings = on.settings(MonitoringSettings)
    ops.packages(*on.profile.packages("prometheus"))
    _private(exports.PASSWORD, on.secrets["monitoring.password"])
    # The server sees changes of these by itself; its configuration is only right where they exist.
    for job, groups in exports.targets(on.site).items():
        ops.file(exports.targets_path(job), exports.targets_json(groups), comment=None)
    for path, text in exports.rules().items():
        ops.file(path, text, validate="promtool check rules {}")
    _private(
        exports.CONFIG,
        exports.prometheus_yml(on.site, on.node, settings),
        validate="promtool check config {}",
    )
    data = on.profile.path("prometheus.data")
    serve(on, unit, exports.server_dropin(binary, data, unit, on.node, settings), group=_GROUP)
    # A restart would read the whole write-ahead log again.
    ops.unit(unit, reads=[exports.CONFIG, *exports.rules()], reload=True)


def _private(path: str, content: str | bytes, validate: str | None = None) -> None:
    """A file that the services of the family read, and nobody else."""
    ops.file(path, content, mode="640", group=_GROUP, secret=True, validate=validate)
