"""What this tool made on a node, kept on the node: by it, what is switched off is removed.

/var/lib/provision/manifest.json: {"site": digest, "components": {name: {"files": [...], "units": [...]}}}, in the order
in which they were made. Packages
are never removed: others may have come to need them. Data is never removed at all.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from provision.components.registry import COMPONENTS
from provision.engine import ops
from provision.engine.preflight import MANIFEST, Facts
from provision.engine.record import Owned, Recorder
from provision.engine.remote import RemoteError, RootShell
from provision.engine.replace import replace
from provision.engine.units import instances

if TYPE_CHECKING:
    from provision.engine.job import Job

Entry = Mapping[str, list[str]]


def stale(
    before: Mapping[str, Entry], now: Mapping[str, Owned], ran: Collection[str], *, whole: bool
) -> dict[str, Owned]:
    """What an earlier run made and this one did not, by component. Pure.

    Looked at are components that `ran` just now, and where the run was `whole` (all components) also those that did
    not run at all: they are switched off, or the node has lost the role.
    """
    kept_files = {path for own in now.values() for path in own.files}
    kept_units = {unit for own in now.values() for unit in own.units}
    found: dict[str, Owned] = {}
    for component, entry in before.items():
        if component in ran or whole:
            files = [path for path in entry["files"] if path not in kept_files]
            units = [unit for unit in entry["units"] if unit not in kept_units]
            if files or units:
                found[component] = Owned(files, units)
    return found


def merged(
    before: Mapping[str, Entry], now: Mapping[str, Owned], ran: Collection[str], *, whole: bool
) -> dict[str, dict[str, list[str]]]:
    """The manifest's new content: components of this run as they are, others as they were (none if `whole`)."""
    kept = {} if whole else {name: dict(entry) for name, entry in before.items() if name not in ran}
    made = {name: {"files": list(own.files), "units": list(own.units)} for name, own in now.items()}
    return {**kept, **made}


def united(before: Mapping[str, Entry], now: Mapping[str, Owned]) -> dict[str, dict[str, list[str]]]:
    """The manifest of a run that did not end well: whatever was or is there, so that nothing is forgotten."""
    made: dict[str, dict[str, list[str]]] = {}
    for name in {*before, *now}:
        old, new = before.get(name, {"files": [], "units": []}), now.get(name, Owned())
        made[name] = {
            "files": list(dict.fromkeys([*old["files"], *new.files])),
            "units": list(dict.fromkeys([*old["units"], *new.units])),
        }
    return made


def remove_stale(job: Job, facts: Facts, recorder: Recorder, ran: Collection[str]) -> None:
    """Stop the units and remove the files that are no longer wanted here.

    What was made last goes first: a mount before the server that it is of.
    """
    gone = stale(facts.manifest, recorder.owned, ran, whole=job.components is None)
    order = list(COMPONENTS)
    for component in sorted(gone, key=lambda name: order.index(name) if name in order else -1, reverse=True):
        own = gone[component]
        recorder.component, recorder.step = component, f"{component}:removed"
        kept = {name: Owned(list(entry.files), list(entry.units)) for name, entry in recorder.owned.items()}
        for pattern in map(shlex.quote, instances(own.files)):  # first: they may be about to start the others
            ops.ensure(
                f"no {pattern}",
                test=f'[ -z "$(systemctl list-units --plain --no-legend -- {pattern})" ]',
                make=f"systemctl stop -- {pattern} && systemctl reset-failed -- {pattern}",
            )
        for unit in reversed(own.units):
            ops.unit(unit, running=False, enabled=False)
        for path in reversed(own.files):
            ops.absent(path)
        if own.units:
            units = shlex.join(own.units)
            ops.ensure(
                f"systemd forgets {', '.join(own.units)}",
                test=f"! systemctl -q is-failed -- {units}",
                make=f"systemctl reset-failed -- {units}",
            )
        recorder.owned = kept


def write_manifest(
    shell: RootShell, site_digest: str, components: Mapping[str, Mapping[str, Collection[str]]]
) -> None:
    """Keep on the node what was made there; written only where it differs. Raises RemoteError."""
    text = json.dumps({"site": site_digest, "components": components}, indent=1, sort_keys=True)
    script = replace(MANIFEST, mode="600", check=f'! cmp -s "$t" {MANIFEST} || exit 0')
    output = shell.run(script, stdin=text.encode())
    if not output.ok:
        raise RemoteError(
            f"{shell.name}: cannot write {MANIFEST}: {output.stderr.strip()}", "is the disk full?"
        )
