"""ssh arguments of an Ansible inventory as `access` of a site file, with what cannot be translated."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field

# options that are this tool's own business, whatever an inventory says
_OWN = {
    "controlmaster",
    "controlpersist",
    "controlpath",
    "batchmode",
    "connecttimeout",
    "connectionattempts",
    "serveraliveinterval",
    "serveralivecountmax",
    "loglevel",
    "identitiesonly",
    "preferredauthentications",
    "passwordauthentication",
    "pubkeyauthentication",
    "compression",
}
_NO_HOST_KEYS = {
    ("stricthostkeychecking", "no"),
    ("stricthostkeychecking", "off"),
    ("userknownhostsfile", "/dev/null"),
    ("globalknownhostsfile", "/dev/null"),
}
_FLAGS = {"-q", "-4", "-6", "-C", "-T", "-x", "-a"}  # take no value and change nothing that matters here


@dataclass
class Translated:
    """`access` keys, and what was left out with the reason."""

    access: dict[str, str | int] = field(default_factory=dict)
    left_out: list[tuple[str, str]] = field(default_factory=list)  # argument, why
    unneeded: list[str] = field(default_factory=list)  # arguments that change nothing here


def translate_arguments(text: str) -> Translated:
    """`ansible_ssh_common_args` and its like. Never raises."""
    result = Translated()
    try:
        words = shlex.split(text)
    except ValueError as error:
        result.left_out.append((text, f"cannot be split into words: {error}"))
        return result
    while words:
        word = words.pop(0)
        flag, value = word[:2], word[2:]
        if word in _FLAGS:
            result.unneeded.append(word)
        elif flag in ("-J", "-p", "-i", "-l", "-F", "-o"):
            if not value:
                if not words:
                    result.left_out.append((word, "its value is missing"))
                    break
                value = words.pop(0)
            _argument(flag, value, result)
        else:
            result.left_out.append((word, "not understood"))
    return result


def _argument(flag: str, value: str, result: Translated) -> None:
    if flag == "-o":
        name, found, setting = (
            value.replace(" ", "=", 1).partition("=") if "=" not in value else value.partition("=")
        )
        if not found:
            result.left_out.append((f"-o {value}", "its value is missing"))
            return
        _option(name.strip(), setting.strip().strip('"'), result)
        return
    named = {"-J": "ProxyJump", "-p": "Port", "-i": "IdentityFile", "-l": "User", "-F": "ConfigFile"}
    _option(named[flag], value, result)


def _option(name: str, value: str, result: Translated) -> None:
    known, written = name.lower(), f"{name}={value}"
    if known == "proxyjump":
        result.access["jump"] = value
    elif known == "proxycommand":
        jump = _proxy_jump(value)
        if jump is None:
            result.left_out.append((written, "only `ssh -W %h:%p HOST` can be translated, to a jump host"))
        else:
            result.access["jump"] = jump
    elif known == "port":
        if value.isdigit():
            result.access["port"] = int(value)
        else:
            result.left_out.append((written, "not a port"))
    elif known == "identityfile":
        result.access["key"] = value
    elif known == "user":
        result.access["user"] = value
    elif known == "configfile":
        result.access["ssh_config"] = value
    elif (known, value.lower()) in _NO_HOST_KEYS:
        result.left_out.append((written, "host keys are always checked; a first connection learns them"))
    elif known == "stricthostkeychecking" and value.lower() in ("yes", "accept-new"):
        result.access["host_keys"] = "strict" if value.lower() == "yes" else "accept-new"
    elif known in _OWN:
        result.unneeded.append(written)
    else:
        result.left_out.append((written, "option not understood"))


def _proxy_jump(command: str) -> str | None:
    """ "ssh -W %h:%p -q -p 2222 admin@gate" -> "admin@gate:2222"; None where it does more than that."""
    if command.lower() == "none":
        return "none"
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    if not words or words[0].rpartition("/")[2] != "ssh":
        return None
    host = port = user = None
    forwards = False
    rest = iter(words[1:])
    for word in rest:
        if word in _FLAGS:
            continue
        if word[:2] in ("-W", "-p", "-l", "-o"):
            value = word[2:] or next(rest, "")
            if word[:2] == "-W":
                forwards = value in ("%h:%p", "[%h]:%p")
            elif word[:2] == "-p" and value.isdigit():
                port = value
            elif word[:2] == "-l":
                user = value
            elif word[:2] != "-o" or value.partition("=")[0].lower() not in _OWN | {"stricthostkeychecking"}:
                return None
        elif word.startswith("-") or host is not None:
            return None
        else:
            host = word
    if host is None or not forwards:
        return None
    if user and "@" not in host:
        host = f"{user}@{host}"
    return f"{host}:{port}" if port else host
