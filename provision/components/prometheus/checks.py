"""Looks at monitoring as it runs: the exporter of every node, the servers and what they really scrape."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Any

from provision.components.prometheus import exports
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, unknown
from provision.verify.http import Answer, get, status


class Unreadable(Exception):
    """No answer, or one that is not what it should be; with the reason, or what it was."""


class Silent(Unreadable):
    """Nothing listens there."""


@check("node-exporter-answers")
def exporter_answers(at: Target) -> Found:
    address = f"{exports.url(at.node, exports.EXPORTER)}/metrics"
    answer = _get(at, address)
    if answer.refused:
        unit = at.profile.unit("node-exporter")
        return _down("nothing listens", "the node exporter's metrics", unit, address)
    if answer.text is None:
        return unknown(answer.error, source=address)
    samples = parse_metrics(answer.text)
    textfile = samples.get('node_scrape_collector_success{collector="textfile"}')
    errors = samples.get("node_textfile_scrape_error")
    if not any(name.startswith("node_exporter_build_info") for name in samples) or errors is None:
        return unknown(
            "the answer holds no metrics of a node exporter with a textfile collector", source=address
        )
    return expect(
        f"textfile collector {'works' if textfile == 1 else 'fails'}, {errors:.0f} unreadable files",
        "textfile collector works, 0 unreadable files",
        action="the exporter's log names the file: journalctl -u " + at.profile.unit("node-exporter"),
        source=address,
    )


@check("monitoring-refuses-strangers")
def refuses_strangers(at: Target) -> Found:
    """Neither by plain HTTP nor without the password does a service of monitoring on this node say anything."""
    services = [("node-exporter", exports.EXPORTER)]
    if at.node.has("monitor"):
        services += [("prometheus", exports.SERVER), ("alertmanager", exports.ALERTMANAGER)]
    open_to: list[str] = []
    for name, port in services:
        address = exports.url(at.node, port)
        for kind, asked in (("without a password", address), ("by plain HTTP", _plain(address))):
            answer = status(at.host, f"{asked}/metrics", "--insecure")
            if answer.refused:
                return _down(
                    f"{name}: nothing listens", "strangers are refused", at.profile.unit(name), asked
                )
            if answer.text is None:
                return unknown(answer.error, source=asked)
            if answer.text.strip() not in ("400", "401"):
                open_to.append(f"{name} answers {kind} ({answer.text.strip()})")
    return expect(
        "; ".join(open_to) or "strangers are refused",
        "strangers are refused",
        action="provision apply --component prometheus",
        source="curl without a password, and by HTTP",
    )


def _plain(address: str) -> str:
    return address.replace("https://", "http://", 1)


@check("prometheus-config-loaded", role="monitor")
def config_loaded(at: Target) -> Found:
    return _loaded(at, "prometheus", exports.SERVER, (exports.CONFIG, *exports.rules()))


@check("alertmanager-config-loaded", role="monitor")
def alertmanager_loaded(at: Target) -> Found:
    return _loaded(at, "alertmanager", exports.ALERTMANAGER, (exports.ALERTMANAGER_CONFIG,))


@check("prometheus-targets", role="monitor")
def targets_exact(at: Target) -> Found:
    """What is scraped is what the site file says, nothing less and nothing that is gone."""
    address = f"{exports.url(at.node, exports.SERVER)}/api/v1/targets?state=active"
    expected = exports.expected_targets(at.site)
    try:
        scraped = set(parse_targets(_text(at, address)))
    except Unreadable as error:
        return _unread(at, error, f"exactly the {len(expected)} targets of the site file", address)
    differences = [
        *(f"not scraped: {job} {instance}" for job, instance in sorted(expected - scraped)),
        *(f"not of this site: {job} {instance}" for job, instance in sorted(scraped - expected)),
    ]
    if not differences:
        return Found(Verdict.PASS, f"{len(scraped)} targets", f"{len(expected)} targets", source=address)
    return Found(
        Verdict.FAIL,
        "; ".join(differences),
        f"exactly the {len(expected)} targets of the site file",
        action="provision apply --component prometheus",
        source=address,
    )


@check("prometheus-targets-up", role="monitor")
def targets_up(at: Target) -> Found:
    address = f"{exports.url(at.node, exports.SERVER)}/api/v1/targets?state=active"
    try:
        scraped = parse_targets(_text(at, address))
    except Unreadable as error:
        return _unread(at, error, "all targets up", address)
    if not scraped:
        return unknown("the server scrapes nothing", source=address)
    down = [
        f"{instance}: {error}"
        for (_, instance), (health, error) in sorted(scraped.items())
        if health == "down"
    ]
    if down:
        return Found(
            Verdict.FAIL,
            "; ".join(down),
            "all targets up",
            action="is the node up, its exporter running, and its port open?",
            source=address,
        )
    waiting = [instance for (_, instance), (health, _) in sorted(scraped.items()) if health != "up"]
    if waiting:
        return unknown(
            f"not scraped yet: {', '.join(waiting)}", source=address, action="verify again in a minute"
        )
    return Found(Verdict.PASS, f"{len(scraped)} up", "all targets up", source=address)


@check("prometheus-rules", role="monitor")
def rules_loaded(at: Target) -> Found:
    address = f"{exports.url(at.node, exports.SERVER)}/api/v1/rules?type=alert"
    try:
        loaded = parse_rules(_text(at, address))
    except Unreadable as error:
        return _unread(at, error, "all rules are loaded and evaluated", address)
    broken = [f"{name}: {error}" for rules in loaded.values() for name, error in rules.items() if error]
    missing = [
        f"{name} is not loaded"
        for group, names in exports.expected_rules().items()
        for name in sorted(names - loaded.get(group, {}).keys())
    ]
    return expect(
        "; ".join([*broken, *missing]) or "all rules are loaded and evaluated",
        "all rules are loaded and evaluated",
        action="provision apply --component prometheus",
        source=address,
    )


@check("alertmanager-receives", role="monitor")
def alertmanager_receives(at: Target) -> Found:
    """Alertmanager is ready, and the server on this node sends to every one of the site."""
    address = f"{exports.url(at.node, exports.ALERTMANAGER)}/-/ready"
    ready = _get(at, address)
    if ready.refused:
        return _down("nothing listens", "Alertmanager is ready", at.profile.unit("alertmanager"), address)
    if ready.text is None:
        return unknown(ready.error, source=address)
    address = f"{exports.url(at.node, exports.SERVER)}/api/v1/alertmanagers"
    wanted = {exports.host_port(each, exports.ALERTMANAGER) for each in at.site.with_role("monitor")}
    try:
        known = parse_alertmanagers(_text(at, address))
    except Unreadable as error:
        return _unread(at, error, ", ".join(sorted(wanted)), address)
    return expect(
        ", ".join(sorted(known)) or "none",
        ", ".join(sorted(wanted)),
        action="provision apply --component prometheus",
        source=address,
    )


def _get(at: Target, address: str) -> Answer:
    """Ask a service of monitoring from the node that it runs on."""
    return get(at.host, address, exports.CURL)


def _text(at: Target, address: str) -> str:
    """What a service answers. Raises Unreadable with the reason where it does not."""
    answer = _get(at, address)
    if answer.text is None:
        raise Silent(answer.error) if answer.refused else Unreadable(answer.error)
    return answer.text


def _unread(at: Target, error: Unreadable, expected: str, source: str) -> Found:
    """Where no Prometheus listens that much is known."""
    if isinstance(error, Silent):
        return _down("nothing listens", expected, at.profile.unit("prometheus"), source)
    return unknown(str(error), source=source)


def _down(read: str, expected: str, unit: str, source: str) -> Found:
    return Found(Verdict.FAIL, read, expected, action=f"journalctl -u {unit}", source=source)


def _loaded(at: Target, name: str, port: int, read: tuple[str, ...]) -> Found:
    """Whether a service has accepted its configuration, and since its files were last changed."""
    address = f"{exports.url(at.node, port)}/metrics"
    answer = _get(at, address)
    if answer.refused:
        return _down("nothing listens", "configuration loaded", at.profile.unit(name), address)
    if answer.text is None:
        return unknown(answer.error, source=address)
    samples = parse_metrics(answer.text)
    accepted = samples.get(f"{name}_config_last_reload_successful")
    loaded = samples.get(f"{name}_config_last_reload_success_timestamp_seconds")
    if accepted is None or loaded is None:
        return unknown(f"no {name}_config_last_reload_successful in its metrics", source=address)
    files = at.host.run(f"LC_ALL=C stat -c '%.Y %n' -- {shlex.join(read)}")
    if files.rc not in (0, 1):
        return unknown(files.stderr.strip() or f"stat: exit {files.rc}", source="stat")
    written = {
        path: float(moment) for moment, path in (line.split(" ", 1) for line in files.stdout.splitlines())
    }
    missing = [path for path in read if path not in written]
    # A server that this tool did not set up reads other files: then only its own word counts.
    if written and missing:
        state = f"is of files that are gone: {', '.join(missing)}"
    elif accepted != 1:
        state = "refused"
    else:
        state = "older than its files" if loaded < max(written.values(), default=0.0) else "loaded"
    unit = at.profile.unit(name)
    return expect(
        f"configuration {state}",
        "configuration loaded",
        action=f"journalctl -u {unit} says what is wrong; then provision apply --component prometheus",
        source=address,
    )


_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*(?:\{.*\})?) +(\S+)(?: +-?\d+)?")


def parse_metrics(text: str) -> dict[str, float]:
    """Samples of Prometheus' text format by name with labels as written; lines that are none are left out."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        matched = _SAMPLE.fullmatch(line)
        if matched is None:
            continue
        try:
            samples[matched[1]] = float(matched[2])
        except ValueError:
            continue
    return samples


def parse_targets(text: str) -> dict[tuple[str, str], tuple[str, str]]:
    """(job, instance) -> (health, last error) from /api/v1/targets. Raises Unreadable."""
    found: dict[tuple[str, str], tuple[str, str]] = {}
    for target in _list(_data(text), "activeTargets"):
        labels = target.get("labels") or {}
        key = (str(labels.get("job")), str(labels.get("instance")))
        found[key] = (str(target.get("health")), str(target.get("lastError") or ""))
    return found


def parse_rules(text: str) -> dict[str, dict[str, str]]:
    """Group -> rule -> last error (empty: none) from /api/v1/rules. Raises Unreadable."""
    return {
        str(group.get("name")): {
            str(rule.get("name")): str(rule.get("lastError") or "") for rule in _list(group, "rules")
        }
        for group in _list(_data(text), "groups")
    }


def parse_alertmanagers(text: str) -> set[str]:
    """host:port of each Alertmanager that is sent to, from /api/v1/alertmanagers. Raises Unreadable."""
    urls = (str(each.get("url")) for each in _list(_data(text), "activeAlertmanagers"))
    return {address.split("/")[2] if address.count("/") > 2 else address for address in urls}


def _data(text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError:
        raise Unreadable(f"no JSON: {text[:80]!r}") from None
    data = document.get("data") if isinstance(document, dict) else None
    if not isinstance(data, dict) or document.get("status") != "success":
        raise Unreadable(f"not an answer of Prometheus: {text[:80]!r}")
    return data


def _list(data: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The list at `key`. An answer without it is one to another question, not an empty one."""
    items = data.get(key)
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise Unreadable(f"no list {key} in the answer of Prometheus")
    return items
