"""Elasticsearch on the collector takes the logs of all nodes, Kibana shows them. Pure.

"Elasticsearch" and "Kibana" are Elastic's documentation of version 9, as of December 2026. One node, which holds its
data by itself: transport listens on the loopback alone.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from shlex import quote
from typing import Any

import yaml

from provision.components.certificates import exports as certificates
from provision.components.logs.settings import LogsSettings
from provision.components.prometheus.exports import USER, hashed
from provision.engine.deploy import Secret
from provision.site.models import Node, Site
from provision.site.names import bracketed

PORT, KIBANA_PORT = 9200, 5601
SERVER, KIBANA = "elasticsearch", "kibana"  # units, and the users that they run as
FOLDER = "/etc/elasticsearch/provision"
KIBANA_CONFIG = "/etc/kibana/provision.yml"
CURL = "/etc/provision/elasticsearch.curl"  # root's: by it curl knows password and authority
HEAP = f"{FOLDER}/jvm.options.d/heap.options"
STREAM = "filebeat-journal"
NAME = "provision"  # of policy, template and data view

WRITER = "provision-filebeat"
_KIBANA_USER = "provision-kibana"
_WRITES = "provision-writer"
PASSWORD, KIBANA_PASSWORD, WRITER_PASSWORD, KIBANA_KEY = (
    "elasticsearch.password",
    "kibana.password",
    "filebeat.password",
    "kibana.key",
)
# user -> the secret that is the password, role (Elasticsearch, "Roles": superuser, kibana_system)
_USERS = {
    USER: (PASSWORD, "superuser"),
    _KIBANA_USER: (KIBANA_PASSWORD, "kibana_system"),
    WRITER: (WRITER_PASSWORD, _WRITES),
}
SECRETS = tuple(
    Secret(name, make=lambda: secrets.token_urlsafe(32).encode())
    for name in (PASSWORD, KIBANA_PASSWORD, WRITER_PASSWORD, KIBANA_KEY)
)


def url(node: Node) -> str:
    """Where Elasticsearch is reached, also on its own node."""
    return f"https://{bracketed(node.address or node.name)}:{PORT}"


def kibana_url(node: Node) -> str:
    return f"https://{bracketed(node.address or node.name)}:{KIBANA_PORT}"


def environment() -> str:
    """The packages' file of variables.

    Elasticsearch, "Configuring Elasticsearch", "Config files location": the place to name another folder, in which
    there are elasticsearch.yml, jvm.options and log4j2.properties. So the packages' own stay as they came, and what
    they make of security at their installation is of no account.
    """
    return f"ES_PATH_CONF={FOLDER}\n"


def dropin() -> str:
    """Elasticsearch with copies of what it needs: it reads certificates from its own folder alone."""
    needs = (
        "/etc/elasticsearch/jvm.options",
        "/etc/elasticsearch/log4j2.properties",
        certificates.CERTIFICATE,
        certificates.KEY,
    )
    return (
        f"[Service]\nExecStartPre=+/usr/bin/install -o root -g {SERVER} -m 640 -t {FOLDER} {' '.join(needs)}\n"
        "Restart=always\nRestartSec=5\n"
    )


def elasticsearch_yml(site: Site, node: Node) -> str:
    """Elasticsearch, "Networking", "Bootstrap checks" (single-node discovery), "Security settings" (http.ssl)."""
    document = {
        "cluster.name": f"{site.cluster}-logs",
        "node.name": node.name,
        "path.data": "/var/lib/elasticsearch",
        "path.logs": "/var/log/elasticsearch",
        "http.host": node.address or "0.0.0.0",
        "http.port": PORT,
        "transport.host": "127.0.0.1",
        "discovery.type": "single-node",
        "xpack.security.enabled": True,
        "xpack.security.http.ssl.enabled": True,
        "xpack.security.http.ssl.certificate": "node.crt",
        "xpack.security.http.ssl.key": "node.key",
        "xpack.security.http.ssl.supported_protocols": ["TLSv1.3", "TLSv1.2"],
        "xpack.ml.enabled": False,
        "ingest.geoip.downloader.enabled": False,  # nothing is fetched from elsewhere
    }
    return yaml.safe_dump(document, sort_keys=False)


def users(passwords: Mapping[str, bytes]) -> str:
    """Elasticsearch, "File-based user authentication": users, bcrypt as $2a$. `passwords` by name of the secret."""
    return "".join(
        f"{user}:{hashed(passwords[secret]).replace('$2b$', '$2a$', 1)}\n"
        for user, (secret, _) in _USERS.items()
    )


def users_roles() -> str:
    """Elasticsearch, "File-based user authentication": users_roles."""
    return "".join(f"{role}:{user}\n" for user, (_, role) in _USERS.items())


def roles_yml() -> str:
    """Elasticsearch, "Role management using files"; Filebeat, "Grant privileges and roles needed for publishing"."""
    may = {"names": [STREAM], "privileges": ["create_doc", "auto_configure"]}
    return yaml.safe_dump({_WRITES: {"cluster": ["monitor"], "indices": [may]}}, sort_keys=False)


def heap(meminfo: str = "/proc/meminfo") -> str:
    """Shell: prints the heap's options, a quarter of the node's memory; others work there, too.

    Elasticsearch, "Set the JVM heap size": both equal, at most half of the memory; 26 GB are safe for compressed
    pointers.
    """
    return (
        "awk '/^MemTotal:/ { h = int($2 / 4096); h = h > 26624 ? 26624 : h < 1024 ? 1024 : h; "
        f'printf "-Xms%dm\\n-Xmx%dm\\n", h, h }}\' {meminfo}'
    )


def kibana_yml(node: Node, passwords: Mapping[str, bytes]) -> str:
    """Kibana's configuration, with secrets in clear text: write it as a secret.

    Kibana, "General settings": server, elasticsearch; "Secure saved objects" and "Security settings": encryptionKey.
    Nobody gets in without a login: there is no anonymous provider unless one is configured.
    """
    _, key = certificates.credentials(KIBANA)
    document = {
        "server.host": node.address or "0.0.0.0",
        "server.port": KIBANA_PORT,
        "server.publicBaseUrl": kibana_url(node),
        "path.data": "/var/lib/kibana",
        "server.ssl.enabled": True,
        "server.ssl.certificate": certificates.CERTIFICATE,
        "server.ssl.key": key,
        "server.ssl.supportedProtocols": ["TLSv1.2", "TLSv1.3"],
        "elasticsearch.hosts": [url(node)],
        "elasticsearch.username": _KIBANA_USER,
        "elasticsearch.password": passwords[KIBANA_PASSWORD].decode(),
        "elasticsearch.ssl.certificateAuthorities": [certificates.AUTHORITY],
        "xpack.security.encryptionKey": passwords[KIBANA_KEY].decode(),
        "xpack.encryptedSavedObjects.encryptionKey": passwords[KIBANA_KEY].decode(),
        "telemetry.optIn": False,
    }
    return yaml.safe_dump(document, sort_keys=False)


def kibana_dropin() -> str:
    """Kibana by `kibana_yml`, with the node's key."""
    credential, _ = certificates.credentials(KIBANA)
    return (
        f"[Unit]\nAfter={SERVER}.service\nStartLimitIntervalSec=0\n\n[Service]\n{credential}\n"
        f"ExecStart=\nExecStart=/usr/share/kibana/bin/kibana --config {KIBANA_CONFIG}\nRestart=always\nRestartSec=5\n"
    )


def policy(settings: LogsSettings) -> dict[str, Any]:
    """Elasticsearch, "Index lifecycle actions": a new index each day, the old ones go after `retention`."""
    return {
        "policy": {
            "phases": {
                "hot": {"actions": {"rollover": {"max_age": "1d", "max_primary_shard_size": "50gb"}}},
                "delete": {"min_age": settings.hours, "actions": {"delete": {}}},
            }
        }
    }


def template() -> dict[str, Any]:
    """Elasticsearch, "Set up a data stream": what lines become; what is not named here is a word, not a text.

    Written as Elasticsearch answers it, see `is_there`.
    """
    words = {"match_mapping_type": "string", "mapping": {"type": "keyword", "ignore_above": 1024}}
    return {
        "index_patterns": [STREAM],
        "data_stream": {},
        "priority": 500,  # above those that Filebeat brings, 150
        "template": {
            "settings": {
                "index": {
                    "lifecycle": {"name": NAME},
                    "number_of_replicas": "0",
                    "codec": "best_compression",
                }
            },
            "mappings": {
                "dynamic_templates": [{"words": words}],
                "properties": {"@timestamp": {"type": "date"}, "message": {"type": "match_only_text"}},
            },
        },
    }


def data_view() -> dict[str, Any]:
    """Kibana API, "Create a data view"."""
    view = {"id": NAME, "name": "Logs of all nodes", "title": STREAM, "timeFieldName": "@timestamp"}
    return {"data_view": view, "override": True}


@dataclass(frozen=True)
class Resource:
    """Something that is set by an API: `body` is sent to `address`, which answers with at least `answer` afterwards."""

    title: str
    method: str
    address: str
    body: dict[str, Any]
    asked: str
    answer: dict[str, Any]


def resources(node: Node, settings: LogsSettings) -> tuple[Resource, Resource, Resource]:
    """The policy, the template that needs it, and what Kibana shows of both."""
    keeps = f"{url(node)}/_ilm/policy/{NAME}"
    makes = f"{url(node)}/_index_template/{NAME}"
    shows = f"{kibana_url(node)}/api/data_views/data_view"
    is_made = {"index_templates": [{"name": NAME, "index_template": template()}]}
    return (
        Resource("how long logs are kept", "PUT", keeps, policy(settings), keeps, {NAME: policy(settings)}),
        Resource("what lines become", "PUT", makes, template(), makes, is_made),
        Resource(
            "the data view in Kibana",
            "POST",
            shows,
            data_view(),
            f"{shows}/{NAME}",
            {"data_view": data_view()["data_view"]},
        ),
    )


_CURL = f"curl --config {CURL} --silent --show-error --fail-with-body --max-time 60 --noproxy '*' --globoff"

_HAS = """import json, sys
def has(there, wanted):
    if isinstance(wanted, dict):
        return isinstance(there, dict) and all(k in there and has(there[k], v) for k, v in wanted.items())
    if isinstance(wanted, list):
        return isinstance(there, list) and len(there) == len(wanted) and all(map(has, there, wanted))
    return there == wanted
try:
    sys.exit(not has(json.load(sys.stdin), json.loads(sys.argv[1])))
except ValueError:
    sys.exit(1)
"""


def is_there(resource: Resource) -> str:
    """Shell: exits 0 where the answer has all that is wanted, at any depth; else 1."""
    wanted = quote(json.dumps(resource.answer))
    return f"{_CURL} {quote(resource.asked)} | python3 -c {quote(_HAS)} {wanted} || exit 1"


def make(resource: Resource) -> str:
    """Shell: sends what stands on its standard input. Kibana takes nothing without its own header."""
    return (
        f"{_CURL} --request {resource.method} --header 'Content-Type: application/json' --header 'kbn-xsrf: true' "
        f"--data-binary @- --output /dev/null {quote(resource.address)}"
    )


def answers(node: Node) -> str:
    """Shell: exits 0 where Kibana is up, and so Elasticsearch. Kibana API, "Get Kibana's current status"."""
    return f"{_CURL} --output /dev/null {quote(f'{kibana_url(node)}/api/status')}"


def newest(node: Node, to: Node) -> str:
    """Shell, on the collector: the newest line of `node`. Elasticsearch, "Search API", query parameters."""
    query = quote(f'q=node:"{node.name}"')
    return (
        f"{_CURL} --get --data-urlencode {query} --data-urlencode sort=@timestamp:desc --data-urlencode size=1 "
        f"--data-urlencode _source=false --data-urlencode ignore_unavailable=true {url(to)}/{STREAM}/_search"
    )


def parse(text: str) -> float | None:
    """When the newest line of an answer was logged, in seconds since 1970; None without one. Raises ValueError."""
    document = json.loads(text)
    try:
        found = [int(hit["sort"][0]) for hit in document["hits"]["hits"]]
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"not an answer of Elasticsearch: {text[:80]!r}") from error
    return max(found) / 1e3 if found else None
