"""Serves and mounts what all nodes share, and makes each node's own scratch."""

from __future__ import annotations

import shlex
from shlex import quote

from provision.components.storage import exports
from provision.components.storage.settings import Scratch
from provision.engine import ops
from provision.engine.deploy import Context, step

_GLUSTER_TEST = """out=$(gluster --mode=script volume info {name} 2>&1) || case $out in
  *'does not exist'*) exit 1;; *) printf '%s\\n' "$out" >&2; exit 2;;
esac
printf '%s\\n' "$out" | grep -qx 'Status: Started' && printf '%s\\n' "$out" | grep -qxF {allow}"""
# force: a single brick may lie on the root file system, if that is where the site file puts it
_GLUSTER_MAKE = """g='gluster --mode=script volume'
$g info {name} >/dev/null 2>&1 || $g create {name} {brick} force >&2 || exit 1
$g set {name} auth.allow {clients} >&2 || exit 1
$g info {name} | grep -qx 'Status: Started' || $g start {name} >&2"""

_MOUNTED = (
    "findmnt -n --mountpoint {path} >/dev/null && {same} && timeout 20 stat {path} >/dev/null 2>&1 || exit 1"
)

# What the local directory holds is hidden by the mount: the server takes it over into what it serves, other nodes
# only look whether the account this tool comes in by would still find its home.
_MOUNT = r"""set -eu
if findmnt -n --mountpoint {path} >/dev/null; then  # it does not answer: its server may be coming back
  if {same}; then
    for i in $(seq 60); do ! timeout 5 stat {path} >/dev/null 2>&1 || exit 0; sleep 0.5; done
  fi
  systemctl daemon-reload
  systemctl restart {unit}
  exit 0
fi
t=$(mktemp -d /run/provision-mount.XXXXXX)
trap 'mountpoint -q "$t" && umount "$t"; rmdir "$t"' EXIT
mkdir -p {path}
mount -t {type} -o {options} {source} "$t"
if [ {take_over} = yes ]; then
  keep=-n; ! cp --help | grep -q 'update[[]=' || keep=--update=none  # newer releases fail where -n skips a file
  cp -a $keep {path}/. "$t"/
fi
home=$(getent passwd {user} | cut -d: -f6)
case $home/ in {path}/?*)
  below=$t/${{home#{path}/}}
  here=$(stat -c %u "$home" 2>/dev/null) || here=none
  there=$(stat -c %u "$below" 2>/dev/null) || there=none
  [ "$here" = "$there" ] || [ "$here" = none ] || {{
    echo "{path} would hide $home of {user} (uid $here), and the shared one belongs to: $there." >&2
    echo "Give {user} the same uid on all nodes, or a home outside of {path}." >&2
    exit 1
  }};;
esac
umount "$t"
systemctl daemon-reload
systemctl start {unit}"""

# The keys of the account that this tool comes in by, where no server is needed to read them. A home that hangs is
# looked into only where they are not there yet, and not for long: a node is asked many things at once.
_KEYS = """home=$(getent passwd {user} | cut -d: -f6) || exit 2
case $home/ in {below}) ;; *) exit 0;; esac
"""
_KEYS_TEST = (
    _KEYS
    + """[ ! -s {file} ] || exit 0
timeout 20 test -s "$home/.ssh/authorized_keys"
case $? in
  0) exit 1;; 1) exit 0;; *) echo "$home does not answer" >&2; exit 2;;
esac"""
)
_KEYS_MAKE = _KEYS + 'install -D -m 644 "$home/.ssh/authorized_keys" {file}'

# A device is blank when it carries no signature, no partition, no holder, and its first MiB is zeros.
_BLANK = """dev={device}
[ -b "$dev" ] || {{ echo "$dev is no block device" >&2; exit 2; }}
found=$(blkid -p -o value -s TYPE "$dev")
[ "$found" = {filesystem} ] && exit 0
signs=$(wipefs -n -p "$dev") || exit 2
parts=$(lsblk -nro NAME "$dev" | wc -l)
if [ -n "$signs" ] || [ "$parts" -ne 1 ] || ! cmp -s -n 1048576 "$dev" /dev/zero; then
  echo "$dev is not blank, not touched: ${{found:-no file system}}, $parts block devices, ${{signs:-no signature}}." >&2
  echo "If nothing on it is wanted: wipefs -a $dev; blkdiscard or dd the beginning; and run again." >&2
  exit 2
fi
exit 1"""


@step("head")
def head(on: Context) -> None:
    """The whole of storage on the head, where it is the server."""
    if _serves(on):
        _serve(on)
        _mount_all(on)


@step("storage")
def storage(on: Context) -> None:
    """The same on a storage node."""
    if _serves(on) and not on.node.has("head"):
        _serve(on)
        _mount_all(on)


@step("*", after=[("storage", "head"), ("storage", "storage")])
def client(on: Context) -> None:
    """Mounts and scratch, once the server has taken over what its own directories hold."""
    if not _serves(on):
        _mount_all(on)


def _serves(on: Context) -> bool:
    serving = exports.server(on.site)
    return serving is not None and serving.name == on.node.name


def _mount_all(on: Context) -> None:
    mounts = exports.mounts(on.site, on.node)
    serves = _serves(on)
    for purpose in exports.client_packages(mounts):
        ops.packages(*on.profile.packages(purpose))
    _keep_access(on, mounts)
    ops.file(f"/etc/systemd/system/{exports.MOUNT_AGAIN.format('')}", exports.mount_again())
    for mounted in mounts:
        if reason := on.limited(f"mount:{mounted.type}"):
            ops.skip(f"mount {mounted.path}", reason)
            continue
        _mount(on, mounted, take_over=serves and mounted.served)
        if serves and mounted.served:
            ops.directory(mounted.path, mode="755" if mounted.path == "/home" else "1777")
            ops.directory(f"{mounted.path}/{exports.PROBE}", mode="1777")
    if serves:
        _homes(on)
    local = exports.scratch(on.site, on.node)
    if local is not None:
        _scratch(on, local)


def _serve(on: Context) -> None:
    section = exports.settings(on.site, on.node)
    ops.directory(section.data)
    if section.provider == "nfs":
        ops.packages(*on.profile.packages("nfs-server"))
        for path in exports.served_paths(on.site):
            ops.directory(exports.data_path(on.site, path))
        ops.file(exports.EXPORTS_FILE, exports.nfs_exports(on.site))
        ops.unit(on.profile.unit("nfs-server"), reads=[exports.EXPORTS_FILE], reload=True)
        return
    ops.packages(*on.profile.packages("glusterfs-server"))
    ops.unit(on.profile.unit("glusterd"))
    clients = exports.gluster_clients(on.site)
    for path in exports.served_paths(on.site):
        name = exports.volume(path)
        ops.ensure(
            f"volume {name}",
            test=_GLUSTER_TEST.format(name=name, allow=quote(f"auth.allow: {clients}")),
            make=_GLUSTER_MAKE.format(
                name=name,
                brick=quote(f"{on.node.name}:{exports.data_path(on.site, path)}"),
                clients=quote(clients),
            ),
            requires="gluster",
        )


def _keep_access(on: Context, mounts: list[exports.Mounted]) -> None:
    """Let the account that this tool comes in by log in while the server of its home is down."""
    user = on.node.access.user
    if user == "root" or not mounts:
        return
    words = {
        "user": quote(user),
        "file": quote(f"{exports.ACCESS_KEYS}/{user}"),
        "below": "|".join(f"{mounted.path}/?*" for mounted in mounts),
    }
    ops.ensure(
        f"keys of {user} on the node itself", test=_KEYS_TEST.format(**words), make=_KEYS_MAKE.format(**words)
    )
    ops.file(exports.ACCESS_DROP_IN, exports.access_dropin(user), validate="sshd -t -f {}")
    ops.unit(on.profile.unit("ssh"), reads=[exports.ACCESS_DROP_IN], reload=True)


def _mount(on: Context, mounted: exports.Mounted, *, take_over: bool) -> None:
    path = f"/etc/systemd/system/{mounted.unit}"
    ops.file(path, exports.mount_unit(mounted))
    words = {
        "path": quote(mounted.path),
        "type": quote(mounted.type),
        "options": quote(mounted.options),
        "source": quote(mounted.source),
        "unit": quote(mounted.unit),
        "user": quote(on.node.access.user),
        "take_over": "yes" if take_over else "no",
        # only of a server: what the kernel calls a local source need not be what the unit calls it
        "same": f'[ "$(findmnt -n -o SOURCE --mountpoint {mounted.path})" = {quote(mounted.source)} ]'
        if ":" in mounted.source
        else "true",
    }
    ops.ensure(
        f"{mounted.path} mounted",
        test=_MOUNTED.format(**words),
        make=_MOUNT.format(**words),
    )
    ops.unit(mounted.unit, reads=[path])


def _homes(on: Context) -> None:
    """The users' homes, made once, here where root may."""
    homes = exports.homes(on.site)
    if not homes:
        return
    lines = "\n".join(shlex.join(home) for home in homes)
    ops.ensure(
        f"homes ({len(homes)})",
        test='while read -r u g h; do [ "$(stat -c %U:%G $h 2>/dev/null)" = $u:$g ] || exit 1; '
        f"done <<'EOF'\n{lines}\nEOF",
        make="while read -r u g h; do\n"
        "  if [ ! -d $h ]; then mkdir -p $(dirname $h) && cp -rT /etc/skel $h && chmod 700 $h && chown -R $u:$g $h; "
        "else chown $u:$g $h; fi || exit 1\n"
        f"done <<'EOF'\n{lines}\nEOF",
    )


def _scratch(on: Context, local: Scratch) -> None:
    if local.device is not None:
        ops.packages(*on.profile.packages(local.filesystem))
        ops.ensure(
            f"{local.filesystem} on {local.device}",
            test=_BLANK.format(device=quote(local.device), filesystem=local.filesystem),
            make=f"mkfs -t {local.filesystem} {quote(local.device)} >&2",
            timeout=1800,
        )
        _mount(
            on, exports.Mounted(local.path, local.device, local.filesystem, local.options), take_over=False
        )
    ops.directory(local.path, mode="1777")
