"""Is the agent there, does it run, and what does it say of its node?"""

from __future__ import annotations

import json

from provision.components.health import exports
from provision.components.health.settings import HealthSettings
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, skip, unknown
from provision.verify.systemd import unit_runs


@check("health-timer")
def timer(at: Target) -> Found:
    """The timer that reads this node now and then is active."""
    return unit_runs(at, f"{exports.UNIT}.timer")


@check("health-follow")
def follower(at: Target) -> Found:
    """What waits for kernel messages runs."""
    return unit_runs(at, f"{exports.FOLLOWER}.service")


@check("health-recent")
def recent(at: Target) -> Found:
    """The last reading is not older than three of its intervals."""
    answer = at.host.run(
        "test -e /var/lib/provision/health/state.json || exit 3; "
        "echo $(($(date +%s) - $(stat -c %Y /var/lib/provision/health/state.json)))"
    )
    source = "/var/lib/provision/health/state.json"
    if answer.rc == 3:
        return Found(Verdict.FAIL, "never", "a reading", f"systemctl start {exports.UNIT}", source=source)
    if answer.rc != 0 or not answer.stdout.strip().lstrip("-").isdigit():
        return unknown(answer.stderr.strip() or f"read {answer.stdout.strip()!r}", source=source)
    most = 3 * at.settings(HealthSettings).interval
    age = int(answer.stdout)
    return expect(
        "recent" if age <= most else f"{age} s ago",
        "recent",
        action=f"journalctl -u {exports.UNIT}",
        source=source,
    )


@check("health-acts")
def acts(at: Target) -> Found:
    """Whether somebody pulled the switch that keeps the agent from acting."""
    if not at.settings(HealthSettings).act:
        return skip("the site file says that it only tells")
    answer = at.host.run(f"test -e {exports.OFF}")
    if answer.rc not in (0, 1):
        return unknown(answer.stderr.strip() or f"test: exit {answer.rc}", source=exports.OFF)
    if answer.rc == 0:
        return Found(Verdict.WARN, "switched off", "acting", "provision health SITE --on", source=exports.OFF)
    return Found(Verdict.PASS, "acting", "acting", source=exports.OFF)


@check("health-kubernetes")
def kubernetes(at: Target) -> Found:
    """The API server has heard from this node's agent within three of its intervals."""
    settings = at.settings(HealthSettings)
    if settings.kubernetes is None:
        return skip("Kubernetes is not told: health.kubernetes is not in the site file")
    command = f"{exports.COMPILED} kubernetes"
    answer = at.host.run(command)
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source=command)
    try:
        told = json.loads(answer.stdout)
        age = told["seconds"]
    except (ValueError, KeyError, TypeError) as error:
        return unknown(f"{answer.stdout.strip()[:200]!r}: {error!r}", source=command)
    heard = "no such condition" if age is None else f"{age} s ago"
    read = "recent" if age is not None and age <= 3 * settings.interval else heard
    return expect(read, "recent", action=f"journalctl -u {exports.UNIT}", source=command)


@check("node-health")
def node_health(at: Target) -> Found:
    """What the agent says of its node, now."""
    command = f"{exports.COMPILED} check --json"
    answer = at.host.run(command)
    try:
        told = json.loads(answer.stdout)
        verdict = Verdict(told["verdict"])
        (node,) = told["nodes"].values()
    except (ValueError, KeyError, AttributeError) as error:
        said = (answer.stderr or answer.stdout).strip()[-200:]
        return unknown(f"{said or error!r}, exit {answer.rc}", source=command)
    reason = node["reason"]
    if verdict is Verdict.UNKNOWN:
        return unknown(reason or "no reason given", source=command)
    action = None if verdict.good else "provision-health check on the node; provision health SITE"
    return Found(verdict, reason or "well", "well", action, source=command)
