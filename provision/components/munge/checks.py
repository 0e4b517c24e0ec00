"""Does munged answer, and does every node accept the head's credentials and the head those of every node?"""

from __future__ import annotations

import re
from shlex import quote
from typing import Any

from provision.components.munge import exports
from provision.report.model import Verdict
from provision.verify.check import Found, Target, check, expect, skip, unknown

_CREDENTIAL = re.compile(r"MUNGE:[A-Za-z0-9+/=]+:")


@check("munge-key")
def key(at: Target) -> Found:
    """The key is readable to munge alone."""
    state = at.host.run(f"stat -c '%a %U:%G %s' {exports.KEY}")
    if state.rc != 0 and "No such file" not in state.stderr:
        return unknown(state.stderr.strip() or f"stat: exit {state.rc}", source="stat")
    found = state.stdout.strip().rpartition(" ")
    read = "empty" if found[2] == "0" else found[0] or "no key"
    # mungekey itself makes it writable to munge
    expected = read if read in exports.KEPT else exports.KEPT[0]
    return expect(read, expected, action="run `provision apply`", source=exports.KEY)


@check("munge-local")
def local(at: Target) -> Found:
    """munged makes a credential and accepts it."""
    return _round_trip(at, at.host, at.node.name, at.host, at.node.name)


@check("munge-cross")
def cross(at: Target) -> Found:
    """The head accepts what this node makes, and this node what the head makes."""
    head = at.site.head.name
    if head == at.node.name:
        return skip("this is the head, which the other nodes are tried with")
    other = at.on(head)
    if other is None:
        return unknown(f"{head} is unreachable", source=head)
    there = _round_trip(at, at.host, at.node.name, other, head)
    if there.verdict is not Verdict.PASS:
        return there
    return _round_trip(at, other, head, at.host, at.node.name)


def _round_trip(at: Target, maker: Any, maker_name: str, reader: Any, reader_name: str) -> Found:
    """A credential made on one node and read on another."""
    source = f"munge -n on {maker_name}, unmunge on {reader_name}"
    made = maker.run("munge -n")
    if made.rc in (126, 127):
        return unknown(made.stderr.strip(), source=source)
    if made.rc != 0:
        return _failed(exports.status(made.stderr), source, maker_name)
    credential = _CREDENTIAL.search(made.stdout)
    if credential is None:
        return unknown(f"munge printed {made.stdout[:40]!r}, which is no credential", source=source)
    # printf is part of the shell: the credential is nobody's argument
    read = reader.run(f"printf '%s' {quote(credential[0])} | unmunge")
    if read.rc in (126, 127):
        return unknown(read.stderr.strip(), source=source)
    if read.rc == 0 and "Success" in read.stdout:
        return Found(Verdict.PASS, "Success", "Success", source=source)
    status = exports.status(f"{read.stdout}\n{read.stderr}")
    if maker is reader:
        return _failed(status, source, maker_name)
    why = exports.cause(status, _daemon(maker), _daemon(reader), maker_name, reader_name)
    action = f"make clocks equal (chronyc tracking on {maker_name}), " if "clocks" in why else ""
    return Found(
        Verdict.FAIL,
        status or f"exit {read.rc}",
        "Success",
        f"{action}run `provision apply`: it puts the key in place and restarts munged",
        why,
        source,
    )


def _daemon(host: Any) -> exports.Daemon | None:
    """What the node says of its munged; None where that cannot be read, which leaves the cause open."""
    answer = host.run(exports.DAEMON_QUERY)
    try:
        return exports.parse_daemon(answer.stdout) if answer.rc == 0 else None
    except ValueError:
        return None


def _failed(status: str, source: str, node: str) -> Found:
    advice = f"on {node}: systemctl status munge; journalctl -u munge -n 20"
    return Found(Verdict.FAIL, status or "no answer", "Success", advice, source=source)
