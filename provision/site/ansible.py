"""Reads an Ansible inventory by Ansible itself, in a process of its own.

Ansible knows ranges, children, group_vars and precedence; this module feeds it a file in which names of
digits stay names, and keeps it from running anything: inventory scripts and plugins are refused.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import starmap
from math import prod
from pathlib import Path
from typing import Any

import yaml

from provision.report.model import Finding, Verdict
from provision.site.hostlist import LARGEST

TIMEOUT = 120  # seconds
_VAULT = b"$ANSIBLE_VAULT;"

_COMMENTED_VARIABLE = re.compile(r"[^\s\[#;][^#;]*?\s[#;]\s*(?P<comment>(?P<name>[A-Za-z_]\w*)\s*=\s*\S.*)")
_COMMENTED_LINE = re.compile(r"\s*[#;]+\s*([\w.-]+\s+)?[A-Za-z_]\w*=\S")
_HOST_RANGE = re.compile(r"\[(\d{0,99}|[a-zA-Z]):(\d{1,99}|[a-zA-Z])(?::(\d{1,9}))?\]", re.ASCII)
_SECTION = re.compile(r"\s*\[(?P<name>[^\]:]+)(?::(?P<kind>\w+))?\]")
_TEMPLATE = re.compile(
    r"%\{\s*(if|for|endif|endfor|else)\b|^\s*\{%\s*\w+|^\s*\[?\s*\$\{[^}]*\}", re.MULTILINE
)


class InventoryError(Exception):
    """An inventory that cannot be imported, with the findings that say why."""

    def __init__(self, findings: list[Finding]) -> None:
        super().__init__("\n".join(f"{finding.source}: {finding.why}" for finding in findings))
        self.findings = findings


@dataclass
class Inventory:
    """What Ansible makes of an inventory: hosts and groups in order, effective variables of each host."""

    path: Path
    text: str  # empty for a folder
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)  # name -> variables
    groups: dict[str, list[str]] = field(
        default_factory=dict
    )  # group -> hosts, those of its children included
    findings: list[Finding] = field(default_factory=list)

    def line_of(self, word: str) -> int | None:
        """The first line in which `word` stands, from 1."""
        found = re.compile(rf"(?<![\w.-]){re.escape(word)}(?![\w-])")
        for number, line in enumerate(self.text.splitlines(), 1):
            if found.search(line):
                return number
        return None


def read_inventory(path: Path) -> Inventory:
    """The inventory at `path`: INI, YAML, a folder, or what `ansible-inventory --list` prints.

    Raises InventoryError for what is none of these.
    """
    if path.is_dir():
        for file in sorted(filter(Path.is_file, path.iterdir())):
            _refuse_wide_ranges(file, file.read_text(errors="replace"))
        return _listed(Inventory(path, ""), _run(path, "ini,yaml"))
    text = _read(path)
    inventory = Inventory(path, text)
    listing = _listing(text)
    if listing is not None:
        return _listed(inventory, listing)
    _refuse_wide_ranges(path, text)
    _refuse_templates(path, text)
    edited, kind = _prepare(inventory)
    with tempfile.TemporaryDirectory(prefix="provision-import-") as folder:
        copy = Path(folder, "inventory.yml" if kind == "yaml" else "inventory.ini")
        copy.write_text(edited)
        for variables in ("group_vars", "host_vars"):
            beside = path.absolute().parent / variables
            if beside.is_dir():
                Path(folder, variables).symlink_to(beside)
        return _listed(inventory, _run(copy, kind, shown=path))


def _read(path: Path) -> str:
    try:
        with open(
            os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb"
        ) as opened:  # a pipe would wait for a writer
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise _error(path, "not a regular file")
            content = opened.read(16 << 20)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, ValueError) as error:
        raise _error(path, "not a text file") from error
    if text.startswith("#!"):
        raise _error(
            path,
            "an inventory script; it is not run",
            action=f"import the list that it makes: `ansible-inventory -i {path} --list > inventory.json`",
        )
    return text


def _listing(text: str) -> dict[str, Any] | None:
    """What `ansible-inventory --list` prints, where `text` is that."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "_meta" in found else None


def _refuse_templates(path: Path, text: str) -> None:
    found = _TEMPLATE.search(text)
    if found:
        line = text.count("\n", 0, found.start() + len(found[0]) - len(found[0].lstrip())) + 1
        raise _error(
            path,
            f"a template, not an inventory yet: {found[0].strip()!r} is filled in by Terraform or Jinja",
            line=line,
            action="render it first and import the result",
        )


def _refuse_wide_ranges(path: Path, text: str) -> None:
    """Refuse ranges that Ansible would write out for minutes; several in one word multiply."""
    for number, line in enumerate(text.splitlines(), 1):
        for word in line.partition("#")[0].split():
            names = prod(starmap(_range_length, _HOST_RANGE.findall(word)))
            if names > LARGEST:
                raise _error(path, f'"{word}" is {names} names, more than {LARGEST}', line=number)


def _range_length(first: str, last: str, step: str) -> int:
    """The number of names that Ansible's range [first:last:step] stands for; 1 where it is none."""
    try:
        low, high = int(first or "0"), int(last)
    except ValueError:
        low, high = ord(first or "0"), ord(last)
    return max((high - low) // max(int(step or "1"), 1) + 1, 1)


def _prepare(inventory: Inventory) -> tuple[str, str]:
    """The text to hand to Ansible, and the inventory plugin that reads it."""
    text = inventory.text
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        if inventory.path.suffix in (".yml", ".yaml", ".json"):
            mark = error.problem_mark
            line = mark.line + 1 if mark else None
            raise _error(inventory.path, f"not YAML: {error.problem}", line=line) from error
        root = None
    except yaml.YAMLError as error:
        raise _error(inventory.path, "not a text file") from error
    except RecursionError as error:
        raise _error(inventory.path, "nested too deeply") from error
    if isinstance(root, yaml.MappingNode):
        _refuse_plugins(inventory, root)
        return _quote_names(text, root), "yaml"
    _find_comments(inventory)
    return text + _undefined_groups(inventory), "ini"


def _refuse_plugins(inventory: Inventory, root: yaml.MappingNode) -> None:
    keys = {key.value: value for key, value in root.value if isinstance(key, yaml.ScalarNode)}
    plugin = keys.get("plugin")
    if plugin is None and any(
        isinstance(value, yaml.MappingNode) or not value.value for value in keys.values()
    ):
        return
    named = f'of the plugin "{plugin.value}"' if isinstance(plugin, yaml.ScalarNode) else "no group in it"
    raise _error(
        inventory.path,
        f"the configuration of a dynamic inventory ({named}), not an inventory",
        line=root.start_mark.line + 1,
        action="import the list that it makes: `ansible-inventory -i SOURCE --list > inventory.json`",
    )


def _quote_names(text: str, root: yaml.MappingNode) -> str:
    """`text` with quotes around keys that YAML takes for numbers or truth values: 01002 is not 514."""
    edits: list[tuple[int, int, str]] = []
    seen: set[int] = set()
    nodes: list[yaml.Node] = [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                plain = isinstance(key, yaml.ScalarNode) and key.style is None and key.value
                if plain and key.tag.rpartition(":")[2] not in ("str", "merge"):
                    edits.append((key.start_mark.index, key.end_mark.index, f'"{key.value}"'))
                nodes += [key, value]
        elif isinstance(node, yaml.SequenceNode):
            nodes += node.value
    for start, end, quoted in sorted(edits, reverse=True):
        text = text[:start] + quoted + text[end:]
    return text


def _find_comments(inventory: Inventory) -> None:
    """Warn of variables that stand behind a comment sign: Ansible does not see them."""
    lines, first = 0, None
    for number, line in enumerate(inventory.text.splitlines(), 1):
        found = _COMMENTED_VARIABLE.match(line)
        if found:
            inventory.findings.append(
                Finding(
                    verdict=Verdict.WARN,
                    check="import-commented-variable",
                    subject=found["name"],
                    read=found["comment"].strip(),
                    why="this stands behind a comment sign, so that Ansible never sees it",
                    action="if it is meant, put it before the comment sign and import again",
                    source=str(inventory.path),
                    line=number,
                )
            )
        elif _COMMENTED_LINE.match(line):
            lines += 1
            first = first or number
    if lines:
        inventory.findings.append(
            Finding(
                verdict=Verdict.WARN,
                check="import-commented-line",
                subject="comments",
                read=f"{lines} of the form key=value",
                why="what stands in a comment is not imported",
                action="if it is meant, remove the comment signs and import again",
                source=str(inventory.path),
                line=first,
            )
        )


def _undefined_groups(inventory: Inventory) -> str:
    """Empty sections for groups that are only named as children: they are defined in another file."""
    defined = {"all", "ungrouped"}
    named: dict[str, int] = {}  # group -> line
    kind = None
    for number, line in enumerate(inventory.text.splitlines(), 1):
        section = _SECTION.match(line)
        if section:
            kind = section["kind"]
            if kind != "vars":
                defined.add(section["name"].strip())
        elif kind == "children" and line.strip() and not line.lstrip().startswith(("#", ";")):
            named.setdefault(line.split()[0], number)
    undefined = {name: number for name, number in named.items() if name not in defined}
    for name, number in undefined.items():
        inventory.findings.append(
            Finding(
                verdict=Verdict.WARN,
                check="import-undefined-group",
                subject=name,
                why="this group is defined in another file, and taken as empty here",
                action="import the folder that holds the whole inventory",
                source=str(inventory.path),
                line=number,
            )
        )
    return "".join(f"\n[{name}]\n" for name in undefined)


def _run(path: Path, plugins: str, shown: Path | None = None) -> dict[str, Any]:
    """What `ansible-inventory --list` says about `path`, whatever Ansible's configuration here is."""
    shown = shown or path
    with tempfile.TemporaryDirectory(prefix="provision-ansible-") as empty:
        Path(empty, "ansible.cfg").touch()
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")
        } | {
            "ANSIBLE_CONFIG": f"{empty}/ansible.cfg",
            "ANSIBLE_INVENTORY_ENABLED": plugins,
            "ANSIBLE_INVENTORY_ANY_UNPARSED_IS_FAILED": "True",
            "ANSIBLE_LOCAL_TEMP": empty,
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        }
        command = [sys.executable, "-m", "ansible", "inventory", "-i", str(path.absolute()), "--list"]
        try:
            done = subprocess.run(
                command,
                cwd=empty,
                env=environment,
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise _error(shown, f"Ansible did not read it within {TIMEOUT} s") from error
    if done.returncode != 0:
        if "no vault secrets found" in done.stderr:
            _refuse_vault(shown)
        raise _error(shown, f"Ansible cannot read it: {_reason(done.stderr, path, shown)}")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def _refuse_vault(inventory: Path) -> None:
    """Name the file at `inventory` or beside it that is encrypted as a whole."""
    base = inventory if inventory.is_dir() else inventory.absolute().parent
    beside = [base] if inventory.is_dir() else [inventory, base / "group_vars", base / "host_vars"]
    for place in beside:
        for file in [place] if place.is_file() else sorted(filter(Path.is_file, place.rglob("*"))):
            with file.open("rb") as opened:
                encrypted = opened.read(len(_VAULT)) == _VAULT
            if encrypted:
                raise _error(
                    file,
                    "encrypted by ansible-vault, for whose password this verb does not ask",
                    action="import the list that Ansible makes with it: "
                    f"`ansible-inventory -i {inventory} --list --ask-vault-pass > inventory.json`",
                )


def _reason(text: str, path: Path, shown: Path) -> str:
    """The sentence of Ansible's many that says what is wrong."""
    lines = [line.strip() for line in text.replace(str(path), str(shown)).splitlines()]
    causes = [line for line in lines if line.startswith(("Failed to parse inventory:", "YAML parsing"))]
    errors = [line.partition(":")[2].strip() for line in lines if line.startswith(("[ERROR]", "ERROR"))]
    return (causes + errors + ["no reason given"])[0]


def _listed(inventory: Inventory, listing: dict[str, Any]) -> Inventory:
    children: dict[str, list[str]] = {}
    direct: dict[str, list[str]] = {}
    for group, content in listing.items():
        if group != "_meta" and isinstance(content, dict):
            children[group] = list(content.get("children", []))
            direct[group] = [str(host) for host in content.get("hosts", [])]
    for group in direct:
        inventory.groups[group] = list(dict.fromkeys(_members(group, children, direct, set())))
    variables = listing.get("_meta", {}).get("hostvars", {})
    everybody = dict.fromkeys(host for hosts in inventory.groups.values() for host in hosts)
    inventory.hosts = {host: dict(variables.get(host, {})) for host in [*everybody, *variables]}
    return inventory


def _members(
    group: str, children: dict[str, list[str]], direct: dict[str, list[str]], passed: set[str]
) -> Iterator[str]:
    if group in passed:
        return
    passed.add(group)
    yield from direct.get(group, [])
    for child in children.get(group, []):
        yield from _members(child, children, direct, passed)


def _error(path: Path, why: str, *, line: int | None = None, action: str | None = None) -> InventoryError:
    return InventoryError(
        [
            Finding(
                verdict=Verdict.FAIL,
                check="import-input",
                subject=path.name,
                why=why,
                action=action,
                source=str(path),
                line=line,
            )
        ]
    )
