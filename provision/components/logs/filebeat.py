"""Filebeat on each node sends its journal to an Elasticsearch that the site has. Pure.

"Filebeat" is its reference, version 9. Releases from 7.13 on refuse to talk to OpenSearch.
"""

from __future__ import annotations

import yaml

from provision.components.logs.settings import ElasticsearchSettings
from provision.site.models import Node, Site

UNIT = "filebeat"
CONFIG = "/etc/filebeat/provision.yml"

_JOB = r"""function process(event) {
  var unit = event.Get("systemd.unit"), message = event.Get("message");
  var job = unit && message && /^slurm/.test(unit) ? /\bjob(?:id)?[=: ]+(\d+)/i.exec(message) : null;
  if (job) { event.Put("slurm_job", job[1]); }
}
"""


def config_yml(site: Site, node: Node, to: ElasticsearchSettings, api_key: str) -> str:
    """Filebeat's configuration, with the key in clear text: write it as a secret.

    Filebeat, "Journald input"; "Script processor"; "Configure the Elasticsearch output" (api_key, ssl). What was sent
    is known by the journal's cursor once Elasticsearch has it; it tries again as often as it takes.
    """
    output: dict[str, object] = {"hosts": to.hosts, "api_key": api_key}
    output["ssl"] = {
        "supported_protocols": ["TLSv1.2", "TLSv1.3"],
        **({"certificate_authorities": [to.authority]} if to.authority else {}),
    }
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
        "output.elasticsearch": output,
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
