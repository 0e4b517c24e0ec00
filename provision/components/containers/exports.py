"""What containers consist of: configuration that is merged with what others wrote, and files of our own. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from shlex import quote
from typing import TYPE_CHECKING, Any

from provision.components.containers.settings import ContainersSettings, Enroot
from provision.components.fabric.exports import NCCL
from provision.site.problem import Problem

if TYPE_CHECKING:
    from provision.site.models import Node, Site

DAEMON = "/etc/docker/daemon.json"
PROXY = "/etc/systemd/system/docker.service.d/50-provision-proxy.conf"
REGISTRIES = "/etc/containers/registries.conf.d/50-provision.conf"
CDI = "/etc/cdi/nvidia.yaml"
ENROOT = "/etc/enroot/enroot.conf"
ENROOT_FOLDERS = "/etc/tmpfiles.d/50-provision-enroot.conf"
ENROOT_RUNTIME = "/run/enroot"
ENROOT_NCCL = "/etc/enroot/mounts.d/50-provision-nccl.fstab"
PYXIS = "/etc/slurm/plugstack.conf.d/pyxis.conf"
APPARMOR = "provision-containers"  # the profile's file name


def settings(site: Site, node: Node) -> ContainersSettings:
    return site.settings("containers", node, ContainersSettings)


def problems(site: Site) -> Iterator[Problem]:
    """What cannot work in the containers' part of the site file."""
    reported: set[str] = set()
    for node in site.with_role("worker"):
        wanted = settings(site, node)
        if wanted.pyxis and wanted.enroot is None and "enroot" not in reported:
            reported.add("enroot")
            yield Problem(
                "pyxis-without-enroot",
                ("containers", "pyxis"),
                "true",
                "false, or `enroot: {}` beside it",
                why="Pyxis starts containers by Enroot: every job with --container-image would fail",
            )
        if wanted.pyxis and not site.enabled("slurm") and "slurm" not in reported:
            reported.add("slurm")
            yield Problem(
                "pyxis-without-slurm", ("containers", "pyxis"), why="Pyxis is a part of Slurm's srun"
            )
        known = site.file.base.users
        for name in wanted.docker.members if wanted.docker else []:
            if name not in known and name not in reported:
                reported.add(name)
                yield Problem(
                    "docker-member", ("containers", "docker", "members"), name, "a user of base.users"
                )


def docker_members(site: Site) -> bool:
    """Whether users are members of a group that there is on workers alone."""
    return site.enabled("containers") and any(
        (docker := settings(site, node).docker) and docker.members for node in site.with_role("worker")
    )


# Docker: its one file is also written by others


class MergeError(ValueError):
    """A file that others wrote cannot be understood; it is left as it is."""


def daemon(wanted: ContainersSettings) -> dict[str, Any]:
    """What this tool wants in daemon.json."""
    assert wanted.docker is not None
    found: dict[str, Any] = {
        "features": {"cdi": True},
        "live-restore": True,  # a restart of the daemon ends no container
        "log-driver": "json-file",
        "log-opts": {"max-size": wanted.docker.log_size, "max-file": "3"},
    }
    if wanted.docker.data_root is not None:
        found["data-root"] = wanted.docker.data_root
    if wanted.mirrors.get("docker.io"):
        found["registry-mirrors"] = wanted.mirrors["docker.io"]
    if wanted.insecure:
        found["insecure-registries"] = wanted.insecure
    return found


def merged(text: str | None, wanted: Mapping[str, Any]) -> str:
    """`text` with the keys of `wanted`; others stay, lists keep what others put in. Raises MergeError with the line."""
    try:
        document = json.loads(text) if text and text.strip() else {}
    except json.JSONDecodeError as error:
        raise MergeError(f"line {error.lineno}, column {error.colno}: {error.msg}") from error
    if not isinstance(document, dict):
        raise MergeError("line 1: not an object")
    return json.dumps(_over(document, wanted), indent=2) + "\n"


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        old = result.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            result[key] = _over(old, value)
        elif isinstance(old, list) and isinstance(value, list):
            result[key] = [*old, *(item for item in value if item not in old)]
        else:
            result[key] = value
    return result


def proxy_environment(wanted: ContainersSettings) -> dict[str, str]:
    """HTTP_PROXY and its like for daemons."""
    proxy = wanted.proxy
    if proxy is None:
        return {}
    values = {"HTTP_PROXY": proxy.http, "HTTPS_PROXY": proxy.https or proxy.http}
    found = {name: value for name, value in values.items() if value}
    return {**found, "NO_PROXY": ",".join(["localhost", "127.0.0.1", *proxy.none])} if found else {}


def proxy_dropin(wanted: ContainersSettings) -> str | None:
    lines = [f'Environment="{name}={value}"\n' for name, value in proxy_environment(wanted).items()]
    return "[Service]\n" + "".join(lines) if lines else None


# Podman, Apptainer and Skopeo


def registries(wanted: ContainersSettings) -> str | None:
    """The drop-in of registries.conf; None where nothing differs."""
    parts = []
    for name in dict.fromkeys([*wanted.mirrors, *wanted.insecure]):
        lines = ["[[registry]]", f'location = "{name}"']
        if name in wanted.insecure:
            lines.append("insecure = true")
        for address in wanted.mirrors.get(name, []):
            scheme, _, place = address.partition("://")
            lines += ["[[registry.mirror]]", f'location = "{place.rstrip("/")}"']
            if scheme == "http":
                lines.append("insecure = true")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) or None


# Enroot and Pyxis


def enroot_conf(enroot: Enroot) -> str:
    """Paths with a part for each user: what the first user made, the second must not need."""
    user = "user-$(id -u)"
    return (
        f"ENROOT_RUNTIME_PATH {ENROOT_RUNTIME}/{user}\n"
        f"ENROOT_CACHE_PATH {enroot.cache}/{user}\n"
        f"ENROOT_DATA_PATH {enroot.data}/{user}\n"
        f"ENROOT_TEMP_PATH {enroot.temporary}\n"
        "ENROOT_SQUASH_OPTIONS -noI -noD -noF -noX -no-duplicates\n"
        "ENROOT_MOUNT_HOME no\n"
        "ENROOT_RESTRICT_DEV yes\n"
    )


def enroot_folders(enroot: Enroot) -> str:
    """tmpfiles.d: also after a reboot everybody may make a folder, and nobody may touch another's."""
    return "".join(f"d {path} 1777 root root -\n" for path in (ENROOT_RUNTIME, enroot.cache, enroot.data))


def pyxis_conf(plugin: str) -> str:
    return f"required {plugin} runtime_path={ENROOT_RUNTIME}/pyxis execute_entrypoint=0\n"


def shared_paths(text: str) -> list[str]:
    """The paths of an enroot.conf that all users would share: without a part of the user's own."""
    found = []
    for line in text.splitlines():
        name, _, value = line.strip().partition(" ")
        if name in ("ENROOT_RUNTIME_PATH", "ENROOT_CACHE_PATH", "ENROOT_DATA_PATH") and not any(
            part in value
            for part in ("$(id -u)", "${UID}", "$UID", "${HOME}", "$HOME", "${USER}", "$USER", "${XDG_")
        ):
            found.append(f"{name} {value.strip()}")
    return found


# NCCL's configuration is the node's: a container has none of its own, and NCCL does not say that it read none


def enroot_nccl() -> str:
    """For Enroot's mounts.d, which Pyxis starts containers by as well."""
    return f"{NCCL} {NCCL} none x-create=file,bind,ro,nosuid,nodev,noexec,nofail,silent\n"


_WITH_NCCL = f"""import json, sys
spec = json.load(sys.stdin)
mounts = spec.setdefault("containerEdits", {{}}).setdefault("mounts", [])
mounts.append({{"hostPath": "{NCCL}", "containerPath": "{NCCL}", "options": ["ro", "nosuid", "nodev", "bind"]}})
json.dump(spec, sys.stdout, indent=1)"""


def cdi_test(nccl: bool) -> str:
    """Exit 0 where the specification is of the driver that runs and mounts NCCL's configuration (or does not)."""
    mounted = f"grep -qs {quote(NCCL)} {CDI}" if nccl else f"! grep -qs {quote(NCCL)} {CDI}"
    return f'v=$(cat /sys/module/nvidia/version) || exit 2; grep -qs "libcuda.so.$v" {CDI} && {mounted} || exit 1'


def cdi_make(nccl: bool) -> str:
    """Write the specification, as JSON, which YAML is a superset of; with NCCL's configuration for every container."""
    edit = f"python3 -c {quote(_WITH_NCCL)}" if nccl else "cat"
    return (
        "set -e; t=$(mktemp -d); trap 'rm -rf \"$t\"' EXIT; mkdir -p /etc/cdi; "
        f'nvidia-ctk cdi generate --output="$t/all.json" >&2; {edit} <"$t/all.json" >"$t/out.json"; '
        f'install -m 644 "$t/out.json" {CDI}'
    )


def apparmor_profile() -> str:
    """User namespaces for the programs that need them, where the distribution keeps them from all others."""
    programs = {
        "enroot": "/usr/bin/enroot-{nsenter,mount,switchroot}",
        "apptainer": "/usr/libexec/apptainer/bin/starter{,-suid}",
    }
    return "abi <abi/4.0>,\ninclude <tunables/global>\n" + "".join(
        f"profile provision-{name} {path} flags=(unconfined) {{\n  userns,\n}}\n"
        for name, path in programs.items()
    )
