"""Loki takes the logs of all nodes, Alloy on each node reads its journal and sends it. Pure.

"Loki" is Grafana Loki's documentation, "Alloy" that of Grafana Alloy, as of version 3.5 and 1.9.
"""

from __future__ import annotations

import json

import yaml

from provision.components.certificates import exports as certificates
from provision.components.logs import labels
from provision.components.logs.settings import LogsSettings
from provision.site.models import Node, Site
from provision.site.names import bracketed

PORT = 3100
LOKI, ALLOY = "loki", "alloy"  # units
CONFIG = "/etc/loki/provision.yml"
ALLOY_CONFIG = "/etc/alloy/provision.alloy"
_BACKLOG = "168h"  # a node that was away for a week still sends what it logged


def url(node: Node) -> str:
    """Where Loki is reached, also on its own node."""
    return f"https://{bracketed(node.address or node.name)}:{PORT}"


def loki_yml(node: Node, settings: LogsSettings) -> str:
    """One process that does everything, with files for a store; only certificates of this cluster may ask or send.

    Loki, "Grafana Loki configuration parameters": server, common, schema_config, limits_config; "Log retention":
    compactor.
    """
    _, key = certificates.credentials(LOKI)
    document = {
        "auth_enabled": False,  # one tenant; who may talk to it is decided by TLS
        "server": {
            "http_listen_address": node.address or "",
            "http_listen_port": PORT,
            "grpc_listen_address": "127.0.0.1",
            "grpc_listen_port": 9095,
            "http_tls_config": {
                "cert_file": certificates.CERTIFICATE,
                "key_file": key,
                "client_auth_type": "RequireAndVerifyClientCert",
                "client_ca_file": certificates.AUTHORITY,
            },
            "tls_min_version": "VersionTLS12",
        },
        "common": {
            "instance_addr": "127.0.0.1",
            "path_prefix": "/var/lib/loki",
            "replication_factor": 1,
            "ring": {"kvstore": {"store": "inmemory"}},
            "storage": {
                "filesystem": {
                    "chunks_directory": "/var/lib/loki/chunks",
                    "rules_directory": "/var/lib/loki/rules",
                }
            },
        },
        "schema_config": {
            "configs": [
                {
                    "from": "2024-01-01",
                    "store": "tsdb",
                    "object_store": "filesystem",
                    "schema": "v13",
                    "index": {"prefix": "index_", "period": "24h"},
                }
            ]
        },
        "limits_config": {
            "retention_period": settings.hours,
            "reject_old_samples_max_age": _BACKLOG,
            "allow_structured_metadata": True,
        },
        "compactor": {
            "working_directory": "/var/lib/loki/compactor",
            "retention_enabled": True,
            "delete_request_store": "filesystem",
        },
        "analytics": {"reporting_enabled": False},
    }
    return yaml.safe_dump(document, sort_keys=False)


def alloy(site: Site, node: Node, to: Node) -> str:
    """What a node sends: its journal, labelled by node and unit; the job of Slurm's and the kernel's lines beside it.

    Alloy, "loki.source.journal", "loki.relabel", "loki.process" (stage.structured_metadata: a label for each job would
    be too many), "loki.write" (max_backoff_retries 0: as often as it takes).
    """
    _, key = certificates.credentials(ALLOY)
    rules = "\n".join(
        f"  rule {{\n    source_labels = [{_quoted(source)}]\n    target_label  = {_quoted(label)}\n  }}"
        for source, label in (
            ("__journal__systemd_unit", "unit"),
            ("__journal__transport", "transport"),
            ("__journal_priority_keyword", "level"),
        )
    )
    jobs = "\n".join(
        f"""  stage.match {{
    selector = {_quoted(selector)}
    stage.regex {{
      expression = {_quoted(labels.GO)}
    }}
    stage.structured_metadata {{
      values = {{slurm_job = ""}}
    }}
  }}"""
        for selector in ('{unit=~"slurm.+"}', '{transport="kernel"}')
    )
    return f"""logging {{
  level = "warn"
}}

loki.relabel "journal" {{
  forward_to = []
{rules}
}}

loki.source.journal "node" {{
  max_age       = "{_BACKLOG}"
  relabel_rules = loki.relabel.journal.rules
  labels        = {{cluster = {_quoted(site.cluster)}, node = {_quoted(node.name)}}}
  forward_to    = [loki.process.jobs.receiver]
}}

loki.process "jobs" {{
{jobs}
  forward_to = [loki.write.collector.receiver]
}}

loki.write "collector" {{
  endpoint {{
    url                 = {_quoted(f"{url(to)}/loki/api/v1/push")}
    max_backoff_retries = 0
    tls_config {{
      ca_file     = {_quoted(certificates.AUTHORITY)}
      cert_file   = {_quoted(certificates.CERTIFICATE)}
      key_file    = {_quoted(key)}
      min_version = "TLS12"
    }}
  }}
}}
"""


def _quoted(text: str) -> str:
    return json.dumps(text)


def loki_dropin() -> str:
    """Loki by `loki_yml`, with the node's key."""
    credential, _ = certificates.credentials(LOKI)
    return (
        f"[Service]\n{credential}\nStateDirectory=loki\n"
        f"ExecStart=\nExecStart=/usr/bin/loki -config.file={CONFIG}\nRestart=always\nRestartSec=5\n"
    )


def alloy_dropin() -> str:
    """Alloy by `alloy`. Alloy, "loki.source.journal": its user must be in adm and systemd-journal."""
    credential, _ = certificates.credentials(ALLOY)
    return (
        "[Unit]\nWants=network-online.target\nAfter=network-online.target\nStartLimitIntervalSec=0\n\n"
        f"[Service]\n{credential}\nSupplementaryGroups=adm systemd-journal\n"
        "ExecStart=\nExecStart=/usr/bin/alloy run --disable-reporting --server.http.listen-addr=127.0.0.1:12345 "
        f"--storage.path=/var/lib/alloy/data {ALLOY_CONFIG}\nRestart=always\nRestartSec=5\n"
    )


def newest(node: Node, to: Node) -> str:
    """Shell, on the collector: Loki's newest line of `node` within the last hours, as its API answers.

    Loki, "Loki HTTP API", "Query logs within a range of time".
    """
    query = f"{{node={_quoted(node.name)}}}"
    return (
        f"curl --silent --show-error --fail-with-body --max-time 20 --get --cacert {certificates.AUTHORITY} "
        f"--cert {certificates.CERTIFICATE} --key {certificates.KEY} --data-urlencode 'query={query}' "
        f"--data-urlencode since=6h --data-urlencode limit=1 {url(to)}/loki/api/v1/query_range"
    )


def parse(text: str) -> float | None:
    """When the newest line of an answer was logged, in seconds since 1970; None without one. Raises ValueError."""
    document = json.loads(text)
    try:
        found = [int(at) for stream in document["data"]["result"] for at, *_ in stream["values"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an answer of Loki: {text[:80]!r}") from error
    return max(found) / 1e9 if found else None
