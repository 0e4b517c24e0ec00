"""A source that is not there: was it never installed, which is known and fails, or is it broken?

Checks answer unknown when they cannot read their source. Here, for all of them, it is told whether that is because
a program or a file does not exist. A program of a package that is installed was taken away: what it would have said
stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from provision.report.model import Verdict
from provision.verify.check import Found, Target

BOOTED = "/run/systemd/system"  # is there where systemd is process 1, as sd_booted(3) says
_APPLY = "run `provision apply`"
_KERNEL = ("/proc/", "/sys/", "/dev/")  # nobody installs what is there
_FOLDERS = ("/usr/sbin/", "/usr/bin/", "/sbin/", "/bin/")  # packages name either, though /usr is merged

# As shells say it (dash, bash), and what starts other programs.
_SHELL = r"(?m)^(?:\S*sh|\S+(?=: (?:line )?\d)): (?:(?:line )?\d+: )?(?:eval: )?(?:line \d+: )?"
_PROGRAM = (
    re.compile(_SHELL + r"(\S+): (?:command )?not found$"),
    re.compile(_SHELL + r"(/\S+): No such file or directory$"),
    re.compile(
        r"(?m)^\S+: failed to (?:run command|execute) [‘']?([^\s’']+)[’']?: No such file or directory$"
    ),
    re.compile(r"(?m)^(?:env|nice): [‘']([^\s’']+)[’']: No such file or directory$"),
)
_FILE = re.compile(
    r"(?m)^[\w.-]+: (?:cannot (?:access|open|stat|statx) )?[‘']?(/[^‘’':\n]+)[’']?(?: for reading)?: "
    r"No such file or directory$"
)
_NOT_BOOTED = re.compile(r"not been booted with systemd|Failed to connect to .*\bbus\b")


def programs(said: str) -> list[str]:
    """The programs that do not exist, by what was `said` on standard error."""
    return list(dict.fromkeys(name for form in _PROGRAM for name in form.findall(said)))


def files(said: str) -> list[str]:
    """The files and folders, but for the kernel's, that do not exist, by what programs `said`."""
    found, others = dict.fromkeys(_FILE.findall(said)), programs(said)
    return [path for path in found if path not in others and not path.startswith(_KERNEL)]


def paths(program: str) -> list[str]:
    """Where a package would have put `program`, given by name or path."""
    folder, _, name = program.rpartition("/")
    return [f"{each}{name}" for each in _FOLDERS] if f"{folder}/" in ("/", *_FOLDERS) else [program]


def judged(found: Found, at: Target) -> Found:
    """`found`, or what is known where it is UNKNOWN and says that something does not exist."""
    if found.verdict is not Verdict.UNKNOWN:
        return found
    said = "\n".join(at.host.backend.said)
    gone = _named(programs(said), found)
    if ("systemctl" in gone or _NOT_BOOTED.search(found.why or "")) and not _booted(at):
        return Found(
            Verdict.FAIL,
            "systemd does not run here",
            "systemd as process 1",
            "boot the machine with systemd",
            source=BOOTED,
        )
    owners = {program: _owner(at, program) for program in gone}
    never = [program for program, owner in owners.items() if owner == ""]
    there = [*(each for each in never if each.startswith("/")), *_named(files(said), found)]
    if there:
        return Found(Verdict.FAIL, "not there", ", ".join(there), _APPLY, source=found.source)
    if never:
        read = f"{', '.join(never)}: not installed, or not in root's PATH"
        return Found(Verdict.FAIL, read, "installed", _APPLY, source=found.source)
    taken = {program: owner for program, owner in owners.items() if owner}
    if taken:
        why = ", ".join(f"{program} is gone, though {owner} is installed" for program, owner in taken.items())
        return replace(found, why=why, action=f"install again: {', '.join(dict.fromkeys(taken.values()))}")
    return found


def _named(things: Iterable[str], found: Found) -> list[str]:
    """Those that the finding gives as its reason: a check may do without others."""
    return [
        each for each in things if re.search(rf"(?<![\w/.-]){re.escape(each)}(?![\w/.-])", found.why or "")
    ]


def _booted(at: Target) -> bool:
    """False where it is known that systemd is not process 1."""
    return bool(at.host.backend.once(f"[ -d {BOOTED} ]").rc != 1)


def _owner(at: Target, program: str) -> str | None:
    """The installed package whose program it is, "" where there is none; None: could not be told."""
    answer = at.host.backend.once(at.profile.manager.owner(paths(program)))
    return answer.stdout.strip() if answer.rc == 0 else None
