"""One consistent set of NVIDIA's software for each group of GPU nodes, and whether a set can work. Pure.

The rules are data in profiles/nvidia.yml. They are looked at three times: in the site file, before any node is
touched; when a set is resolved; and in the lock file, which people edit, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import TYPE_CHECKING

from provision.components.fabric.settings import FabricSettings
from provision.components.nvidia.settings import NvidiaSettings
from provision.engine import limits
from provision.profiles import UnsupportedDistribution
from provision.profiles.doca import doca
from provision.profiles.gpu import GpuProfile, all_models, gpu_model
from provision.profiles.nvidia import Modules, Rules, number, rules, runs
from provision.profiles.nvidia_packages import Build, Item, Origin, nvidia_packages
from provision.site.lock import NvidiaLock
from provision.site.models import Gpu
from provision.site.problem import Key, Problem, nearest, one_of, shown

if TYPE_CHECKING:
    from provision.site.lock import Lock
    from provision.site.models import Node, Site

SECTION = "nvidia"
BUILDS: tuple[Build, ...] = ("precompiled", "dkms")  # the preferred one first
OWN = "own"  # the flavour of a kernel that somebody built: its headers are on the node, and in no package


@dataclass(frozen=True)
class Offer:
    """What one node of a group says, whose package manager was asked."""

    node: str
    distribution: str
    kernel: str | None  # `uname -r`; None: the kernel is not the node's own
    versions: Mapping[str, Sequence[str]]  # package -> versions that its sources offer, the newest first
    headers: bool = False  # those of the kernel that runs are there


class Unresolvable(Exception):
    """There is no set for a group; says why."""


def gpu_groups(site: Site) -> dict[str, list[Node]]:
    """The groups with GPUs, each with its nodes; a node belongs to the first group that lists it."""
    found: dict[str, list[Node]] = {}
    for node in site.with_role("worker"):
        if node.gpu is not None:
            found.setdefault(node.group, []).append(node)
    return found


def settings(site: Site, node: Node) -> NvidiaSettings:
    return site.settings("nvidia", node, NvidiaSettings)


def doca_of(site: Site, node: Node) -> str | None:
    """The release of DOCA-Host that the site file names for a node; None: the kernel's own RDMA stack."""
    fabric = site.settings("fabric", node, FabricSettings) if site.enabled("fabric") else None
    return fabric.doca.version if fabric is not None and fabric.doca is not None else None


def gpus_of(gpu: Gpu) -> str:
    return f"{gpu.count} x {gpu.model}"


# The site file


def problems(site: Site, today: date | None = None) -> Iterator[Problem]:
    """What cannot work, or soon will not, in nvidia's part of the site file."""
    for group, nodes in gpu_groups(site).items():
        differing = next((node for node in nodes if _locked(site, node) != _locked(site, nodes[0])), None)
        if differing is not None:
            yield Problem(
                "nvidia-differs",
                ("nodes", differing.name),
                why=f"{differing.name} and {nodes[0].name} of group {group} would get different software",
                action="make a group of its own for it",
            )
            continue
        yield from _group_problems(site, group, nodes[0], today or date.today())


def _locked(site: Site, node: Node) -> tuple[object, ...]:
    """What of a node's settings decides its set."""
    own = settings(site, node)
    apart = {"mig", "compute_mode", "power_limit", "ecc", "module_options"}
    return node.gpu, own.model_dump_json(exclude=apart), doca_of(site, node)


def _group_problems(site: Site, group: str, node: Node, today: date) -> Iterator[Problem]:
    wanted, known = settings(site, node), rules()
    assert node.gpu is not None
    model = gpu_model(node.gpu.model)
    if model is None:
        names = [each.name for each in all_models()]
        yield Problem(
            "nvidia-gpu",
            ("groups", group, "gpu", "model"),
            shown(node.gpu.model),
            one_of(names),
            nearest(node.gpu.model, names),
            "which driver and which modules it needs is not known",
            "add it to provision/profiles/gpus.yml",
        )
        return
    at = Places(site, group)
    yield from _module_problems(known, node.gpu, model, wanted, at)
    branch = _branch(known, model, wanted, today)
    yield from _branch_problems(known, node.gpu, model, wanted, branch, today, at)
    yield from _fabric_problems(node.gpu, model, wanted, at)
    if wanted.mig != "none" and not model.mig:
        yield Problem("nvidia-mig", at("mig"), why=f"{node.gpu.model} cannot be divided by MIG")
    elif isinstance(wanted.mig, dict):
        for key in wanted.mig:
            if key != "all" and int(key) >= node.gpu.count:
                yield Problem(
                    "nvidia-mig", (*at("mig"), key), shown(key), f"a GPU below {node.gpu.count}", at_key=True
                )
    if branch is not None and branch in known.branches and known.fits(model, branch):
        driver = wanted.driver or known.branches[branch].driver
        yield from _cuda_problems(known, model, node.gpu, wanted, driver, at)


@dataclass(frozen=True)
class Places:
    """Where a key of nvidia's settings is written for a group."""

    site: Site
    group: str

    def __call__(self, name: str) -> Key:
        own = self.site.file.groups[self.group].settings.get("nvidia", {})
        return ("groups", self.group, "settings", "nvidia", name) if name in own else (SECTION, name)


def _module_problems(
    known: Rules, gpu: Gpu, model: GpuProfile, wanted: NvidiaSettings, at: Places
) -> Iterator[Problem]:
    allowed = known.driven(model).modules
    if wanted.modules is not None and wanted.modules not in allowed:
        yield Problem(
            "nvidia-modules",
            at("modules"),
            wanted.modules,
            " or ".join(allowed),
            why=f"{gpu.model} ({model.architecture}) is driven by {' or '.join(allowed)} kernel modules only "
            f"({known.driven(model).source})",
        )


def _branch(known: Rules, model: GpuProfile, wanted: NvidiaSettings, today: date) -> int | None:
    """The branch that the site file asks for, else the one that suits; None: the distribution's is taken."""
    if wanted.driver is not None:
        return number(wanted.driver)[0]
    if wanted.branch is not None:
        return wanted.branch
    return known.choose(model, today) if wanted.source == "nvidia" else None


def _branch_problems(
    known: Rules,
    gpu: Gpu,
    model: GpuProfile,
    wanted: NvidiaSettings,
    branch: int | None,
    today: date,
    at: Places,
) -> Iterator[Problem]:
    name = "driver" if wanted.driver is not None else "branch"
    if wanted.driver is not None and wanted.branch not in (None, branch):
        yield Problem(
            "nvidia-branch", at("branch"), str(wanted.branch), f"{branch}, that of driver {wanted.driver}"
        )
    if branch is None:
        if wanted.source == "nvidia":
            yield Problem(
                "nvidia-branch", (SECTION,), why=f"no supported branch drives {gpu.model}", at_key=True
            )
        return
    if branch not in known.branches:
        yield Problem(
            "nvidia-branch",
            at(name),
            str(branch),
            one_of(map(str, known.branches)),
            why="nothing is known about this branch",
            action="add it to provision/profiles/nvidia.yml",
        )
        return
    driven = known.driven(model)
    if not known.fits(model, branch):
        last = driven.last
        expected = f"{known.first(model)} to {last}" if last else f"{known.first(model)} or newer"
        yield Problem(
            "nvidia-branch",
            at(name),
            str(branch),
            expected,
            why=f"branch {branch} does not drive {gpu.model} ({driven.source})",
        )
    elif not known.branches[branch].supported(today):
        yield Problem(
            "nvidia-support",
            at(name),
            str(branch),
            why=f"branch {branch} gets no security updates since {known.branches[branch].ends} "
            f"({known.branches[branch].source})",
            warning=True,
        )


def _fabric_problems(gpu: Gpu, model: GpuProfile, wanted: NvidiaSettings, at: Places) -> Iterator[Problem]:
    asked, present = wanted.fabric_manager, rules().switches(model, gpu.count) is not None
    if asked and not present:
        yield Problem(
            "nvidia-fabric-manager",
            at("fabric_manager"),
            shown(asked),
            "false",
            why=f"{gpus_of(gpu)} has no NVSwitch: the fabric manager would not start",
        )
    elif asked is False and present:
        yield Problem(
            "nvidia-fabric-manager",
            at("fabric_manager"),
            "false",
            "true",
            why=f"{gpus_of(gpu)} has NVSwitches: without fabric manager CUDA fails with error 802",
        )
    elif isinstance(asked, str) and asked != wanted.driver:
        yield Problem(
            "nvidia-fabric-manager",
            at("fabric_manager"),
            asked,
            f"the driver's version, {wanted.driver or 'which the lock decides: leave it out'}",
            why="a fabric manager of another patch level than the driver ends at its start",
        )


def _cuda_problems(
    known: Rules, model: GpuProfile, gpu: Gpu, wanted: NvidiaSettings, driver: str, at: Places
) -> Iterator[Problem]:
    last = known.driven(model).last_cuda
    if wanted.cuda is not None and last is not None and number(wanted.cuda) > number(last):
        yield Problem(
            "nvidia-cuda",
            at("cuda"),
            wanted.cuda,
            f"{last} or older",
            why=f"CUDA {wanted.cuda} makes no code for {gpu.model} ({known.driven(model).source})",
        )
    programs = [("cuda", wanted.cuda, f"CUDA {wanted.cuda}")] if wanted.cuda else []
    for image in wanted.images:
        cuda = known.image_cuda(image)
        if cuda is None:
            yield Problem(
                "nvidia-image",
                at("images"),
                shown(image),
                why="which CUDA is in it is not known: whether the driver runs it is not checked",
                warning=True,
            )
        else:
            programs.append(("images", cuda, f"{image} (CUDA {cuda})"))
    for key, cuda, what in programs:
        assert cuda is not None
        found = runs(known, driver, cuda, compat=wanted.compat)
        if found.how in ("no", "unknown"):
            yield Problem("nvidia-cuda", at(key), what, f"one that driver {driver} runs", why=found.why)
        elif found.how == "minor":
            yield Problem("nvidia-cuda", at(key), what, why=found.why, warning=True)


# Resolving


def resolve(site: Site, group: str, today: date, offer: Offer) -> NvidiaLock:
    """The set for `group`, whose nodes are as `offer` says. Raises Unresolvable."""
    node = gpu_groups(site)[group][0]
    wanted, known = settings(site, node), rules()
    assert node.gpu is not None
    model = gpu_model(node.gpu.model)
    assert model is not None  # problems() refuses others
    origin = origin_of(offer.distribution, wanted)
    branch = _branch(known, model, wanted, today)
    driver = wanted.driver or _newest(known, origin, branch, wanted, offer)
    branch = number(driver)[0]
    if branch not in known.branches:
        raise Unresolvable(f"{driver}: nothing is known about branch {branch} (profiles/nvidia.yml)")
    if not known.fits(model, branch):
        raise Unresolvable(
            f"{offer.distribution} offers driver {driver}, whose branch does not drive {node.gpu.model}: "
            f"{known.first(model)} or newer does; take `source: nvidia`"
        )
    modules = _modules(known, model, wanted, driver, kernel_number(offer))
    items = origin.items(branch)
    flavour = _flavour(offer)
    release = doca_of(site, node)
    why = doca().why_not(release, offer.distribution, offer.kernel) if release else None
    if why is not None:
        raise Unresolvable(why)
    switched = known.switches(model, node.gpu.count)
    lock = NvidiaLock(
        gpus=gpus_of(node.gpu),
        distribution=offer.distribution,
        kernel=flavour,
        source=wanted.source,
        branch=branch,
        driver=driver,
        modules=modules,
        build=_build(origin, items, modules, wanted, offer, flavour),
        fabric_manager=driver if switched else None,
        nvlsm=switched is not None and switched.generation == 4,
        imex=driver if model.name in known.multi_node else None,
        cuda=wanted.cuda,
        compat=wanted.compat,
        nccl=wanted.nccl,
        doca=release,
        also=list(wanted.also),
    )
    missing = [name for name in item_names(lock) if name not in items]
    if missing:
        raise Unresolvable(
            f"{', '.join(missing)}: not in source {wanted.source} on {offer.distribution}"
            + ("; take `source: nvidia`" if wanted.source == "distribution" else "")
        )
    return lock


def origin_of(distribution: str, wanted: NvidiaSettings) -> Origin:
    """The source that the site file names, on this distribution. Raises Unresolvable."""
    try:
        known = nvidia_packages(distribution)
    except UnsupportedDistribution as error:
        raise Unresolvable(str(error)) from error
    if wanted.source not in known.sources:
        raise Unresolvable(f"{distribution} has no driver of its own: take `source: nvidia`")
    origin = known.sources[wanted.source]
    keyring = origin.repository.keyring if origin.repository is not None else None
    if keyring is not None and not (keyring.sha256 or wanted.keyring):
        raise Unresolvable(
            f"the checksum of {keyring.package} in NVIDIA's repository for {distribution} is not known: get it on "
            "a way you trust and name it as nvidia.keyring"
        )
    return origin


def probes(distribution: str, wanted: NvidiaSettings) -> list[str]:
    """The packages whose versions tell what a source offers, for every branch that may be meant."""
    origin = origin_of(distribution, wanted)
    branches = [wanted.branch] if wanted.branch else list(rules().branches)
    kernel = nvidia_packages(distribution).kernel
    names = dict.fromkeys(name.format(flavour=kernel.default) for name in kernel.follow)
    for branch in branches:
        for package in origin.items(branch)["driver"].packages[:1]:
            names[package.format(branch=branch)] = None
        for name, item in origin.items(branch).items():
            if name.endswith(".precompiled"):
                names |= dict.fromkeys(p.split("{flavour}")[0].format(branch=branch) for p in item.packages)
    return [name for name in names if not name.endswith("-")]


def _newest(known: Rules, origin: Origin, branch: int | None, wanted: NvidiaSettings, offer: Offer) -> str:
    """The newest driver that the node's sources offer, of `branch` where one is meant, else the profile's."""
    offered = [
        driver
        for package in probes(offer.distribution, wanted)
        for version in offer.versions.get(package, ())
        if (driver := upstream(version)) is not None
    ]
    if branch is not None:
        offered = [driver for driver in offered if number(driver)[0] == branch]
        if (
            origin.repository is not None
        ):  # which need not be there yet; what is tested wins over what is newest
            return known.branches[branch].driver
    if not offered:
        raise Unresolvable(
            f"{offer.node}: the package sources of {offer.distribution} offer no driver"
            + (f" of branch {branch}" if branch is not None else "")
            + "; are contrib and non-free (Debian) or restricted (Ubuntu) enabled?"
        )
    return max(offered, key=number)


def _modules(
    known: Rules, model: GpuProfile, wanted: NvidiaSettings, driver: str, kernel: str | None
) -> Modules:
    """The kind that the site file names, else the best one that can be had for the kernel."""
    kinds = [wanted.modules] if wanted.modules else known.driven(model).modules
    misfits = {kind: known.misfit(driver, kind, kernel) if kernel else None for kind in kinds}
    good = [kind for kind, why in misfits.items() if why is None]
    if not good:
        raise Unresolvable("; ".join(why for why in misfits.values() if why))
    return good[0]


def kernel_number(offer: Offer) -> str | None:
    """The number of the kernel that modules are built for: that of the node, else that of the headers offered."""
    headers = nvidia_packages(offer.distribution).kernel
    names = [name.format(flavour=headers.default) for name in headers.follow]
    texts = [offer.kernel or "", *(version for name in names for version in offer.versions.get(name, ()))]
    return next((found[0] for text in texts if (found := re.match(r"\d+\.\d+(\.\d+)?", text))), None)


def upstream(version: str) -> str | None:
    """The driver's number in a package's version: "3:580.126.20-1.el9" is 580.126.20; None where there is none."""
    plain = version.split(":")[-1].split("-")[0].split("+")[0].split("~")[0]
    parts = plain.split(".")
    good = len(parts) in (2, 3) and all(part.isdigit() for part in parts) and len(parts[0]) == 3
    return plain if good else None


def _flavour(offer: Offer) -> str:
    """That of the kernel that runs, OWN for one that is not the distribution's and has its headers."""
    kernel = nvidia_packages(offer.distribution).kernel
    if offer.kernel is None:
        return kernel.default
    flavour = kernel.flavour_of(offer.kernel)
    if flavour is None and not offer.headers:
        raise Unresolvable(
            f"{offer.node} runs kernel {offer.kernel}, which is none of {offer.distribution}'s and has no headers: no "
            f"modules can be had for it. Boot one of {offer.distribution}'s kernels, or put this one's headers at "
            f"/lib/modules/{offer.kernel}/build; where the kernel is not the machine's own (a container, a virtual "
            f'machine that is given its driver) say so in {limits.PATH}: {{"limits": [{{"what": "kernel", "reason": '
            '"..."}]}'
        )
    return flavour or OWN


def _build(
    origin: Origin,
    items: Mapping[str, Item],
    modules: str,
    wanted: NvidiaSettings,
    offer: Offer,
    flavour: str,
) -> Build:
    kinds: list[Build] = [kind for kind in BUILDS if f"modules.{modules}.{kind}" in items]
    if flavour == OWN:
        if wanted.build == "precompiled":
            raise Unresolvable(
                f"there are no precompiled modules for kernel {offer.kernel}: leave `build` out"
            )
        kinds = [kind for kind in kinds if kind == "dkms"]
    if wanted.build is not None:
        if wanted.build not in kinds:
            raise Unresolvable(
                f"there are no {wanted.build} {modules} modules from source {wanted.source} on {offer.distribution}"
            )
        return wanted.build
    if not kinds:
        raise Unresolvable(f"no {modules} modules from source {wanted.source} on {offer.distribution}")
    return kinds[0]


def item_names(lock: NvidiaLock) -> list[str]:
    """The items of a source that make up a set, in the order in which they are installed."""
    fabric = ["fabric-manager", "nscq"] if lock.fabric_manager else []
    named = {"imex": lock.imex, "cuda": lock.cuda, "compat": lock.compat, "nccl": lock.nccl}
    return [
        "driver",
        f"modules.{lock.modules}.{lock.build}",
        *fabric,
        *(["nvlsm"] if lock.nvlsm else []),
        *(name for name, version in named.items() if version),
        *lock.also,
    ]


# The lock file


def lock_problems(site: Site, lock: Lock) -> list[str]:
    """Why the lock file does not give every group what the site file asks for, or could not work."""
    found = []
    for group, nodes in gpu_groups(site).items():
        entry = lock.nvidia.get(group)
        if entry is None:
            found.append(f"group {group} has no set yet")
            continue
        found += [f"group {group}: {why}" for why in _differences(site, nodes[0], entry)]
    return found


def _differences(site: Site, node: Node, lock: NvidiaLock) -> Iterator[str]:
    wanted, known = settings(site, node), rules()
    assert node.gpu is not None
    model = gpu_model(node.gpu.model)
    assert model is not None  # problems() refuses others
    for name, asked, has in (
        ("gpus", gpus_of(node.gpu), lock.gpus),
        ("source", wanted.source, lock.source),
        ("branch", wanted.branch, lock.branch),
        ("driver", wanted.driver, lock.driver),
        ("modules", wanted.modules, lock.modules),
        ("build", wanted.build, lock.build),
    ):
        if asked is not None and asked != has:
            yield f"{name} is {has} in the lock, {asked} in the site file"
    for name, ask, have in (
        ("cuda", wanted.cuda, lock.cuda),
        ("compat", wanted.compat, lock.compat),
        ("nccl", wanted.nccl, lock.nccl),
        ("doca", doca_of(site, node), lock.doca),
        ("also", sorted(wanted.also), sorted(lock.also)),
    ):
        if ask != have:
            yield f"{name} is {have} in the lock, {ask} in the site file"
    if number(lock.driver)[0] != lock.branch:
        yield f"driver {lock.driver} is not of branch {lock.branch}"
    if lock.modules not in known.driven(model).modules:
        yield f"{lock.modules} modules do not drive {node.gpu.model}"
    if not known.fits(model, lock.branch):
        yield f"branch {lock.branch} does not drive {node.gpu.model}"
    switched = known.switches(model, node.gpu.count)
    if switched and lock.fabric_manager != lock.driver:
        yield f"fabric manager {lock.fabric_manager} and driver {lock.driver} must be of one patch level"
    if not switched and lock.fabric_manager is not None:
        yield f"fabric manager {lock.fabric_manager} without NVSwitch"
    if lock.imex not in (None, lock.driver):
        yield f"imex {lock.imex} and driver {lock.driver} must be of one patch level"
    for cuda in filter(None, [lock.cuda]):
        found = runs(known, lock.driver, cuda, compat=lock.compat)
        if found.how in ("no", "unknown"):
            yield found.why
