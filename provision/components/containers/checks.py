"""Do the engines answer with the configuration of the site file, one of each, and may ordinary users use them?"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from provision.components.containers import exports
from provision.components.containers.settings import ContainersSettings
from provision.components.fabric.exports import NCCL
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, skip, unknown

_APPLY = "run `provision apply`"


@check("docker-answers", role="worker")
def docker_answers(at: Target) -> Found:
    """The daemon works with what the site file says."""
    wanted = at.settings(ContainersSettings)
    if wanted.docker is None:
        return skip("Docker is not named in the site file")
    text = at.host.run(f"cat {exports.DAEMON}")
    if text.rc == 127:
        return unknown(text.stderr.strip(), source=exports.DAEMON)
    try:
        right = json.loads(exports.merged(text.stdout, exports.daemon(wanted))) == json.loads(
            text.stdout or "{}"
        )
    except exports.MergeError as error:
        return Found(Verdict.FAIL, str(error), "JSON", f"mend {exports.DAEMON}", source=exports.DAEMON)
    if not right:
        return Found(
            Verdict.FAIL,
            "keys differ",
            "those of the site file",
            _APPLY,
            source=exports.DAEMON,
        )
    answer = at.host.run("timeout 15 docker info -f '{{json .}}'")
    if answer.rc == 127:
        return unknown(answer.stderr.strip(), source="docker info")
    if answer.rc != 0:
        said = answer.stderr.strip().splitlines()
        return Found(
            Verdict.FAIL,
            said[-1] if said else "no answer",
            "an answer",
            "journalctl -u docker -n 30",
            source="docker info",
        )
    return judge_docker(answer.stdout)


def judge_docker(info: str) -> Found:
    """Whether the daemon keeps containers over a restart, and GPUs over a reload of systemd."""
    try:
        said = json.loads(info)
        live, driver, errors = (
            said["LiveRestoreEnabled"],
            said["CgroupDriver"],
            said.get("ServerErrors") or [],
        )
    except (ValueError, KeyError, TypeError) as error:
        return unknown(f"docker info cannot be understood: {error}", source="docker info")
    read = f"live-restore {'on' if live else 'off'}, cgroup driver {driver}"
    if errors:
        return Found(
            Verdict.FAIL, "; ".join(errors), "no errors", "journalctl -u docker", source="docker info"
        )
    return Found(
        Verdict.PASS if live else Verdict.FAIL,
        read,
        "live-restore on",
        None if live else "systemctl reload docker",
        source="docker info",
    )


@check("docker-one", role="worker")
def one_docker(at: Target) -> Found:
    """There is one Docker: a second one, from snap, has other libraries and other images."""
    if at.settings(ContainersSettings).docker is None:
        return skip("Docker is not named in the site file")
    answer = at.host.run("systemctl list-unit-files --no-legend --type=service '*docker*.service'")
    if answer.rc not in (0, 1):
        return unknown(answer.stderr.strip() or f"systemctl: exit {answer.rc}", source="systemctl")
    units = [line.split()[0] for line in answer.stdout.splitlines() if line.strip()]
    daemons = [name for name in units if name in ("docker.service", "snap.docker.dockerd.service")]
    right = daemons == ["docker.service"]
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        ", ".join(daemons) or "none",
        "docker.service",
        None if right else "snap remove docker; systemctl restart docker" if len(daemons) > 1 else _APPLY,
        source="systemctl list-unit-files",
    )


@check("enroot-paths", role="worker")
def enroot_paths(at: Target) -> Found:
    """Every user has folders of their own: the second one on a node may start containers, too."""
    if at.settings(ContainersSettings).enroot is None:
        return skip("Enroot is not named in the site file")
    answer = at.host.run(f"cat {exports.ENROOT}")
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"exit {answer.rc}", source=exports.ENROOT)
    shared = exports.shared_paths(answer.stdout)
    return Found(
        Verdict.FAIL if shared else Verdict.PASS,
        "; ".join(shared) or "a folder for each user",
        "a folder for each user, such as user-$(id -u)",
        _APPLY if shared else None,
        source=exports.ENROOT,
    )


@check("user-namespaces", role="worker")
def user_namespaces(at: Target) -> Found:
    """Ordinary users may make user namespaces: Apptainer, Enroot and Podman start containers in them."""
    wanted = at.settings(ContainersSettings)
    if not (wanted.enroot or wanted.apptainer or wanted.podman):
        return skip("no engine that needs them is named in the site file")
    answer = at.host.run(
        "cat /proc/sys/user/max_user_namespaces && f=/proc/sys/kernel/apparmor_restrict_unprivileged_userns && "
        "if [ -e $f ]; then cat $f; else echo absent; fi && "
        "{ grep -c '^provision-enroot ' /sys/kernel/security/apparmor/profiles 2>/dev/null || [ $? -le 2 ]; }"
    )
    lines = answer.stdout.split()
    if answer.rc != 0 or len(lines) < 2 or not lines[0].isdigit():
        return unknown(answer.stderr.strip() or "cannot be read", source="/proc/sys")
    return judge_namespaces(int(lines[0]), lines[1], lines[2:] not in ([], ["0"]))


def judge_namespaces(most: int, apparmor: str, profile: bool) -> Found:
    """`apparmor` is the kernel's restriction: "absent" where it has none, "0" off, "1" on."""
    read = f"user.max_user_namespaces {most}, AppArmor's restriction {apparmor}"
    read += ", with a profile for container engines" if profile else ""
    right = most > 0 and (apparmor in ("absent", "0") or profile)
    action = _APPLY if most > 0 else "sysctl user.max_user_namespaces"
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        read,
        "allowed for container engines",
        None if right else action,
        why=None if right else "containers start for root alone",
        source="/proc/sys",
    )


@check("gpus-in-containers", role="worker", limit="module:nvidia")
def gpus(at: Target) -> Found:
    """The CDI specification is that of the driver that runs."""
    wanted = at.settings(ContainersSettings)
    if at.node.gpu is None or not wanted.toolkit:
        return skip("no GPUs for containers here")
    answer = at.host.run(f"cat /sys/module/nvidia/version && cat {exports.CDI}")
    if answer.rc == 127:
        return unknown(answer.stderr.strip(), source=exports.CDI)
    version, _, text = answer.stdout.partition("\n")
    if not version:
        return Found(Verdict.FAIL, "no driver is loaded", "a specification", _APPLY, source=exports.CDI)
    if answer.rc != 0:
        return unknown(answer.stderr.strip() or f"cat: exit {answer.rc}", source=exports.CDI)
    right = f"libcuda.so.{version}" in text
    return Found(
        Verdict.PASS if right else Verdict.FAIL,
        f"of {version}" if right else "of another driver",
        f"of {version}",
        None if right else _APPLY,
        source=exports.CDI,
    )


# Of specifications for the same devices the one in /run wins: the toolkit's own service writes there.
_OF_CDI = (
    "command -v grep >/dev/null || grep || exit; "
    "for f in /run/cdi/*.yaml /run/cdi/*.json /etc/cdi/*.yaml /etc/cdi/*.json; do "
    'if grep -qs nvidia.com/gpu "$f"; then cat "$f"; exit; fi; done'
)


@check("nccl-in-containers", role="worker")
def nccl(at: Target) -> Found:
    """Each engine shows its containers the node's configuration of NCCL, which else chooses by itself there."""
    wanted = at.settings(ContainersSettings)
    if not at.site.enabled("fabric") or at.node.gpu is None:
        return skip("no GPUs, or no fabric whose settings NCCL is told")
    commands = {}
    if (wanted.docker or wanted.podman) and wanted.toolkit and at.limited("module:nvidia") is None:
        commands["Docker and Podman (GPUs by CDI)"] = _OF_CDI
    if wanted.enroot:
        commands["Enroot"] = "cat /etc/enroot/mounts.d/*.fstab"
    if wanted.apptainer:
        commands["Apptainer"] = "apptainer config global --get 'bind path'"
    if not commands:
        return skip("no engine that gives GPUs to containers here")
    answers = {engine: at.host.run(command) for engine, command in commands.items()}
    found = judge_nccl({engine: answer.stdout for engine, answer in answers.items() if answer.rc == 0})
    unread = {engine: answer for engine, answer in answers.items() if answer.rc != 0}
    if unread and found.verdict is Verdict.PASS:
        why = "\n".join(each.stderr.strip() or f"{engine}: exit {each.rc}" for engine, each in unread.items())
        return unknown(why, source="configuration of the engines")
    return found


def judge_nccl(told: Mapping[str, str]) -> Found:
    """Engine -> the part of its configuration that says what containers get mounted."""
    blind = [engine for engine, text in told.items() if not re.search(rf"(?<![\w/]){NCCL}\b", text)]
    return Found(
        Verdict.FAIL if blind else Verdict.PASS,
        f"not in containers of {', '.join(blind)}" if blind else f"in containers of {', '.join(told)}",
        f"{NCCL} in all containers with GPUs",
        _APPLY if blind else None,
        source="configuration of the engines",
    )
