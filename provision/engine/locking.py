"""Resolves what the lock has to say of each group of nodes, by asking one node of it. Nothing on a node changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date

from provision.components.nvidia import locking
from provision.engine import preflight
from provision.engine.limits import limit
from provision.engine.remote import RemoteError, connect
from provision.profiles.packaging import parse_offer
from provision.site.lock import Lock, LockError, save_lock
from provision.site.models import Node, Site


class SilentGroup(LockError):
    """No node of a group answers."""


OFFER_TIMEOUT = 180.0  # seconds for a node's package manager to read what its sources offer
_KERNEL = 'uname -r && if [ -e "/lib/modules/$(uname -r)/build" ]; then echo headers; fi'


def resolve(
    site: Site,
    lock: Lock,
    groups: Sequence[str],
    *,
    sudo_password: str | None = None,
    show: Callable[[str], None] = lambda text: None,
) -> Lock:
    """The lock with a new set for each of `groups`. Raises LockError: no set, or no node that answers."""
    found = dict(lock.nvidia)
    for group in groups:
        nodes = locking.gpu_groups(site)[group]
        show(f"{group}: asking {nodes[0].name}")
        offer = _first_offer(site, group, nodes, sudo_password)
        try:
            found[group] = locking.resolve(site, group, date.today(), offer)
        except locking.Unresolvable as error:
            raise LockError(f"group {group}: {error}") from error
    known = locking.gpu_groups(site)
    return lock.model_copy(update={"nvidia": {name: found[name] for name in found if name in known}})


def complete(site: Site, lock: Lock, *, sudo_password: str | None, keep: bool) -> Lock:
    """The lock with a set for every group that has none and of which a node answers; written down where `keep`.

    Nodes of a group that is silent fail by themselves. Raises LockError: a set that is there contradicts the site
    file, or there is none that could work.
    """
    made = lock
    for group in missing(site, lock):
        try:
            made = resolve(site, made, [group], sudo_password=sudo_password)
        except SilentGroup:
            continue
    if keep and made != lock:
        save_lock(site, made)
    return made


def missing(site: Site, lock: Lock) -> list[str]:
    """The groups that have no set yet. Raises LockError where one that is there contradicts the site file."""
    if not site.enabled("nvidia"):
        return []
    groups = [group for group in locking.gpu_groups(site) if group not in lock.nvidia]
    wrong = [why for why in locking.lock_problems(site, lock) if not why.endswith("has no set yet")]
    if wrong:
        raise LockError(f"{'; '.join(wrong)}: look at it, then run `provision lock {site.path}`")
    return groups


def _first_offer(site: Site, group: str, nodes: Sequence[Node], sudo_password: str | None) -> locking.Offer:
    """What the first node of a group that answers says."""
    silent = []
    for node in nodes:
        try:
            return _offer(site, node, sudo_password)
        except (RemoteError, preflight.PreflightError) as error:
            silent.append(str(error))
    raise SilentGroup(f"group {group}: no node of it can be asked: {'; '.join(silent)}")


def _offer(site: Site, node: Node, sudo_password: str | None) -> locking.Offer:
    shell = connect(site, node, sudo_password=sudo_password)
    try:
        facts = preflight.look(shell)
        told = shell.run(_KERNEL)
        if not told.ok:
            raise LockError(f"{node.name}: its kernel cannot be read: {told.stderr.strip()[-500:]}")
        kernel, *headers = told.stdout.split()
        wanted = locking.settings(site, node)
        try:
            names = locking.probes(facts.profile.key, wanted)
        except locking.Unresolvable as error:
            raise LockError(f"group {node.group}: {error}") from error
        offered = shell.run(facts.profile.manager.offer(names), timeout=OFFER_TIMEOUT) if names else None
        if offered is not None and not offered.ok:
            raise LockError(
                f"{node.name}: its package sources cannot be read: {offered.stderr.strip()[-500:]}"
            )
    finally:
        shell.close()
    return locking.Offer(
        node=node.name,
        distribution=facts.profile.key,
        kernel=None if limit(facts.limits, "kernel") else kernel,
        versions=parse_offer(offered.stdout) if offered is not None else {},
        headers=bool(headers),
    )
