"""A look at machines as the verb runs it: asked, journaled, judged, with the site file as it could be."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from provision import atomic
from provision.discover import edit
from provision.discover.ask import ask
from provision.discover.propose import Proposal, counted, flow, proposals, unlike
from provision.engine.journal import journaled
from provision.engine.remote import RemoteError
from provision.errors import InputError
from provision.hardware.machine import QUESTIONS, Machine, machine
from provision.hardware.pci import gpu_model_name
from provision.report.model import Document, Finding, NodeResult, Verdict, worst
from provision.site.load import examine_text
from provision.site.models import Node, Site
from provision.verify.run import node_result


@dataclass(frozen=True)
class Discovery:
    """What was read, and what follows from it for the site file, whose text is `before`."""

    site: Site
    before: str
    answers: Mapping[str, Machine | RemoteError]
    accepted: bool = False  # the proposals were written into the file

    @cached_property
    def machines(self) -> dict[str, Machine]:
        return {name: found for name, found in self.answers.items() if isinstance(found, Machine)}

    @cached_property
    def proposals(self) -> list[Proposal]:
        return proposals(self.site, self.machines)

    @cached_property
    def text(self) -> str:
        """The site file with all proposals. Raises InputError where one does not fit into it."""
        return proposed(self.site, self.before, {each.key: each.value for each in self.proposals})[0]

    @property
    def diff(self) -> str:
        return difference(self.site, self.before, self.text)

    def table(self) -> Iterator[tuple[str, list[str]]]:
        """A row for each machine that answered: product, serial, firmware, CPUs, memory, GPUs, adapters, disks."""
        for name, found in self.machines.items():
            board, cpus = found.board, found.cpus
            yield (
                name,
                [
                    (board and board.product) or "-",
                    (board and board.serial) or "-",
                    (board and board.firmware) or "-",
                    f"{cpus.sockets} x {cpus.cores} x {cpus.threads}" if cpus else "?",
                    f"{cpus.memory} MiB" if cpus else "?",
                    counted([gpu_model_name(gpu) for gpu in found.gpus]),
                    counted([f"{port.layer} {port.rate or 0:g}" for port in found.adapters]),
                    counted([f"{disk.size / 1e12:.1f} TB" for disk in found.disks]),
                ],
            )

    def document(self, seconds: float) -> Document:
        """The answer of the verb."""
        findings = [proposal.finding(accepted=self.accepted) for proposal in self.proposals]
        findings += [*unlike(self.site, self.machines), *silent(self.answers)]
        return Document(
            verb="discover",
            site=self.site.cluster,
            verdict=worst([Verdict.PASS, *(each.verdict for each in findings)]),
            seconds=seconds,
            nodes=node_results(self.answers, findings),
            findings=findings,
            details={
                "diff": self.diff,
                "machines": {name: _plain(found) for name, found in self.machines.items()},
            },
        )


def proposed(site: Site, before: str, values: Mapping[tuple[str, ...], Any]) -> tuple[str, Site]:
    """The site file's text with `values` at their keys, and what it means then.

    Raises InputError where one does not fit into it.
    """
    text = before
    for key, value in values.items():
        text = edit.put(text, key, flow(value))
    examined = examine_text(text, site.path)
    if examined.site is None:
        raise InputError(f"the proposed site file would be wrong: {examined.errors[0]}")
    return text, examined.site


def difference(site: Site, before: str, after: str) -> str:
    """What `after` changes in the site file, as a unified difference."""
    name = site.path.name
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, f"{name} (proposed)"
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def silent(answers: Mapping[str, object]) -> list[Finding]:
    """The machines that could not be asked, of all `answers`."""
    return [
        Finding(
            verdict=Verdict.UNKNOWN,
            check="machine-read",
            subject=name,
            why=str(error).removeprefix(f"{name}: "),
            action=error.advice,
        )
        for name, error in answers.items()
        if isinstance(error, RemoteError)
    ]


def node_results(answers: Mapping[str, object], findings: Sequence[Finding]) -> dict[str, NodeResult]:
    """The result of every machine that was asked, from what was found about it; nothing is a pass: all was told."""
    results = {}
    for name in answers:
        own = [finding for finding in findings if finding.subject == name]
        results[name] = node_result(own) if own else NodeResult(verdict=Verdict.PASS)
    return results


def _plain(machine: Machine) -> dict[str, Any]:
    """A machine as JSON: its GPUs by model, the PCI functions that are none of GPU, NVSwitch and NIC left out."""
    plain = asdict(machine)
    del plain["functions"], plain["driver"]
    of_interest = [f for f in machine.functions if f.is_gpu or f.is_nvswitch or f.is_nic]
    plain["gpus"] = [
        {"model": gpu_model_name(gpu), "address": gpu.address, "numa": gpu.numa} for gpu in machine.gpus
    ]
    plain["functions"] = [asdict(function) for function in of_interest]
    plain["driver"] = machine.driver.driver if machine.driver else None
    plain["slices"] = {each.uuid: each.slices for each in machine.listed if each.slices}
    del plain["listed"]
    return plain


def discover_journaled(
    site: Site,
    nodes: Sequence[Node],
    *,
    sudo_password: str | None = None,
    timeout: float = 60.0,
    accept: bool = False,
    done: Callable[[str], None] = lambda name: None,
) -> tuple[Discovery, Document]:
    """Ask `nodes`, each `timeout` seconds at most; with `accept` write the proposals into the site file.

    Raises JournalError before any is asked (with `accept`), InputError where what they have does not fit into the
    site file.
    """
    start, before = time.monotonic(), site.path.read_text()
    with journaled(site, "discover", looking=not accept) as entry:
        commands = [question.command for question in QUESTIONS]
        answers = ask(site, nodes, commands, machine, sudo_password=sudo_password, timeout=timeout, done=done)
        found = Discovery(site, before, answers, accepted=accept)
        if accept and found.text != before:
            atomic.write(site.path, found.text.encode(), mode=site.path.stat().st_mode & 0o777)
        document = found.document(round(time.monotonic() - start, 2))
        entry.conclude(document)
    return found, document
