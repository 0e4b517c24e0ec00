"""A file that holds several recordings to its parts: a session, a bug report, outputs in a row. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from provision.inspect.text import by_host

_COMMANDS = (
    r"nvidia-smi|dmesg|journalctl|ibstat|ibstatus|ibdev2netdev|ibv_devinfo|perfquery|dcgmi|lspci|lsmod"
    r"|sinfo|scontrol|cat|ls"
)
# a shell's prompt with the command typed behind it; of root's bare "#" only known commands, the rest are comments
_PROMPT = re.compile(
    r"^(?:\([\w.-]+\) ?)?(?:(?:[\w.-]+@[\w.-]+[: ]?[^\s#$]*|\[[\w.-]+@[\w.-]+ [^\]\n]+\]) ?[#$] ?(?P<by_name>\S[^\n]*)?"
    rf"|(?:# )?\$ (?P<bare>\S[^\n]*)|(?:\+|#) (?P<root>(?:sudo )?(?:{_COMMANDS})(?: [^\n]*)?))$",
    re.MULTILINE,
)
_EXIT = re.compile(r"^\[exit \d+\]\s*\Z", re.MULTILINE)
_FILE = re.compile(r"^==> (.+) <==$", re.MULTILINE)  # head, tail
_FENCE = re.compile(r"^ {0,3}```[^\n`]*$\n?", re.MULTILINE)
_REPORT = "Start of NVIDIA bug report log file"
_REPORT_END = "End of NVIDIA bug report log file"
_LOST = re.compile(r"^[ \t]*(Unable to determine the device handle for [^\n]*)$", re.MULTILINE)
_ABOVE = re.compile(
    r"(?:\s*(?:\w{3} \w{3} +\d+ [\d:]+ \d{4}|Unable to determine the device handle for [^\n]*"
    r"|Successfully ran diag[^\n]*))*\s*"
)
_TABLE = re.compile(rf"{_ABOVE.pattern}\+[-+]+\+[ \t]*\n")
# how an output begins that can stand behind another one
_HEADS = re.compile(
    r"^(?:\s*\+-+\+[ \t]*\n\s*\| (?:NVIDIA-SMI\s|Diagnostic\s)|=+NVSMI LOG=+|<\?xml |Successfully ran diagnostic"
    r"|# nccl-tests version|# Collective test starting|# nThread \d+ nGpus)",
    re.MULTILINE,
)
_BELONGS = re.compile(
    r"# nccl-tests version|# Collective test starting|Successfully ran diagnostic"
)  # and the head behind it are one


class Part(NamedTuple):
    """A piece of a file. `command` made it where a session tells that, `host` where each line does."""

    text: str
    command: str | None = None
    host: str | None = None


def is_report(text: str) -> bool:
    return _REPORT in text


def report_is_whole(text: str) -> bool:
    return _REPORT_END in text


def report_sections(text: str) -> list[str]:
    """The outputs in an nvidia-bug-report."""
    sections = re.split(r"^_{20,}\s*$", text, flags=re.MULTILINE)
    return [re.sub(r"^\*\*\* .*\n(?:\*\*\* .*\n)*", "", section.strip() + "\n") for section in sections]


def parts(text: str) -> list[Part]:
    """The recordings in `text` one by one; itself where it is one."""
    hosts = by_host(text)
    if hosts:
        return [part._replace(host=host) for host, lines in hosts.items() for part in _sections(lines)]
    return _sections(text)


def _sections(text: str) -> list[Part]:
    found = []
    for part in _session(text) or [Part(each) for each in _pieces(text)]:
        found += [part._replace(text=each) for each in _outputs(part.text)]
    return [part for part in found if part.text.strip() or part.command] or [Part(text)]


def _session(text: str) -> list[Part]:
    """The answers in a shell's session; [] where there are not at least two prompts, or one that begins it."""
    prompts = list(_PROMPT.finditer(text))
    if len(prompts) < 2 and not (prompts and not text[: prompts[0].start()].strip() and "\n" in text.strip()):
        return []
    found = [Part(text[: prompts[0].start()])]
    ends = [*(prompt.start() for prompt in prompts[1:]), len(text)]
    for prompt, end in zip(prompts, ends, strict=True):
        command = prompt["by_name"] or prompt["bare"] or prompt["root"]
        if command:
            found.append(Part(_EXIT.sub("", text[prompt.end() : end].removeprefix("\n")), command))
    return [part for part in found if part.text.strip()]


def _pieces(text: str) -> list[str]:
    """What stands between the names of files, or in the fences of a report that somebody wrote."""
    if len(_FILE.findall(text)) >= 2:
        return _FILE.split(text)[2::2]
    fences = _FENCE.split(text)
    if len(fences) >= 3:
        return fences
    return [text]


def _outputs(text: str) -> Iterator[str]:
    """Outputs that stand one after another without a prompt between them."""
    heads = [head.start() for head in _HEADS.finditer(text)]
    heads = [
        at for number, at in enumerate(heads) if not (number and _BELONGS.match(text[heads[number - 1] : at]))
    ]
    if not heads:
        yield text
        return
    before = text[: heads[0]]
    if _ABOVE.fullmatch(before):
        heads[0] = 0
    elif before.strip():
        yield before
    for at, end in zip(heads, [*heads[1:], len(text)], strict=True):
        yield from _tail(text[at:end])


def _tail(text: str) -> Iterator[str]:
    """One output, and what stands behind its end where its form tells the end."""
    end = len(text)
    if _TABLE.match(text):
        end = [each.end() for each in re.finditer(r"^[ \t]*[|+].*$\n?", text, re.MULTILINE)][-1]
    elif "</nvidia_smi_log>" in text:
        end = text.index("</nvidia_smi_log>") + len("</nvidia_smi_log>")
    if not text[end:].strip():
        yield text
        return
    # GPUs that do not answer are told below the others, and belong to them
    lost = "".join(f"{line}\n" for line in _LOST.findall(text[end:]))
    yield lost + text[:end]
    rest = _LOST.sub("", text[end:])
    if rest.strip():
        yield rest
