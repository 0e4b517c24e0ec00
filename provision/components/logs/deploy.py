"""Every node sends its journal to where the site wants it; nothing is lost while that is away."""

from __future__ import annotations

from provision.components.certificates import exports as certificates
from provision.components.logs import exports, filebeat, loki
from provision.components.logs.settings import ElasticsearchSettings, LogsSettings
from provision.components.vendor import ELASTIC, GRAFANA, repository
from provision.engine import ops
from provision.engine.deploy import Context, step
from provision.site.hidden import reveal
from provision.site.models import Node


def _loki(on: Context) -> None:
    repository(on, GRAFANA)
    ops.packages(*on.profile.packages("loki"))
    dropin = exports.dropin_path(f"{loki.LOKI}.service")
    config = loki.loki_yml(on.node, on.settings(LogsSettings))
    ops.file(loki.CONFIG, config, validate="loki -verify-config -config.file={}")
    ops.file(dropin, loki.loki_dropin())
    ops.unit(loki.LOKI, reads=[dropin, loki.CONFIG, certificates.CERTIFICATE])


def _alloy(on: Context, to: Node) -> None:
    repository(on, GRAFANA)
    ops.packages(*on.profile.packages("alloy"))
    dropin = exports.dropin_path(f"{loki.ALLOY}.service")
    ops.file(loki.ALLOY_CONFIG, loki.alloy(on.site, on.node, to), validate="alloy fmt {}", comment="//")
    ops.file(dropin, loki.alloy_dropin())
    ops.unit(loki.ALLOY, reads=[dropin, loki.ALLOY_CONFIG, certificates.CERTIFICATE])


def _filebeat(on: Context, to: ElasticsearchSettings) -> None:
    repository(on, ELASTIC)
    ops.packages(*on.profile.packages("filebeat"))
    dropin = exports.dropin_path(f"{filebeat.UNIT}.service")
    key = reveal(on.site, to.api_key, "logs.elasticsearch.api_key")
    config = filebeat.config_yml(on.site, on.node, to, key)
    ops.file(filebeat.CONFIG, config, mode="600", secret=True, validate="filebeat test config -c {}")
    ops.file(dropin, filebeat.dropin())
    ops.unit(filebeat.UNIT, reads=[dropin, filebeat.CONFIG])


@step("monitor", after=[("certificates", "self")])
def receive(on: Context) -> None:
    gathers = exports.collector(on.site)
    if gathers is None or gathers.name != on.node.name:
        return
    if exports.elasticsearch(on.site) is not None:
        return
    if exports.by_loki(on.site):
        _loki(on)
        return
    ops.packages(*on.profile.packages("journal-remote"), *on.profile.packages("stunnel"))
    ops.directory(exports.FOLDER, user="systemd-journal-remote", group="systemd-journal-remote")
    receiver, socket = exports.dropin_path(exports.RECEIVER), exports.dropin_path(exports.SOCKET)
    ops.file(receiver, exports.receiver_dropin(on.profile.path("journal-remote")))
    ops.file(socket, exports.socket_dropin())
    ops.unit(exports.SOCKET, reads=[socket])
    ops.unit(exports.RECEIVER, enabled=False, reads=[receiver])
    gate = f"/etc/systemd/system/{exports.GATE}"
    ops.file(exports.GATE_CONFIG, exports.gate_conf(on.node))
    ops.file(gate, exports.gate_unit(on.profile.path("stunnel")))
    ops.unit(exports.GATE, reads=[gate, exports.GATE_CONFIG, certificates.CERTIFICATE])
    units = exports.keeper_units(on.settings(LogsSettings))
    for path, text in units.items():
        ops.file(path, text)
    ops.unit(exports.KEEPER, reads=list(units))


@step("*", after=[("certificates", "self")])
def send(on: Context) -> None:
    to = exports.collector(on.site)
    elsewhere = exports.elasticsearch(on.site)
    if elsewhere is not None:
        _filebeat(on, elsewhere)
        return
    if to is not None and exports.by_loki(on.site):
        _alloy(on, to)
        return
    if to is None or to.name == on.node.name:  # its own journal lies beside the gathered ones
        return
    ops.packages(*on.profile.packages("journal-remote"))
    dropin = exports.dropin_path(exports.SENDER)
    ops.file(exports.SENDER_CONFIG, exports.sender_conf(to))
    ops.file(dropin, exports.sender_dropin(on.profile.path("journal-upload")))
    ops.unit(exports.SENDER, reads=[dropin, exports.SENDER_CONFIG, certificates.CERTIFICATE])
