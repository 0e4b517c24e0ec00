"""Do the journals of all nodes arrive where they are gathered?"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from provision.components.certificates.exports import AUTHORITY
from provision.components.logs import elastic, exports, filebeat, loki
from provision.report.model import Verdict
from provision.site.models import Node
from provision.verify.check import Found, Target, check, expect, skip, unknown
from provision.verify.http import get, status
from provision.verify.systemd import unit_runs

_ON_THE_WAY = 15  # seconds: a node sends what it logs at once


class _Unreadable(Exception):
    """A journal that could not be asked, with the reason."""


@check("logs-arrive")
def arrive(at: Target) -> Found:
    """The node's newest line, but for those that may be on the way, is where journals are gathered."""
    if exports.elsewhere(at.site) is not None:
        return _taken_elsewhere(at)
    gathers = exports.collector(at.site)
    by_journal = not (exports.by_loki(at.site) or exports.by_elasticsearch(at.site))
    if gathers is None or (gathers.name == at.node.name and by_journal):
        return skip("its journal lies beside the gathered ones")
    other = at.on(gathers.name)
    if other is None:
        return unknown(f"{gathers.name} is unreachable", source=gathers.name)
    name = at.host.run("hostname").stdout.strip()
    match = f"_HOSTNAME={name}"
    try:
        here = _newest(at.host, f"journalctl {match} --until=-{_ON_THE_WAY}s")
        there = _gathered(at, other, match, gathers)
    except _Unreadable as error:
        return unknown(str(error), source="journalctl")
    if here is None:
        return unknown("its own journal is empty", source="journalctl")
    wanted = f"its lines until {here:%H:%M:%S.%f} UTC"
    source, sender = _way(at, gathers)
    if there is not None and there >= here.replace(microsecond=here.microsecond // 1000 * 1000):
        return Found(Verdict.PASS, wanted, wanted, source=source)
    return Found(
        Verdict.FAIL,
        "nothing of it" if there is None else f"its lines until {there:%H:%M:%S.%f} UTC",
        wanted,
        action=f"on {at.node.name}: systemctl status {sender}; nothing is lost, it goes on where it stopped",
        source=source,
    )


@check("logs-collector", role="monitor")
def listens(at: Target) -> Found:
    """What takes the journals runs, and what bounds them."""
    gathers = exports.collector(at.site)
    if exports.elsewhere(at.site) is not None:
        return skip("logs go to the site's own Elasticsearch")
    if gathers is None or gathers.name != at.node.name:
        return skip("journals are gathered on the first monitor")
    if exports.by_loki(at.site):
        return unit_runs(at, f"{loki.LOKI}.service")
    if exports.by_elasticsearch(at.site):
        return _elasticsearch(at)
    units = (exports.GATE, exports.SOCKET, exports.RECEIVER, exports.KEEPER)
    answer = at.host.run(f"systemctl show -p ActiveState --value {' '.join(units)}")
    states = answer.stdout.split()
    if answer.rc != 0 or len(states) != len(units):
        return unknown(answer.stderr.strip() or f"systemctl: {answer.stdout!r}", source="systemctl show")
    down = [f"{unit} is {state}" for unit, state in zip(units, states, strict=True) if state != "active"]
    return expect(
        ", ".join(down) or "all its units are active",
        "all its units are active",
        action=f"journalctl -u {exports.GATE} -u {exports.RECEIVER}",
        source="systemctl show",
    )


def _elasticsearch(at: Target) -> Found:
    """Elasticsearch and Kibana run, can write, and say nothing without a login."""
    for unit in (elastic.SERVER, elastic.KIBANA):
        runs = unit_runs(at, f"{unit}.service")
        if runs.verdict is not Verdict.PASS:
            return runs
    health = f"{elastic.url(at.node)}/_cluster/health?filter_path=status"
    answer = get(at.host, health, elastic.CURL)
    if answer.text is None:
        return unknown(answer.error, source=health)
    read = ["can write" if re.search('"(green|yellow)"', answer.text) else answer.text.strip()]
    for name, address in (
        ("Elasticsearch", elastic.url(at.node)),
        ("Kibana", f"{elastic.kibana_url(at.node)}/api/data_views"),
    ):
        stranger = status(at.host, address, f"--cacert {AUTHORITY}")
        if stranger.text is None:
            return unknown(stranger.error, source=address)
        if stranger.text.strip() != "401":
            read.append(f"{name} answers without a login ({stranger.text.strip()})")
    return expect(
        "; ".join(read),
        "can write",
        action=f"journalctl -u {elastic.SERVER} -u {elastic.KIBANA}; provision apply --component logs",
        source=health,
    )


def _way(at: Target, gathers: Node) -> tuple[str, str]:
    """Where lines are gathered, and the unit that sends them there."""
    if exports.by_loki(at.site):
        return f"Loki on {gathers.name}", loki.ALLOY
    if exports.by_elasticsearch(at.site):
        return f"Elasticsearch on {gathers.name}", filebeat.UNIT
    return f"{exports.FOLDER} on {gathers.name}", exports.SENDER


def _taken_elsewhere(at: Target) -> Found:
    """Filebeat runs, and Elasticsearch takes what it would send."""
    runs = unit_runs(at, f"{filebeat.UNIT}.service")
    if runs.verdict is not Verdict.PASS:
        return runs
    answer = at.host.run(filebeat.test())
    if answer.rc == 127:
        return unknown(answer.stderr.strip(), source=filebeat.test())
    said = (answer.stderr or answer.stdout).strip().splitlines()
    return expect(
        "taken" if answer.rc == 0 else said[-1] if said else f"exit {answer.rc}",
        "taken",
        action=f"on {at.node.name}: journalctl -u {filebeat.UNIT}; is the key of logs.elasticsearch still valid?",
        source=filebeat.test(),
    )


def _gathered(at: Target, collector: Any, match: str, gathers: Node) -> datetime | None:
    """When the newest line of the node that was gathered was logged. Raises _Unreadable."""
    if exports.by_loki(at.site):
        ask, parse = loki.newest, loki.parse
    elif exports.by_elasticsearch(at.site):
        ask, parse = elastic.newest, elastic.parse
    else:
        # without the folder nothing has come from any node yet
        return _newest(
            collector, f"[ ! -d {exports.FOLDER} ] || journalctl --directory={exports.FOLDER} {match}"
        )
    answer = collector.run(ask(at.node, gathers))
    if answer.rc != 0:
        raise _Unreadable(f"curl: {answer.stderr.strip() or answer.stdout.strip()[:200]}")
    try:
        moment = parse(answer.stdout)
    except ValueError as error:
        raise _Unreadable(str(error)) from error
    return None if moment is None else datetime.fromtimestamp(moment, UTC)


def _newest(host: Any, command: str) -> datetime | None:
    """When the newest entry of a journal was logged, None where it has none. Raises _Unreadable."""
    answer = host.run(f"{command} --no-pager --quiet --lines=1 --output=json")
    if answer.rc not in (0, 1) or (answer.rc == 1 and answer.stderr.strip()):
        raise _Unreadable(answer.stderr.strip() or f"journalctl: exit status {answer.rc}")
    try:
        entries = exports.parse(answer.stdout)
    except ValueError as error:
        raise _Unreadable(str(error)) from error
    return entries[-1].at if entries else None
