"""Every node sends its journal to where the site wants it; nothing is lost while that is away."""

from __future__ import annotations

import json
from typing import Any

from provision.components.certificates import exports as certificates
from provision.components.logs import elastic, exports, filebeat, loki
from provision.components.logs.settings import LogsSettings
from provision.components.prometheus.exports import curl_config
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


def _elasticsearch(on: Context) -> None:
    repository(on, ELASTIC)
    ops.packages(*on.profile.packages("elasticsearch"))
    _private(elastic.CURL, curl_config(on.secrets[elastic.PASSWORD]))
    dropin = exports.dropin_path(f"{elastic.SERVER}.service")
    environment = on.profile.path("elasticsearch.environment")
    config = f"{elastic.FOLDER}/elasticsearch.yml"
    ops.directory(elastic.FOLDER, mode="770", group=elastic.SERVER)  # it keeps its keystore here, too
    ops.directory(f"{elastic.FOLDER}/jvm.options.d")
    ops.file(environment, elastic.environment())
    ops.file(config, elastic.elasticsearch_yml(on.site, on.node))
    # It looks at these every five seconds.
    _private(f"{elastic.FOLDER}/users", elastic.users(on.secrets), group=elastic.SERVER)
    ops.file(f"{elastic.FOLDER}/users_roles", elastic.users_roles())
    ops.file(f"{elastic.FOLDER}/roles.yml", elastic.roles_yml())
    ops.ensure(
        "a heap by the node's memory",
        test=f'[ "$(cat {elastic.HEAP} 2>/dev/null)" = "$({elastic.heap()})" ] || exit 1',
        make=f"({elastic.heap()}) >{elastic.HEAP}.new && mv -f {elastic.HEAP}.new {elastic.HEAP}",
        owns=(elastic.HEAP,),
    )
    ops.file(dropin, elastic.dropin())
    ops.unit(elastic.SERVER, reads=[dropin, environment, config, elastic.HEAP, certificates.CERTIFICATE])


def _kibana(on: Context) -> None:
    dropin = exports.dropin_path(f"{elastic.KIBANA}.service")
    _private(elastic.KIBANA_CONFIG, elastic.kibana_yml(on.node, on.secrets), group=elastic.KIBANA)
    ops.file(dropin, elastic.kibana_dropin())
    ops.unit(elastic.KIBANA, reads=[dropin, elastic.KIBANA_CONFIG, certificates.CERTIFICATE])
    ops.wait("Kibana answers", test=elastic.answers(on.node), timeout=300)
    for resource in elastic.resources(on.node, on.settings(LogsSettings)):
        ops.ensure(
            resource.title,
            test=elastic.is_there(resource),
            make=elastic.make(resource),
            stdin=json.dumps(resource.body).encode(),
            requires="curl",
        )


def _private(path: str, content: str, group: str | None = None) -> None:
    """A file with passwords, for root alone or for a service besides."""
    if group is None:
        ops.file(path, content, mode="600", secret=True)
    else:
        ops.file(path, content, mode="640", group=group, secret=True)


def _filebeat(on: Context, output: dict[str, Any]) -> None:
    repository(on, ELASTIC)
    ops.packages(*on.profile.packages("filebeat"))
    dropin = exports.dropin_path(f"{filebeat.UNIT}.service")
    config = filebeat.config_yml(on.site, on.node, output)
    ops.file(filebeat.CONFIG, config, mode="600", secret=True, validate="filebeat test config -c {}")
    ops.file(dropin, filebeat.dropin())
    ops.unit(filebeat.UNIT, reads=[dropin, filebeat.CONFIG])


@step("monitor", after=[("certificates", "self")])
def receive(on: Context) -> None:
    gathers = exports.collector(on.site)
    if gathers is None or gathers.name != on.node.name:
        return
    if exports.elsewhere(on.site) is not None:
        return
    if exports.by_elasticsearch(on.site):
        _elasticsearch(on)
        _kibana(on)
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
    elsewhere = exports.elsewhere(on.site)
    if elsewhere is not None and elsewhere.api_key is not None:
        key = reveal(on.site, elsewhere.api_key, "logs.elasticsearch.api_key")
        _filebeat(on, filebeat.to_theirs(elsewhere, key))
        return
    if to is not None and exports.by_elasticsearch(on.site):
        _filebeat(on, filebeat.to_ours(to, on.secrets[elastic.WRITER_PASSWORD]))
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
