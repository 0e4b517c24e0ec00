"""Checks of what every node has before anything else is installed on it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Sequence
from ipaddress import ip_address, ip_network
from typing import Any

from provision.components.base import exports
from provision.components.base.settings import BaseSettings
from provision.profiles import packaging
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, skip, unknown

_MACHINE_ID = re.compile(r"[0-9a-f]{32}")
_MACHINE_ID_FILE = "/etc/machine-id"
_NEW_ID = "rm /etc/machine-id; systemd-machine-id-setup; reboot"


@check("packages-whole")
def packages_whole(at: Target) -> Found:
    """No package is half way between two states: every later installation would fail."""
    if not at.profile.half_installs:
        return skip("only dpkg keeps half-installed packages")
    answer = at.host.run(packaging.DPKG_QUERY)
    if answer.rc != 0:
        return _unread(answer, packaging.DPKG_QUERY)
    try:
        states = packaging.parse_dpkg(answer.stdout)
    except ValueError as error:
        return unknown(str(error), source=packaging.DPKG_QUERY)
    broken = [f"{package.name} ({package.state})" for package in states if package.broken]
    return expect(
        ", ".join(broken) or "all whole",
        "all whole",
        action="`provision apply` finishes them; of a driver see /var/lib/dkms/*/*/build/make.log",
        source="dpkg-query",
    )


@check("packages-held")
def packages_held(at: Target) -> Found:
    """No package of driver, CUDA or scheduler moves by itself: pinned above the archive, or on hold."""
    if exports.hold_paths(at.profile) is None:
        return skip(f"{at.profile.key}: packages cannot be held by pattern")
    patterns = exports.held(at.settings(BaseSettings))
    command = f"{packaging.DPKG_QUERY} {shlex.join(patterns)}"
    answer = at.host.run(f"{command}; [ $? -le 1 ]")  # 1: some pattern matched nothing
    if answer.rc != 0:
        return _unread(answer, command)
    packages = [package for package in packaging.parse_dpkg(answer.stdout) if package.installed]
    pinned = [package.name for package in packages if package.want != "hold"]
    if not packages:
        return skip("none of driver, CUDA or scheduler is installed")
    if not pinned:
        return Found(Verdict.PASS, "all on hold", "pinned or on hold", source=command)
    policy = at.host.run(f"LC_ALL=C apt-cache policy {shlex.join(pinned)}")
    priorities = installed_priorities(policy.stdout)
    if policy.rc != 0 or not set(pinned) <= set(priorities):
        return _unread(policy, "apt-cache policy")
    loose = [name for name in pinned if priorities[name] <= 500]
    return expect(
        f"{', '.join(loose)} would be upgraded" if loose else "pinned or on hold",
        "pinned or on hold",
        action="apt-mark hold the whole set, or `provision apply`",
        source="apt-cache policy",
    )


@check("unattended-upgrades-kept-off")
def kept_off(at: Target) -> Found:
    """unattended-upgrades leaves driver, CUDA and scheduler alone."""
    if exports.hold_paths(at.profile) is None:
        return skip(f"{at.profile.key}: packages cannot be held by pattern")
    command = "apt-config dump --no-empty --format '%f %v%n' Unattended-Upgrade::Package-Blacklist"
    answer = at.host.run(command)
    if answer.rc != 0:
        return _unread(answer, command)
    listed = {line.partition(" ")[2] for line in answer.stdout.splitlines()}
    wanted = [exports.expression(glob) for glob in exports.held(at.settings(BaseSettings))]
    missing = [expression for expression in wanted if expression not in listed]
    return expect(
        f"not on its list: {' '.join(missing)}" if missing else "all on its list",
        "all on its list",
        source=command,
    )


@check("host-name")
def host_name(at: Target) -> Found:
    """The machine calls itself as the site file does: daemons compare the two."""
    answer = at.host.run("hostname")
    name = answer.stdout.strip()
    if answer.rc != 0 or not name:
        return _unread(answer, "hostname")
    same = exports.same_host(name, at.node.name)
    return expect(
        at.node.name if same else name, at.node.name, action="`provision apply` sets it", source="hostname"
    )


@check("machine-id")
def machine_id(at: Target) -> Found:
    """There is one, as journal and DHCP need; whether it is unique is compared across nodes."""
    answer = at.host.run("cat /etc/machine-id")
    if answer.rc != 0:
        return _unread(answer, _MACHINE_ID_FILE)
    identity = answer.stdout.strip()
    good = _MACHINE_ID.fullmatch(identity) is not None
    return expect(
        "32 hexadecimal digits" if good else identity or "empty",
        "32 hexadecimal digits",
        action=_NEW_ID,
        source=_MACHINE_ID_FILE,
    )


@check("machine-id-unique", role="head")
def machine_id_unique(at: Target) -> Found:
    """No two nodes share host name, machine-id or product UUID, as machines cloned from one image do."""
    identities = {}
    silent = []
    for name in at.site.nodes:
        host = at.host if name == at.node.name else at.on(name)
        answer = host.run(exports.IDENTITY_QUERY) if host is not None else None
        if answer is None or answer.rc != 0:
            silent.append(name)
            continue
        try:
            identities[name] = exports.parse_identity(answer.stdout)
        except ValueError:
            silent.append(name)
    found = exports.identity_findings(identities)
    if found:
        text = "; ".join(f"{finding.check} {finding.read} on {finding.subject}" for finding in found)
        return Found(Verdict.FAIL, text, "all different", found[0].action, source=exports.IDENTITY_QUERY)
    without = [name for name, identity in identities.items() if identity.machine_id is None]
    if without:
        return Found(
            Verdict.FAIL,
            f"no machine-id on {', '.join(without)}",
            "all different",
            _NEW_ID,
            source=_MACHINE_ID_FILE,
        )
    if silent:
        return unknown(f"not read on {', '.join(silent)}", source=exports.IDENTITY_QUERY)
    return Found(Verdict.PASS, "all different", "all different", source=exports.IDENTITY_QUERY)


@check("names-resolve")
def names_resolve(at: Target) -> Found:
    """Every node of the site resolves to its address here, this node not to a loopback address."""
    names = list(at.site.nodes)
    command = f"command -v getent >/dev/null || getent || exit; for n in {shlex.join(names)}; do "
    command += "echo $n $(getent ahosts $n | while read a _; do echo $a; done); done"
    answer = at.host.run(command)
    if answer.rc != 0:
        return _unread(answer, "getent ahosts")
    resolved = {words[0]: set(words[1:]) for words in map(str.split, answer.stdout.splitlines())}
    if set(resolved) != set(names):
        return unknown(
            f"no answer for {', '.join(sorted(set(names) - set(resolved)))}", source="getent ahosts"
        )
    wrong = wrong_addresses(
        resolved,
        {node.name: exports.ip(node.address or "") for node in at.site.nodes.values()},
        at.node.name,
        at.site.file.networks.of_nodes,
    )
    return expect(
        "; ".join(wrong) or "all right",
        "all right",
        action="/etc/hosts or DNS; `provision apply` writes /etc/hosts",
        source="getent ahosts",
    )


@check("time-zone")
def time_zone(at: Target) -> Found:
    wanted = at.settings(BaseSettings).timezone
    folder = "/usr/share/zoneinfo/"
    answer = at.host.run(f"readlink -f /etc/localtime {folder}{wanted}")
    lines = answer.stdout.split()
    if answer.rc != 0 or len(lines) != 2:
        return _unread(answer, "readlink /etc/localtime")
    return expect(
        wanted if lines[0] == lines[1] else lines[0].removeprefix(folder),
        wanted,
        source="readlink /etc/localtime",
    )


@check("locale")
def locale(at: Target) -> Found:
    """The locale that logins get exists."""
    wanted = at.settings(BaseSettings).locale
    answer = at.host.run("locale -a")
    if answer.rc != 0:
        return _unread(answer, "locale -a")
    known = {name.lower().replace("utf-8", "utf8") for name in answer.stdout.split()}
    there = wanted.lower().replace("utf-8", "utf8") in known
    default = at.host.run(f"cat {shlex.quote(at.profile.path('locale'))}")
    if default.rc != 0:
        return _unread(default, at.profile.path("locale"))
    lines = [
        line.removeprefix("LANG=").strip('"')
        for line in default.stdout.splitlines()
        if line.startswith("LANG=")
    ]
    read = lines[-1] if lines else "none"
    return expect(read if there else f"{read}, {wanted} does not exist", wanted, source="locale -a")


@check("accounts")
def accounts(at: Target) -> Found:
    """Users and groups of the site have their numbers: files on shared storage belong to numbers."""
    users, groups = exports.users(at.site), exports.groups(at.site)
    if not users and not groups:
        return skip("the site file names no accounts")
    command = f"getent passwd {shlex.join(user.name for user in users)}; echo --; "
    command += f"getent group {shlex.join(group.name for group in groups)}"
    answer = at.host.run(f"command -v getent >/dev/null || getent || exit; {command}; [ $? = 0 -o $? = 2 ]")
    if answer.rc != 0:
        return _unread(answer, "getent")
    passwd, _, group_lines = answer.stdout.partition("--\n")
    uids = _numbers(passwd)
    gids = _numbers(group_lines)
    wrong = [f"user {u.name} {uids.get(u.name, 'missing')}" for u in users if uids.get(u.name) != u.uid]
    wrong += [f"group {g.name} {gids.get(g.name, 'missing')}" for g in groups if gids.get(g.name) != g.gid]
    return expect("; ".join(wrong) or "as wanted", "as wanted", action="`provision apply`", source="getent")


@check("sudoers")
def sudoers(at: Target) -> Found:
    """All of sudo's files together are valid: one mistake shuts everybody out."""
    if exports.sudoers(at.settings(BaseSettings)) is None:
        return skip("the site file gives nobody rights by sudo")
    answer = at.host.run("visudo -cq")
    if answer.rc not in (0, 1):
        return _unread(answer, "visudo -c")
    said = f"{answer.stdout}{answer.stderr}".strip().splitlines()
    return expect(
        "valid" if answer.rc == 0 else said[0] if said else "not valid", "valid", source="visudo -c"
    )


@check("kernel-parameters")
def kernel_parameters(at: Target) -> Found:
    """The live values, of those that this node can set."""
    wanted = {
        key: " ".join(str(value).split())
        for key, value in exports.sysctl(at.settings(BaseSettings)).items()
        if at.limited(f"sysctl:{key}") is None
    }
    if not wanted:
        return skip("this node can set none of them")
    command = f"sysctl -e -- {shlex.join(wanted)}"
    answer = at.host.run(command)
    if answer.rc != 0:
        return _unread(answer, "sysctl")
    live = parse_sysctl(answer.stdout)
    if not live:
        return unknown(f"sysctl knows none of {len(wanted)} parameters: is /proc/sys there?", source="sysctl")
    for key in exports.unasked(at.settings(BaseSettings)):
        if key not in live:  # this kernel does not have it
            wanted.pop(key, None)
    wrong = {key: live.get(key, "missing") for key, value in wanted.items() if live.get(key) != value}
    return expect(
        ", ".join(f"{key} = {value}" for key, value in wrong.items()) or "as wanted",
        ", ".join(f"{key} = {wanted[key]}" for key in wrong) or "as wanted",
        action="another file in /etc/sysctl.d comes later, or it was set by hand; `provision apply` sets it",
        source="sysctl",
    )


@check("user-limits")
def user_limits(at: Target) -> Found:
    """The limits that a session of an ordinary user really gets."""
    limits = at.settings(BaseSettings).limits
    wanted = {"memlock": str(limits.memlock), "nofile": str(limits.nofile)}
    reasons = {what: at.limited(f"rlimit:{what}") for what in wanted}
    if all(reasons.values()):
        return skip("; ".join(dict.fromkeys(reason for reason in reasons.values() if reason)))
    command = "runuser -u nobody -- sh -c 'ulimit -l; ulimit -n'"
    answer = at.host.run(command)
    lines = answer.stdout.split()
    if answer.rc != 0 or len(lines) != 2:
        return _unread(answer, command)
    now = dict(zip(wanted, lines, strict=True))
    able = [what for what in wanted if reasons[what] is None]
    return expect(
        ", ".join(f"{what} {now[what]}" for what in able),
        ", ".join(f"{what} {wanted[what]}" for what in able),
        action="see /etc/security/limits.d; `provision apply` writes it",
        source=command,
    )


@check("service-limits")
def service_limits(at: Target) -> Found:
    """The limits that systemd gives services."""
    wanted = exports.manager_limits(at.settings(BaseSettings))
    command = "systemctl show " + " ".join(f"-p {key}" for key in wanted)
    answer = at.host.run(command)
    if answer.rc != 0:
        return _unread(answer, command)
    live = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    return expect(
        ", ".join(f"{key}={live.get(key, 'missing')}" for key in wanted),
        ", ".join(f"{key}={value}" for key, value in wanted.items()),
        action="see /etc/systemd/system.conf.d; systemctl daemon-reexec",
        source=command,
    )


@check("journal-persistent")
def journal_persistent(at: Target) -> Found:
    """The journal of this machine is on disk: what led to a crash is there after the reboot."""
    command = (
        "id=$(cat /etc/machine-id) || exit; "
        "if [ -e /var/log/journal/$id/system.journal ]; then echo disk; else echo memory; fi; echo $id"
    )
    answer = at.host.run(command)
    if answer.rc != 0:
        return _unread(answer, _MACHINE_ID_FILE)
    if len(answer.stdout.split()) < 2:
        return Found(Verdict.FAIL, "this machine has no id", "on disk", _NEW_ID, source=_MACHINE_ID_FILE)
    return expect(
        "on disk" if answer.stdout.split()[0] == "disk" else "in memory only",
        "on disk",
        action="Storage=persistent in /etc/systemd/journald.conf.d; systemctl restart systemd-journald",
        source="/var/log/journal",
    )


@check("swap-off", limit="swap")
def swap_off(at: Target) -> Found:
    if at.settings(BaseSettings).swap == "keep":
        return skip("the site file keeps swap")
    answer = at.host.run("cat /proc/swaps")
    if answer.rc != 0:
        return _unread(answer, "/proc/swaps")
    areas = [line.split()[0] for line in answer.stdout.splitlines()[1:] if line.strip()]
    return expect(", ".join(areas) or "none", "none", action="swapoff -a", source="/proc/swaps")


@check("governor", limit="governor")
def governor(at: Target) -> Found:
    """Every CPU frequency policy has the governor that the site file wants."""
    wanted = at.settings(BaseSettings).governor
    if wanted == "keep":
        return skip("the site file leaves the governor alone")
    files = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
    answer = at.host.run(f"for f in {files}; do [ ! -e $f ] || cat $f || exit 1; done")
    if answer.rc != 0:
        return _unread(answer, files)
    now = sorted(set(answer.stdout.split()))
    return expect(", ".join(now), wanted, source=files) if now else skip("no CPU frequency control here")


def installed_priorities(policy: str) -> dict[str, int]:
    """Package -> priority of its installed version, from the output of `apt-cache policy PACKAGE...`."""
    found: dict[str, int] = {}
    name = ""
    for line in policy.splitlines():
        if line and not line[0].isspace() and line.endswith(":"):
            name = line[:-1]
        elif line.startswith(" *** "):
            found[name] = int(line.split()[-1])
    return found


def parse_sysctl(output: str) -> dict[str, str]:
    """Key -> value with single spaces, from `sysctl KEY...`."""
    pairs = (line.partition("=") for line in output.splitlines() if "=" in line)
    return {key.strip(): " ".join(value.split()) for key, _, value in pairs}


def wrong_addresses(
    resolved: dict[str, set[str]], wanted: dict[str, str | None], own: str, networks: Sequence[str] = ()
) -> list[str]:
    """What is wrong with the addresses that names resolve to: one phrase a name.

    `wanted` is the address in the site file, None where it leaves that to DNS; `own` is the node that asks;
    `networks` are those of the management, CIDR.
    """
    wrong = []
    for name, addresses in resolved.items():
        expected = wanted[name]
        loopback = sorted(address for address in addresses if address.startswith("127.") or address == "::1")
        if not addresses:
            wrong.append(f"{name} does not resolve")
        elif name == own and loopback:
            wrong.append(f"{name} is {loopback[0]}: daemons would listen where nobody else can reach them")
        elif expected is not None and expected not in addresses:
            wrong.append(f"{name} is {', '.join(sorted(addresses))} instead of {expected}")
        elif expected is None and (several := _candidates(addresses, networks)):
            wrong.append(
                f"{name}: {len(several)} candidate addresses, none chosen: {', '.join(several)}; "
                "name the right one in the site file, or networks.management"
            )
    return wrong


def _candidates(addresses: Iterable[str], networks: Sequence[str]) -> list[str]:
    """Addresses of one family between which nobody has chosen; those inside of `networks` are chosen."""
    found = [ip_address(address) for address in sorted(addresses)]
    inside = [each for each in found if any(each in ip_network(network) for network in networks)]
    for version in (4, 6):
        family = [str(each) for each in inside or found if each.version == version]
        if len(family) > 1:
            return family
    return []


def _numbers(lines: str) -> dict[str, int]:
    """Name -> number, from lines of passwd or group."""
    fields = (line.split(":") for line in lines.splitlines())
    return {words[0]: int(words[2]) for words in fields if len(words) > 2}


def _unread(answer: Any, source: str) -> Found:
    return unknown(answer.stderr.strip() or f"exit {answer.rc}: {answer.stdout.strip()[:200]}", source=source)
