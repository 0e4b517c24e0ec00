"""What health is made of, from site file and lock alone: the agent, its configuration, units, programs of Slurm."""

from __future__ import annotations

import json
from functools import cache
from typing import TYPE_CHECKING, Any

from provision.components.base.settings import BaseSettings
from provision.components.health.settings import HealthSettings
from provision.components.storage import exports as storage
from provision.health import bundle

if TYPE_CHECKING:
    from provision.profiles import Distribution
    from provision.site.lock import Lock
    from provision.site.models import Node, Site

LIBRARY = "/usr/local/lib/provision"
SOURCE = f"{LIBRARY}/provision-health.pyz"  # as it was sent
COMPILED = f"{LIBRARY}/provision-health"  # with byte code of the node's Python
COMMAND = "/usr/local/sbin/provision-health"
CONFIG = "/etc/provision/health.json"
OFF = "/etc/provision/health.off"
SLURM_PROGRAM = f"{LIBRARY}/health-slurm"
PROLOG, EPILOG = "/etc/slurm/prolog.d/50-health", "/etc/slurm/epilog.d/50-health"
UNIT = "provision-health"
FOLLOWER = "provision-health-follow"
TEXTFILE = "provision-health.prom"


@cache
def program() -> bytes:
    """The agent; the same bytes for every node."""
    return bundle.build()


def health_program(site: Site) -> str | None:
    """Slurm's HealthCheckProgram, where health is named in the site file."""
    return SLURM_PROGRAM if site.enabled("health") else None


def services(site: Site, node: Node, profile: Distribution, settings: HealthSettings) -> list[str]:
    """Units that must be active on `node`: those of its components, and what the site names."""
    purposes = {
        "ssh": ("ssh", True),
        "time": ("time", True),
        "munge": ("munge", True),
        "slurm": ("slurmd", node.has("worker")),
        "prometheus": ("node-exporter", True),
    }
    found = [
        profile.unit(unit) for component, (unit, here) in purposes.items() if here and site.enabled(component)
    ]
    return list(dict.fromkeys([*found, *settings.services]))


def expectations(site: Site, lock: Lock, node: Node, profile: Distribution) -> dict[str, Any]:
    """What the site says of `node`, as the checks of the catalogue compare it."""
    from provision.components.slurm import exports as slurm

    settings = site.settings("health", node, HealthSettings)
    base = site.settings("base", node, BaseSettings)
    found: dict[str, Any] = {"services": services(site, node, profile, settings)}
    if node.gpu:
        found |= {"gpus": node.gpu.count, "model": node.gpu.model}
    hardware = lock.hardware_of(site, node)
    if hardware is not None:
        found["hardware"] = {"cpus": hardware.cpus, "memory": hardware.memory}
        if site.enabled("slurm") and node.has("worker"):
            found["real_memory"] = slurm.real_memory(hardware, slurm.settings(site).memory_reserve)
    if "nvidia" in lock.release:
        found["driver"] = lock.release["nvidia"]
    if base.swap == "off":
        found["swap"] = False
    if base.governor != "keep":
        found["governor"] = base.governor
    return {**found, **settings.expectations()}


def config_json(site: Site, lock: Lock, node: Node, profile: Distribution, limits: dict[str, str]) -> str:
    """The agent's configuration on `node`."""
    settings = site.settings("health", node, HealthSettings)
    textfiles = profile.path("node-exporter.textfiles")
    document = {
        "node": node.name,
        "act": settings.act,
        "slurm": site.enabled("slurm") and node.has("worker"),
        "kubernetes": _kubernetes(node, settings),
        "textfile": f"{textfiles}/{TEXTFILE}" if site.enabled("prometheus") else None,
        "mounts": ["/", *storage.mounted(site, node, limits)],
        "expect": expectations(site, lock, node, profile),
    }
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _kubernetes(node: Node, settings: HealthSettings) -> dict[str, str | None] | None:
    found = settings.kubernetes
    if found is None:
        return None
    return {"kubeconfig": found.kubeconfig, "node": found.node or node.name, "taint": found.taint}


def wrapper(verb: str) -> str:
    """A program of one verb, for whoever calls programs without arguments."""
    return f"#!/bin/sh\nexec {COMPILED} {verb}\n"


def service() -> str:
    return f"""[Unit]
Description=Health of this node
[Service]
Type=oneshot
ExecStart={COMPILED} watch
# what it found is in its words, in the metrics and in the state; the unit itself has not failed
SuccessExitStatus=1
TimeoutStartSec=60
"""


def follower() -> str:
    return f"""[Unit]
Description=Reads the health of this node when the kernel tells of a fault
StartLimitIntervalSec=0
[Service]
Type=exec
ExecStart={COMPILED} follow
Restart=always
RestartSec=10
[Install]
WantedBy=multi-user.target
"""


def timer(settings: HealthSettings) -> str:
    return f"""[Unit]
Description=Health of this node, now and then
[Timer]
OnBootSec=60
OnUnitActiveSec={settings.interval}
RandomizedDelaySec={settings.interval // 10}
[Install]
WantedBy=timers.target
"""
