"""Builds what nodes start from: layers of Debian packages, made once a machine and kept by digest.

A layer is a folder of the cache, named by the digest of all that decides its content (suite, packages, the
steps below, the layers beneath), never of the mirror. A build works in a mount namespace and a control group
of its own: whatever kills it, the next one finds nothing mounted and starts again from the packages fetched.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from provision.lab import cgroup, state
from provision.lab.command import InputError, LabError
from provision.lab.host import Mirror
from provision.lab.progress import Progress

DEFAULTS = Path(__file__).with_name("layers.yml")

# Runs in a new mount namespace: $1 lower folders, $2 scratch folder, then the program to run on the stack.
_MOUNT = """
set -e
export LIBMOUNT_FORCE_MOUNT2=always  # see supervisor.py
mount -t overlay plab-build -o "lowerdir=$1,upperdir=$2/upper,workdir=$2/work" "$2/root"
shift 2
exec "$@"
"""

# In the base layer's root ($1): the account that the controller logs in with, as on a fresh server.
_BASE_SETUP = """
chroot "$1" useradd --uid 1000 --user-group --create-home --shell /bin/bash --comment 'operator' ops
install -d -m 700 -o 1000 -g 1000 "$1/home/ops/.ssh"
install -d -m 700 "$1/root/.ssh"
rm -f "$1"/etc/ssh/ssh_host_* "$1/etc/apt/sources.list" "$1/etc/hostname" "$1/etc/resolv.conf"
: >"$1/etc/machine-id"
: >"$1/etc/resolv.conf"
install -d "$1/data" "$1/etc/provision"
"""

# In every other layer's root, without a running system.
_INSTALL = """
set -e
export DEBIAN_FRONTEND=noninteractive
printf '#!/bin/sh\\nexit 101\\n' >/usr/sbin/policy-rc.d
chmod 755 /usr/sbin/policy-rc.d
apt-get update
apt-get install -y --no-install-recommends -o Dpkg::Options::=--force-unsafe-io "$@"
rm -f /usr/sbin/policy-rc.d /var/cache/apt/srcpkgcache.bin /var/cache/apt/archives/*.deb
"""


@dataclass(frozen=True)
class Layer:
    """One entry of layers.yml."""

    name: str
    roles: tuple[str, ...]
    packages: tuple[str, ...]
    unique: tuple[tuple[str, int], ...] = ()  # path, size in bytes: random content, made for each node


@dataclass(frozen=True)
class Recipe:
    """All layers, lowest first, with the Debian suite that they come from."""

    suite: str
    components: tuple[str, ...]
    layers: tuple[Layer, ...]

    def select(self, names: Sequence[str]) -> Recipe:
        """This recipe with the layers `names` only; the lowest one is always needed."""
        known = [layer.name for layer in self.layers]
        unknown = [name for name in names if name not in known]
        if unknown:
            raise InputError(f"--layers {','.join(unknown)}: no such layer; there are {', '.join(known)}")
        chosen = tuple(layer for i, layer in enumerate(self.layers) if i == 0 or layer.name in names)
        return Recipe(self.suite, self.components, chosen)

    def stack(self, role: str) -> tuple[Layer, ...]:
        """The layers of a node with `role`, lowest first."""
        return tuple(layer for layer in self.layers if role in layer.roles)


def load_recipe(path: Path = DEFAULTS) -> Recipe:
    """Read layers.yml."""
    data = yaml.safe_load(path.read_text())
    return Recipe(
        data["suite"],
        tuple(data["components"]),
        tuple(
            Layer(name, tuple(e["roles"]), tuple(e["packages"]), tuple(sorted(e.get("unique", {}).items())))
            for name, e in data["layers"].items()
        ),
    )


def folder_names(recipe: Recipe, stack: Sequence[Layer]) -> tuple[str, ...]:
    """The cache folder of each layer of `stack`: its name and the digest of what decides its content."""
    names: list[str] = []
    below = ""
    for layer in stack:
        decides = [
            recipe.suite,
            recipe.components,
            layer.packages,
            layer.unique,
            _BASE_SETUP if not below else _INSTALL,
            below,
        ]
        below = hashlib.sha256(json.dumps(decides).encode()).hexdigest()
        names.append(f"{layer.name}-{below[:12]}")
    return tuple(names)


def ensure(
    recipe: Recipe, role: str, mirror: Mirror, cache: Path, cgroup_root: Path, progress: Progress
) -> None:
    """Make the layers of `role` that the cache lacks."""
    stack = recipe.stack(role)
    names = folder_names(recipe, stack)
    for i, layer in enumerate(stack):
        target = cache / "layers" / names[i]
        if target.is_dir():
            continue
        scratch = target.with_name(f".build-{names[i]}")
        with state.locked(scratch):
            if not target.is_dir():
                lowers = [cache / "layers" / name for name in names[:i]]
                _build(recipe, layer, scratch, target, lowers, mirror, cache, cgroup_root, progress)
            shutil.rmtree(scratch)


def unique_files(recipe: Recipe, role: str) -> dict[str, int]:
    """Path and size of the files that packages fill with random bytes on installation."""
    return {path: size for layer in recipe.stack(role) for path, size in layer.unique}


def build_group(cgroup_root: Path, scratch: Path) -> Path:
    """The control group of the build in `scratch`, which no other folder of this machine shares, by any path."""
    status = scratch.stat()
    return cgroup_root / f"plab-build-{status.st_dev:x}-{status.st_ino:x}"


def _build(
    recipe: Recipe,
    layer: Layer,
    scratch: Path,
    target: Path,
    lowers: Sequence[Path],
    mirror: Mirror,
    cache: Path,
    cgroup_root: Path,
    progress: Progress,
) -> None:
    group = build_group(cgroup_root, scratch)
    cgroup.remove(group)
    for left in scratch.iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    for part in ("upper", "work", "root"):
        (scratch / part).mkdir()
    log = cache / "log" / f"{target.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    progress.say(layer.name, f"building: {len(layer.packages)} packages and what they need (log: {log})")
    cgroup.make(group)
    try:
        with package_cache(cache, group) as proxy:
            if lowers:
                _install(recipe, layer, scratch, lowers, mirror, proxy, group, log, progress)
            else:
                _bootstrap(recipe, layer, scratch / "upper", mirror, proxy, group, log, progress)
    finally:
        cgroup.remove(group)
    subprocess.run(["sync", "-f", scratch], check=True)
    (scratch / "upper").rename(target)
    progress.say(layer.name, "built")


def _bootstrap(
    recipe: Recipe,
    layer: Layer,
    root: Path,
    mirror: Mirror,
    proxy: str,
    group: Path,
    log: Path,
    progress: Progress,
) -> None:
    argv = [
        "mmdebstrap",
        "--mode=root",
        "--variant=minbase",
        f"--components={','.join(recipe.components)}",
        f"--include={','.join(layer.packages)}",
        f'--aptopt=Acquire::http::Proxy "{proxy}"',
        "--dpkgopt=force-unsafe-io",
        "--skip=output/dev",
        f"--customize-hook={_BASE_SETUP}",
        recipe.suite,
        str(root),
        *_source_lines(recipe, mirror),
    ]
    _logged(cgroup.entering(group, argv), layer.name, log, progress)
    for file in (root / "etc/apt/apt.conf.d").glob("99mmdebstrap"):
        file.unlink()
    for file in (root / "etc/dpkg/dpkg.cfg.d").glob("99mmdebstrap"):
        file.unlink()


def _install(
    recipe: Recipe,
    layer: Layer,
    scratch: Path,
    lowers: Sequence[Path],
    mirror: Mirror,
    proxy: str,
    group: Path,
    log: Path,
    progress: Progress,
) -> None:
    upper = scratch / "upper"
    state.write_file(upper / "etc/apt/sources.list", "\n".join(_source_lines(recipe, mirror)) + "\n")
    state.write_file(
        upper / "etc/apt/apt.conf.d/00lab", f'Acquire::http::Proxy "{proxy}";\nAcquire::GzipIndexes "true";\n'
    )
    nspawn = [
        *(
            "systemd-nspawn",
            "--quiet",
            "--register=no",
            "--keep-unit",
            "--as-pid2",
            f"--directory={scratch / 'root'}",
        ),
        *(
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
            "--console=pipe",
            f"--machine={scratch.name[1:40]}",
        ),
        *("sh", "-c", _INSTALL, "sh", *layer.packages),
    ]
    stacked = ":".join(str(lower) for lower in reversed(lowers))
    argv = ["unshare", "--mount", "sh", "-c", _MOUNT, "sh", stacked, str(scratch), *nspawn]
    _logged(cgroup.entering(group, argv), layer.name, log, progress)
    (upper / "etc/apt/sources.list").unlink()
    (upper / "etc/apt/apt.conf.d/00lab").unlink()
    for path, _size in layer.unique:
        (upper / path.lstrip("/")).unlink(missing_ok=True)
    disable_units(upper)


def disable_units(layer: Path) -> list[str]:
    """Take back what installing packages enabled: every link to a unit in etc/systemd/system of the layer."""
    folder = layer / "etc/systemd/system"
    taken = [
        link
        for link in sorted(folder.rglob("*"))
        if link.is_symlink() and link.readlink() != Path("/dev/null")
    ]
    for link in taken:
        link.unlink()
    return [str(link.relative_to(folder)) for link in taken]


def _source_lines(recipe: Recipe, mirror: Mirror) -> list[str]:
    components = " ".join(recipe.components)
    lines = [f"deb {mirror.url} {suite} {components}" for suite in (recipe.suite, f"{recipe.suite}-updates")]
    if mirror.security:
        lines.append(f"deb {mirror.security} {recipe.suite}-security {components}")
    return lines


@contextmanager
def package_cache(cache: Path, group: Path) -> Iterator[str]:
    """A package cache for a build on this machine's loopback: its address."""
    argv = [
        sys.executable,
        "-m",
        "provision.lab.proxy",
        "--listen",
        "127.0.0.1:0",
        "--cache",
        str(cache / "packages"),
    ]
    with subprocess.Popen(
        cgroup.entering(group, argv), stdout=subprocess.PIPE, text=True, env=state.python_environment()
    ) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        try:
            if not port:
                raise LabError(f"the package cache did not start: {' '.join(argv)}")
            yield f"http://127.0.0.1:{port}/"
        finally:
            process.kill()


def _logged(argv: Sequence[str], name: str, log: Path, progress: Progress) -> None:
    """Run `argv` with its output in `log`. Raises LabError with the last lines of a failure."""
    last: list[str] = []
    with (
        log.open("w") as file,
        subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                last = [*last[-14:], line.rstrip()]
                progress.detail(name, line.strip())
        except BaseException:  # an interrupted build must not be waited for
            process.kill()
            raise
    if process.returncode != 0:
        raise LabError(
            f"layer {name}: exit status {process.returncode}; the end of {log}:\n" + "\n".join(last)
        )
