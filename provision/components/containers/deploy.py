"""Container engines on workers. No container is ended: daemons are reloaded, or restarted where that is safe."""

from __future__ import annotations

from shlex import quote

from provision.components.containers import exports
from provision.components.containers.settings import ContainersSettings
from provision.components.fabric.exports import NCCL
from provision.engine import facts, ops
from provision.engine.deploy import Context, step
from provision.engine.record import OperationFailed
from provision.engine.replace import replace

# With live-restore containers outlive the daemon; without it a restart would end them.
_RESTART = """running=$(docker ps -q | wc -l) && live=$(docker info -f '{{.LiveRestoreEnabled}}') || running=0
if [ "$running" -gt 0 ] && [ "$live" != true ]; then
  echo "$running containers run, and would end with a restart of Docker: stop them, then apply again" >&2
  exit 1
fi
systemctl daemon-reload && systemctl restart docker"""


@step("worker", after=[("nvidia", "self"), ("storage", "self")])
def worker(on: Context) -> None:
    """The engines that the site file names, and GPUs for all of them."""
    wanted = on.settings(ContainersSettings)
    if wanted.docker is not None:
        _docker(on, wanted)
    if wanted.podman is not None:
        ops.packages(*on.profile.packages("podman"))
    if wanted.apptainer is not None:
        ops.packages(*on.profile.packages("apptainer"))
        _apptainer(on)
    _registries(wanted)
    if wanted.enroot is not None:
        _enroot(on, wanted)
    _namespaces(on, wanted)
    _gpus(on, wanted)


def _docker(on: Context, wanted: ContainersSettings) -> None:
    assert wanted.docker is not None
    ops.packages(*on.profile.packages("docker"))
    text = facts.text(exports.DAEMON)
    try:
        content = exports.merged(text, exports.daemon(wanted))
    except exports.MergeError as error:
        raise OperationFailed(
            exports.DAEMON, f"cannot be read, and is left as it is: {error}", "mend it by hand"
        ) from error
    ops.ensure(  # not a file of our own: what others wrote stays, also when this component is switched off
        f"{exports.DAEMON} with our keys",
        test=f'[ "$(cat {exports.DAEMON} 2>/dev/null)" = {quote(content.rstrip())} ] || exit 1',
        make=replace(exports.DAEMON, mode="644", check='dockerd --validate --config-file "$t" >&2'),
        stdin=content.encode(),
    )
    dropin = exports.proxy_dropin(wanted)
    ops.absent(exports.PROXY) if dropin is None else ops.file(exports.PROXY, dropin)
    ops.unit("docker", reads=[exports.DAEMON], reload=True)
    _restarted(wanted)
    for name in wanted.docker.members:
        ops.ensure(
            f"{name} may use Docker",
            test=f"id -nG {quote(name)} | tr ' ' '\\n' | grep -qx docker || exit 1",
            make=f"usermod -aG docker {quote(name)}",
        )


def _restarted(wanted: ContainersSettings) -> None:
    """What only a restart brings: the proxy, and where images are."""
    assert wanted.docker is not None
    proxy = exports.proxy_environment(wanted).get("HTTPS_PROXY", "")
    asked = [f"[ \"$(docker info -f '{{{{.HTTPSProxy}}}}')\" = {quote(proxy)} ]"]
    if wanted.docker.data_root is not None:
        asked.append(f"[ \"$(docker info -f '{{{{.DockerRootDir}}}}')\" = {quote(wanted.docker.data_root)} ]")
    ops.ensure(
        "Docker works with its configuration",
        test=f"{' && '.join(asked)} || exit 1",
        make=_RESTART,
        requires="docker",
    )


def _registries(wanted: ContainersSettings) -> None:
    text = exports.registries(wanted) if wanted.podman or wanted.apptainer else None
    ops.absent(exports.REGISTRIES) if text is None else ops.file(exports.REGISTRIES, text)


def _apptainer(on: Context) -> None:
    """It has one file, and a program that changes a value in it."""
    bound = f"apptainer config global --get 'bind path' | tr , '\\n' | grep -qx {NCCL}"
    wanted = on.site.enabled("fabric")
    ops.ensure(
        "NCCL's configuration in Apptainer's containers" if wanted else "Apptainer as it was",
        test=f"{bound} || exit 1" if wanted else f"! {bound} || exit 1",
        make=f"apptainer config global --{'set' if wanted else 'unset'} 'bind path' {NCCL}",
        requires="apptainer",
    )


def _enroot(on: Context, wanted: ContainersSettings) -> None:
    assert wanted.enroot is not None
    ops.packages(*on.profile.packages("enroot"))
    ops.file(exports.ENROOT_FOLDERS, exports.enroot_folders(wanted.enroot))
    folders = f"{exports.ENROOT_RUNTIME} {wanted.enroot.data} {wanted.enroot.cache}"
    ops.ensure(
        "folders of Enroot",
        test=f'[ "$(stat -c %a {folders} | sort -u)" = 1777 ] || exit 1',
        make=f"systemd-tmpfiles --create {exports.ENROOT_FOLDERS}",
    )
    ops.file(exports.ENROOT, exports.enroot_conf(wanted.enroot))
    if on.site.enabled("fabric"):
        ops.file(exports.ENROOT_NCCL, exports.enroot_nccl())
    else:
        ops.absent(exports.ENROOT_NCCL)
    if wanted.pyxis:
        ops.packages(*on.profile.packages("pyxis"))
        ops.file(exports.PYXIS, exports.pyxis_conf(on.profile.path("pyxis")))


def _namespaces(on: Context, wanted: ContainersSettings) -> None:
    """Ordinary users start containers in user namespaces, which some distributions keep from them."""
    if "apparmor" not in on.profile.paths or not (wanted.enroot or wanted.apptainer):
        return
    path = f"{on.profile.path('apparmor')}/{exports.APPARMOR}"
    ops.file(path, exports.apparmor_profile(), validate="apparmor_parser -QK {}")
    ops.ensure(
        "AppArmor knows them",
        test="grep -q '^provision-enroot ' /sys/kernel/security/apparmor/profiles || exit 1",
        make=f"apparmor_parser -r {path}",
    )


def _gpus(on: Context, wanted: ContainersSettings) -> None:
    """A CDI specification: containers get device files by name, and keep them when systemd is reloaded."""
    if on.node.gpu is None or not wanted.toolkit:
        return
    if (reason := on.limited("module:nvidia")) is not None:
        ops.skip("GPUs in containers", reason)
        return
    ops.packages(*on.profile.packages("nvidia-container-toolkit"))
    ops.ensure(
        "GPUs in containers, by CDI",
        test=exports.cdi_test(on.site.enabled("fabric")),
        make=exports.cdi_make(on.site.enabled("fabric")),
        requires="nvidia-ctk",
    )
