"""Filebeat on each node sends its journal to Elasticsearch: the collector's, or one that the site has. Pure.

"Filebeat" is its reference, version 9. OpenSearch cannot be had this way: what it documents as compatible ("Agents and
ingestion tools") ends with Filebeat OSS 7.12, which cannot read a journal yet.
"""

from __future__ import annotations

from typing import Any

import yaml

from provision.components.certificates import exports as certificates
from provision.components.logs import elastic, labels
from provision.components.logs.settings import ElasticsearchSettings
from provision.site.models import Node, Site

UNIT = "filebeat"
CONFIG = "/etc/filebeat/provision.yml"

_JOB = f"""function process(event) {{
  var unit = event.Get("systemd.unit"), message = event.Get("message");
  var speaks = event.Get("systemd.transport") === "kernel" || (unit && /^slurm/.test(unit));
  var job = speaks && message ? {labels.JAVASCRIPT}.exec(message) : null;
  if (job) {{ event.Put("slurm_job", job[1]); }}
}}
"""


def to_theirs(to: ElasticsearchSettings, api_key: str) -> dict[str, Any]:
    """To an Elasticsearch that the site has. Filebeat, "Configure the Elasticsearch output" (api_key, ssl)."""
    return {"output.elasticsearch": {"hosts": to.hosts, "api_key": api_key, "ssl": _ssl(to.authority)}}


def to_ours(to: Node, password: bytes) -> dict[str, Any]:
    """The output to the collector, which has policy and template already: nodes may add lines, and nothing else.

    Filebeat, "Configure the Elasticsearch output" (username, index), "Index lifecycle management", "Elasticsearch index
    template" (enabled).
    """
    return {
        "setup.ilm.enabled": False,
        "setup.template.enabled": False,
        "output.elasticsearch": {
            "hosts": [elastic.url(to)],
            "username": elastic.WRITER,
            "password": password.decode(),
            "index": elastic.STREAM,
            "ssl": _ssl(certificates.AUTHORITY),
        },
    }


def _ssl(authority: str | None) -> dict[str, Any]:
    return {
        "supported_protocols": ["TLSv1.2", "TLSv1.3"],
        **({"certificate_authorities": [authority]} if authority else {}),
    }


def config_yml(site: Site, node: Node, output: dict[str, Any]) -> str:
    """Filebeat's configuration, with the password of `output` in clear text: write it as a secret.

    Filebeat, "Journald input"; "Script processor". What was sent is known by the journal's cursor once Elasticsearch
    has it; it tries again as often as it takes.
    """
    document = {
        "filebeat.inputs": [
            {
                "type": "journald",
                "id": "provision",
                "seek": "head",
                "fields": {"cluster": site.cluster, "node": node.name},
                "fields_under_root": True,
                "processors": [{"script": {"lang": "javascript", "source": _JOB}}],
            }
        ],
        **output,
    }
    return yaml.safe_dump(document, sort_keys=False)


def dropin() -> str:
    """The packages' unit takes its configuration's path from the environment."""
    return (
        "[Unit]\nStartLimitIntervalSec=0\n\n"
        f'[Service]\nEnvironment="BEAT_CONFIG_OPTS=-c {CONFIG}"\nRestart=always\nRestartSec=5\n'
    )


def test() -> str:
    """Shell: whether Elasticsearch takes what this node would send. Filebeat, "Command reference", test."""
    return f"filebeat test output -c {CONFIG}"
