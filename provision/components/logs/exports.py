"""Where nodes' journals are gathered, and how they are asked. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from shlex import quote
from typing import Any

from provision.components.certificates import exports as certificates
from provision.components.exported import Port
from provision.components.logs import elastic, labels, loki
from provision.components.logs.settings import ElasticsearchSettings, LogsSettings
from provision.engine.deploy import Secret
from provision.site.models import Node, Site
from provision.site.names import bracketed
from provision.site.problem import Problem

PORT = 19532

FOLDER = "/var/log/journal/remote"  # where `journalctl --merge` looks, too
USER = "systemd-journal-remote"
RECEIVER, SOCKET, SENDER, GATE, KEEPER = (
    "systemd-journal-remote.service",
    "systemd-journal-remote.socket",
    "systemd-journal-upload.service",
    "provision-logs-gate.service",
    "provision-logs-keep.timer",
)
SENDER_CONFIG = "/etc/systemd/journal-upload.conf.d/provision.conf"
GATE_CONFIG = "/etc/provision/logs-gate.conf"
_INSIDE = "/run/provision-logs.socket"


def collector(site: Site) -> Node | None:
    """The node that gathers the journals: the first monitor; None where there is none."""
    return next(iter(site.with_role("monitor")), None)


def by_loki(site: Site) -> bool:
    """Whether logs go to Loki, and not to a journal."""
    section = site.section("logs")
    return isinstance(section, LogsSettings) and section.loki is not None


def by_elasticsearch(site: Site) -> bool:
    """Whether logs go to an Elasticsearch on the collector."""
    section = _elasticsearch(site)
    return section is not None and not section.hosts


def elsewhere(site: Site) -> ElasticsearchSettings | None:
    """The Elasticsearch that the site has, where logs go there."""
    section = _elasticsearch(site)
    return section if section is not None and section.hosts else None


def _elasticsearch(site: Site) -> ElasticsearchSettings | None:
    section = site.section("logs")
    return section.elasticsearch if isinstance(section, LogsSettings) else None


def SECRETS(site: Site) -> tuple[Secret, ...]:
    return elastic.SECRETS if by_elasticsearch(site) else ()


def PORTS(site: Site) -> tuple[Port, ...]:
    if elsewhere(site) is not None:
        return ()
    if by_elasticsearch(site):
        return (
            Port(elastic.PORT, "monitor", "Elasticsearch"),
            Port(elastic.KIBANA_PORT, "monitor", "Kibana"),
        )
    if by_loki(site):
        return (Port(loki.PORT, "monitor", "Loki"),)
    return (Port(PORT, "monitor", "journals of nodes"),)


def dropin_path(unit: str) -> str:
    return f"/etc/systemd/system/{unit}.d/provision.conf"


def gate_conf(node: Node) -> str:
    """stunnel's configuration: only who has a certificate of this cluster may send.

    systemd's receiver cannot see to that where it is built without GnuTLS, as Debian's is.
    """
    where = f"{bracketed(node.address)}:{PORT}" if node.address else str(PORT)
    return (
        "foreground = yes\nsyslog = no\npid =\nsslVersionMin = TLSv1.2\n\n"
        f"[journals]\naccept = {where}\nconnect = {_INSIDE}\nTIMEOUTclose = 0\n"
        f"cert = {certificates.CERTIFICATE}\nkey = {_key(GATE)}\n"
        f"CAfile = {certificates.AUTHORITY}\nverifyChain = yes\n"
    )


def gate_unit(binary: str) -> str:
    return (
        "[Unit]\nDescription=Takes journals of nodes, by TLS\n"
        f"Wants=network-online.target {SOCKET}\nAfter=network-online.target {SOCKET}\n"
        "StartLimitIntervalSec=0\n\n"
        f"[Service]\nExecStart={binary} {GATE_CONFIG}\nUser={USER}\n{_credential(GATE)}\n"
        "Restart=always\nRestartSec=5\nNoNewPrivileges=yes\nProtectSystem=strict\nProtectHome=yes\n"
        "PrivateDevices=yes\nPrivateTmp=yes\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def receiver_dropin(binary: str) -> str:
    """Behind the gate, all nodes' lines go into one journal: each names its host."""
    return (
        f"[Unit]\nStartLimitIntervalSec=0\n\n[Service]\nExecStart=\n"
        f"ExecStart={binary} --listen-http=-3 --split-mode=none --output={FOLDER}/nodes.journal\n"
        "Restart=always\nRestartSec=5\n"
    )


def socket_dropin() -> str:
    return (
        "[Unit]\nStartLimitIntervalSec=0\n\n"
        f"[Socket]\nListenStream=\nListenStream={_INSIDE}\nSocketUser={USER}\nSocketMode=0600\n"
    )


def sender_conf(to: Node) -> str:
    """journal-upload.conf: what was sent last is kept on the node, so a collector that was away gets all of it."""
    return (
        f"[Upload]\nURL=https://{bracketed(to.address or to.name)}:{PORT}\n"
        f"ServerKeyFile={_key(SENDER)}\nServerCertificateFile={certificates.CERTIFICATE}\n"
        f"TrustedCertificateFile={certificates.AUTHORITY}\n"
    )


def sender_dropin(binary: str) -> str:
    """It has the node's key, and tries again as often as it takes.

    systemd's sender ends where nobody takes what it has; the unit stays up, so that a collector that is away or comes
    later fails no node. Whether lines arrive is for the check to say.
    """
    return (
        "[Unit]\nWants=network-online.target\nAfter=network-online.target\nStartLimitIntervalSec=0\n\n"
        f"[Service]\n{_credential(SENDER)}\nType=exec\nWatchdogSec=0\n"
        f"ExecStart=\nExecStart=/bin/sh -c 'while :; do {binary} --save-state; sleep 5; done'\n"
        "Restart=always\nRestartSec=5\n"
    )


def keeper_units(settings: LogsSettings) -> dict[str, str]:
    """What bounds the gathered journals: path -> unit file. Receivers before systemd 253 have no limit of their own."""
    vacuum = (
        f"journalctl --directory={FOLDER} --vacuum-time={settings.retention} --vacuum-size={settings.size}"
    )
    return {
        "/etc/systemd/system/provision-logs-keep.service": (
            f"[Unit]\nDescription=Bound the journals gathered from nodes\n\n"
            f"[Service]\nType=oneshot\nExecStart=/usr/bin/{vacuum}\n"
        ),
        "/etc/systemd/system/provision-logs-keep.timer": (
            "[Unit]\nDescription=Bound the journals gathered from nodes every hour\n\n"
            "[Timer]\nOnCalendar=hourly\nPersistent=true\n\n[Install]\nWantedBy=timers.target\n"
        ),
    }


def problems(site: Site) -> Iterator[Problem]:
    """`logs` needs somebody to gather them."""
    if collector(site) is None and elsewhere(site) is None:
        yield Problem(
            "logs-collector", ("logs",), why="no node has the role monitor", action="give the head that role"
        )


def _credential(unit: str) -> str:
    return certificates.credentials(unit.removesuffix(".service"))[0]


def _key(unit: str) -> str:
    return certificates.credentials(unit.removesuffix(".service"))[1]


@dataclass(frozen=True)
class Query:
    """What to look for. Times as journalctl understands them: "2026-03-01 12:00", "-2h", "yesterday"."""

    nodes: Sequence[str] = ()
    units: Sequence[str] = ()
    kernel: bool = False
    since: str | None = None
    until: str | None = None
    grep: str | None = None
    priority: str | None = None
    lines: int | None = None


@dataclass(frozen=True)
class Entry:
    """One line of a node's journal."""

    at: datetime
    node: str
    source: str  # what it calls itself, or its unit
    priority: int | None
    message: str
    job: str | None = None  # of Slurm, where the line names one


_FIELDS = "_HOSTNAME,_SYSTEMD_UNIT,SYSLOG_IDENTIFIER,PRIORITY,MESSAGE"


def command(query: Query) -> str:
    """The shell text that asks the collector: matches of one kind are alternatives, kinds narrow each other."""
    words = ["journalctl", "--merge", "--no-pager", "--quiet", "--output=json", f"--output-fields={_FIELDS}"]
    if query.since:
        words.append(f"--since={query.since}")
    if query.until:
        words.append(f"--until={query.until}")
    if query.grep is not None:
        words.append(f"--grep={query.grep}")
    if query.priority:
        words.append(f"--priority={query.priority}")
    if query.lines is not None:
        words.append(f"--lines={query.lines}")
    if query.kernel:
        words.append("_TRANSPORT=kernel")
    words += [f"_SYSTEMD_UNIT={unit if '.' in unit else f'{unit}.service'}" for unit in query.units]
    words += [f"_HOSTNAME={node}" for node in query.nodes]
    # journalctl: 1 and nothing said when nothing was found
    return " ".join(map(quote, words))


def parse(text: str) -> list[Entry]:
    """Entries from journalctl's JSON lines, by time. Raises ValueError for a line that is none.

    Gathered lines stand in the order in which they arrived.
    """
    found = [_entry(json.loads(line)) for line in text.splitlines() if line.strip()]
    return sorted(found, key=lambda entry: entry.at)


def _entry(fields: Any) -> Entry:
    if not isinstance(fields, dict) or not str(fields.get("__REALTIME_TIMESTAMP", "")).isdigit():
        raise ValueError(f"expected an entry of a journal, read {str(fields)[:80]}")
    unit = _text(fields.get("_SYSTEMD_UNIT")).removesuffix(".service")
    priority = _text(fields.get("PRIORITY"))
    source, message = _text(fields.get("SYSLOG_IDENTIFIER")) or unit, _text(fields.get("MESSAGE"))
    return Entry(
        datetime.fromtimestamp(int(fields["__REALTIME_TIMESTAMP"]) / 1e6, UTC),
        _text(fields.get("_HOSTNAME")),
        source,
        int(priority) if priority.isdecimal() else None,
        message,
        labels.job(source, message),
    )


def _text(value: Any) -> str:
    """A field: text, a list of bytes where it is not printable, or a list of several values."""
    if isinstance(value, list):
        if all(isinstance(each, int) and 0 <= each < 256 for each in value):
            return bytes(value).decode("utf-8", "replace")
        return " ".join(map(_text, value))
    return "" if value is None else str(value)


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def printable(message: str) -> str:
    """A message that cannot play with the terminal of who reads it."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", message.rstrip("\n"))
