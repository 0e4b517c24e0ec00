"""Is the driver of one version in all four places, is it the locked one, and are GPUs in their modes?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from shlex import quote

from provision.components.nvidia import exports, locking, machine
from provision.components.nvidia.exports import Chosen
from provision.profiles.gpu import gpu_model
from provision.profiles.nvidia import rules
from provision.report.model import Verdict
from provision.site.lock import NvidiaLock
from provision.verify.check import Found, Target, check, skip, unknown

_UNLOCKED = "nothing is locked for its group"


def _chosen(at: Target) -> Chosen | Found | None:
    """The set of the node, or what a check says where it has no GPU or another system's set; None: none is locked."""
    if at.node.gpu is None:
        return skip("no GPU in the site file")
    lock = exports.set_of(at.site, at.lock, at.node)
    if lock is None:
        return None
    if lock.distribution != at.profile.key:
        return Found(
            Verdict.FAIL, at.profile.key, lock.distribution, "run `provision lock`", source="/etc/os-release"
        )
    return Chosen.of(lock)


@check("nvidia-locked", role="worker")
def locked(at: Target) -> Found:
    """The set is installed to the patch level, and nothing of another version."""
    chosen = _chosen(at)
    if isinstance(chosen, Found):
        return chosen
    if chosen is None:
        return Found(
            Verdict.FAIL, _UNLOCKED, "one set of versions", "run `provision lock`", source="lock file"
        )
    wanted = at.profile.manager.command(chosen.driver.wanted)
    for exact in (chosen.driver, chosen.software):
        answer = at.host.run(f"sh -c {quote(at.profile.manager.exact(exact))}")
        if answer.rc == 1:
            said = " ".join(answer.stderr.split())
            return Found(Verdict.FAIL, said, wanted, "run `provision apply`", source="package database")
        if answer.rc != 0:
            return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="package database")
    return Found(Verdict.PASS, chosen.lock.driver, chosen.lock.driver, source="package database")


# Four places

_LIBRARY = (
    "p=$(ldconfig -p) || exit 2; f=$(printf '%s\\n' \"$p\" | sed -n 's/.*libnvidia-ml.so.1 .*=> //p' | head -n 1); "
    '[ -z "$f" ] || readlink -f "$f"'
)
_DAEMON = (
    "command -v readlink >/dev/null || readlink || exit; "
    "exe=$(readlink /proc/[0-9]*/exe | grep -m 1 -E '/{program}( [(]deleted[)])?$'); "
    'case $? in 0) ;; 1) exit 0;; *) exit 2;; esac; echo "$exe"; {program} --version'
)


def library_version(path: str) -> str | None:
    """ "/usr/lib/libnvidia-ml.so.580.126.20" is 580.126.20; None where it carries no full number."""
    found = re.search(r"\.so\.(\d{3}\.\d+(?:\.\d+)?)$", path.strip())
    return found[1] if found else None


def program_version(text: str) -> str | None:
    """The driver's number in what a daemon says of itself; None where it tells none."""
    found = re.search(r"(?<![\d.])(\d{3}\.\d{2,3}(?:\.\d{2})?)(?![\d.])", text)
    return found[1] if found else None


def compare(places: Mapping[str, str | None], wanted: str) -> Found:
    """Whether all places that could be read have the wanted version; 575.64 is not 575.64.03."""
    read = ", ".join(f"{place} {version or 'not told'}" for place, version in places.items())
    wrong = [place for place, version in places.items() if version is not None and version != wanted]
    if wrong:
        mixed = len({version for version in places.values() if version}) > 1
        action = "drain it, then `provision apply`" if mixed else "run `provision apply`"
        return Found(Verdict.FAIL, read, wanted, action, why=f"{', '.join(wrong)}: another version")
    if None in places.values():
        return Found(Verdict.UNKNOWN, read, wanted, why="not every place tells its version")
    return Found(Verdict.PASS, read, wanted)


@check("nvidia-one-version", role="worker")
def one_version(at: Target) -> Found:
    """Package, loaded module, user-space library and running daemon are of the locked version.

    One of them that is known to be another is a failure, whatever the others are. Where nothing is locked, the others
    must be of the module's version.
    """
    chosen = _chosen(at)
    if isinstance(chosen, Found):
        return chosen
    places: dict[str, str | None] = {}
    unread: list[Found] = []
    if chosen is not None:
        name = next(iter(chosen.driver.wanted))
        package = at.host.run(at.profile.manager.version_of(name))
        if package.rc in (0, 1):
            places[f"package {name}"] = locking.upstream(package.stdout.strip()) or "none"
        else:
            unread.append(unknown(package.stderr.strip(), source="package database"))
    library = at.host.run(_LIBRARY)
    if library.rc == 0:
        places["library libnvidia-ml"] = library_version(library.stdout) if library.stdout.strip() else "none"
    else:
        unread.append(unknown(library.stderr.strip() or f"ldconfig: exit {library.rc}", source="ldconfig"))
    if not at.limited("module:nvidia"):
        loaded = at.host.run("cat /proc/driver/nvidia/version")
        try:
            if loaded.rc == 127:
                raise ValueError(loaded.stderr.strip())
            module = machine.parse_loaded(loaded.stdout.splitlines()[0] if loaded.stdout else "")
            places["module"] = module.version if module else "none"
        except ValueError as error:
            unread.append(unknown(str(error), source="/proc/driver/nvidia/version"))
    for unit, program in _daemons(fabric_manager=_switched(at)).items():
        if at.limited(f"unit:{unit}.service"):
            continue
        answer = at.host.run(_DAEMON.format(unit=unit, program=program))
        if answer.rc != 0:
            unread.append(unknown(answer.stderr.strip() or f"{program}: exit {answer.rc}", source=unit))
            continue
        if "(deleted)" in answer.stdout:
            return Found(
                Verdict.FAIL,
                f"{unit} runs a program that was replaced",
                "the one that is installed",
                f"systemctl restart {unit}",
            )
        if answer.stdout.strip():
            places[f"daemon {unit}"] = program_version(answer.stdout)
        elif chosen is not None:
            places[f"daemon {unit}"] = "not running"
    wanted = places.get("module") if chosen is None else chosen.lock.driver
    if wanted is None:
        return unread[0] if unread else unknown(f"{_UNLOCKED}, and no module can be loaded here")
    if wanted == "none":
        return Found(Verdict.FAIL, "no driver is loaded", "one version everywhere", "run `provision apply`")
    found = compare(places, wanted)
    if found.verdict is not Verdict.PASS:
        return found
    if unread:
        return unread[0]
    return (
        found if chosen is not None else replace(found, why=f"{_UNLOCKED}: compared with the loaded module")
    )


def _switched(at: Target) -> bool:
    """Whether there are NVSwitches, by the site file."""
    assert at.node.gpu is not None
    model = gpu_model(at.node.gpu.model)
    return model is not None and rules().switches(model, at.node.gpu.count) is not None


def _daemons(*, fabric_manager: bool) -> dict[str, str]:
    """Units that carry the driver's number, and their programs."""
    fabric = {"nvidia-fabricmanager": "nv-fabricmanager"} if fabric_manager else {}
    return {"nvidia-persistenced": "nvidia-persistenced", **fabric}


@check("nvidia-module-built", role="worker")
def built(at: Target) -> Found:
    """There is a module of the right version and kind for the kernel, signed where Secure Boot asks for it."""
    chosen = _chosen(at)
    if isinstance(chosen, Found):
        return chosen
    which = (
        "$(ls -d /lib/modules/*/build | cut -d / -f 4 | tail -n 1)" if at.limited("kernel") else "$(uname -r)"
    )
    name, lock = ("nvidia", None) if chosen is None else (chosen.module, chosen.lock)
    answer = at.host.run(
        f"k={which}; command -v modinfo >/dev/null || modinfo || exit; modinfo -k $k {name} || exit 1"
    )
    if answer.rc not in (0, 1):
        return unknown(answer.stderr.strip() or f"modinfo: exit {answer.rc}", source="modinfo")
    if answer.rc == 1:
        action = f"dkms status; then `provision apply`: {answer.stderr.strip()}"
        return Found(Verdict.FAIL, "no module", lock.driver if lock else "a module", action, source="modinfo")
    boot = at.host.run(machine.QUERY)
    try:
        secure = machine.parse_machine(boot.stdout).secure_boot
    except ValueError as error:
        return unknown(str(error), source="Secure Boot")
    return judge_module(answer.stdout, lock, secure)


def judge_module(modinfo: str, lock: NvidiaLock | None, secure_boot: bool) -> Found:
    """What `modinfo` says against what is wanted: version, kind (by its licence), signer.

    Where nothing is locked any version and kind will do.
    """
    values: dict[str, str] = {}
    for line in modinfo.splitlines():
        key, _, value = line.partition(":")
        values.setdefault(key.strip(), value.strip())
    if "version" not in values or "license" not in values:
        return unknown("modinfo tells neither version nor license", source="modinfo")
    kind = "proprietary" if values["license"] == "NVIDIA" else "open"
    signer = values.get("signer", "")
    read = f"{values['version']} {kind}" + (f", signed by {signer}" if signer else ", not signed")
    wanted = (lock.driver, lock.modules) if lock else (values["version"], kind)
    expected = (" ".join(wanted) if lock else "a module") + (", signed" if secure_boot else "")
    right = (values["version"], kind) == wanted and (bool(signer) or not secure_boot)
    why = "Secure Boot is on and refuses it" if secure_boot and not signer else None
    if lock and kind != lock.modules:
        why = (
            f"{kind} modules where {lock.modules} ones are wanted (Blackwell: Xid 169, RmInitAdapter failed)"
        )
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        read,
        expected,
        None if right else "run `provision apply`",
        why=None if right else why,
        source="modinfo",
    )


@check("nouveau-off", role="worker")
def nouveau(at: Target) -> Found:
    """The kernel's own driver does not hold the GPUs, now or after the next boot."""
    if at.node.gpu is None:
        return skip("no GPU in the site file")
    config = at.host.run("modprobe --showconfig")
    if config.rc != 0:
        return unknown(config.stderr.strip() or f"modprobe: exit {config.rc}", source="modprobe --showconfig")
    loaded = at.host.run("test -d /sys/module/nouveau").rc == 0
    off = re.search(r"(?m)^blacklist nouveau$", config.stdout) is not None
    read = f"{'loaded' if loaded else 'not loaded'}, {'blacklisted' if off else 'not blacklisted'}"
    right = off and not loaded
    action = None if right else "run `provision apply`" + ("; it reboots the node" if loaded else "")
    return Found(
        Verdict.PASS if right else Verdict.FAIL, read, "not loaded, blacklisted", action, source="modprobe"
    )


@check("nvidia-held", role="worker")
def held(at: Target) -> Found:
    """An upgrade of the system would leave the set as it is."""
    chosen = _chosen(at)
    if isinstance(chosen, Found):
        return chosen
    if chosen is None:
        return skip(f"{_UNLOCKED}; packages-held looks at all that is installed")
    answer = at.host.run(at.profile.manager.upgradable)
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="package manager")
    moving = [name for name in answer.stdout.split() if name in chosen.driver.wanted]
    return Found(
        Verdict.FAIL if moving else Verdict.PASS,
        f"would move: {', '.join(moving)}" if moving else "nothing of the set would move",
        "nothing of the set would move",
        "run `provision apply`" if moving else None,
        source="a simulated upgrade",
    )


@check("nvidia-persistence", role="worker", limit="unit:nvidia-persistenced.service")
def persistence(at: Target) -> Found:
    return _unit(at, "nvidia-persistenced")


@check("nvidia-fabric-manager", role="worker")
def fabric_manager(at: Target) -> Found:
    """It runs where there are NVSwitches, and only there."""
    chosen = _chosen(at)
    if isinstance(chosen, Found):
        return chosen
    if not _switched(at):
        return skip("no NVSwitch")
    found = _unit(at, "nvidia-fabricmanager")
    if found.verdict is not Verdict.FAIL or chosen is None:
        return found
    log = at.host.run("journalctl -q --no-pager -o cat -u nvidia-fabricmanager -n 50")
    why = fabric_cause(log.stdout, chosen.lock) if log.rc == 0 else None
    return Found(Verdict.FAIL, found.read, found.expected, found.action, why=why, source=found.source)


def fabric_cause(log: str, lock: NvidiaLock) -> str | None:
    """Why the fabric manager does not run, where its log says so in words that are known."""
    found = re.search(r"interface version (\S+) don't match with driver version (\d+(?:\.\d+)+)", log)
    if found:
        return f"fabric manager {found[1]} beside driver {found[2]}: both must be {lock.driver}"
    if lock.nvlsm and re.search(r"(?i)nvlsm|ib_umad|infiniband", log):
        return "the NVLink subnet manager is missing, or ib_umad and mlx5_ib are not loaded"
    return None


def _unit(at: Target, unit: str) -> Found:
    if at.node.gpu is None:
        return skip("no GPU in the site file")
    answer = at.host.run(f"systemctl is-active {quote(unit)}")
    if answer.rc not in (0, 3, 4):
        return unknown(answer.stderr.strip() or f"systemctl: exit {answer.rc}", source="systemctl")
    state = answer.stdout.strip() or "not there"
    right = state == "active"
    action = None if right else f"journalctl -u {unit} -n 30; systemctl start {unit}"
    return Found(
        Verdict.PASS if right else Verdict.FAIL, state, "active", action, source=f"systemctl is-active {unit}"
    )


@check("gpu-modes", role="worker", limit="module:nvidia")
def modes(at: Target) -> Found:
    """MIG layout, compute mode, power limit and ECC are as the site file says."""
    if at.node.gpu is None:
        return skip("no GPU in the site file")
    script = exports.modes_script(at.node, locking.settings(at.site, at.node))
    answer = at.host.run(f"sh -c {quote(script)} gpu-modes check")
    if answer.rc == 1:
        read = "; ".join(answer.stderr.split("\n")).strip("; ")
        return Found(Verdict.FAIL, read, "as in the site file", "run `provision apply`", source="nvidia-smi")
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source="nvidia-smi")
    return Found(Verdict.PASS, f"{at.node.gpu.count} GPUs in their modes", source="nvidia-smi")


@check("gpu-devices-first", role="worker", limit="module:nvidia")
def devices_first(at: Target) -> Found:
    """The device files of all GPUs are there before what hands them out starts."""
    if at.node.gpu is None:
        return skip("no GPU in the site file")
    answer = at.host.run(f"systemctl show -p ActiveState,UnitFileState {exports.DEVICES}")
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"systemctl: exit {answer.rc}", source="systemctl")
    values = dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)
    read = f"{values.get('ActiveState')}, {values.get('UnitFileState')}"
    right = read == "active, enabled"
    action = None if right else f"systemctl status {exports.DEVICES}; is the driver loaded?"
    return Found(
        Verdict.PASS if right else Verdict.FAIL, read, "active, enabled", action, source="systemctl show"
    )
