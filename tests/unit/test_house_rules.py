"""The rules of this project that no general linter knows. Each rule is tried on a sample that breaks it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
THIS = Path(__file__).resolve()
DISTRIBUTIONS = {"debian", "ubuntu", "rocky", "redhat", "rhel", "almalinux", "centos", "fedora"}
# Patterns are put together here, so that this file does not break its own rules.
REGISTRY_HOSTS = ("pypi" + ".org", "python" + "hosted.org", "npmjs" + ".org")


@dataclass(frozen=True)
class Rule:
    """What no file may have, which files it is about, and a sample that has it."""

    name: str
    files: re.Pattern[str]
    broken: Callable[[str], Iterator[int]]  # text -> lines that break the rule
    sample: str

    def breaks(self, path: str, text: str) -> list[str]:
        return (
            [f"{path}:{line}: {self.name}" for line in self.broken(text)] if self.files.search(path) else []
        )


def lines(pattern: str) -> Callable[[str], Iterator[int]]:
    """The lines in which `pattern` is found."""
    compiled = re.compile(pattern)

    def broken(text: str) -> Iterator[int]:
        return (number for number, line in enumerate(text.splitlines(), 1) if compiled.search(line))

    return broken


@cache
def syntax(text: str) -> tuple[ast.AST, ...]:
    """All syntax nodes of a Python file."""
    return tuple(ast.walk(ast.parse(text)))


def nodes(wanted: Callable[[ast.AST], bool]) -> Callable[[str], Iterator[int]]:
    """The lines of syntax nodes that are `wanted`."""

    def broken(text: str) -> Iterator[int]:
        return (getattr(node, "lineno", 0) for node in syntax(text) if wanted(node))

    return broken


def swallows(node: ast.AST) -> bool:
    """An `except` for everything: without a type, or Exception with nothing done about it."""
    if not isinstance(node, ast.ExceptHandler):
        return False
    if node.type is None:
        return True
    broad = isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
    return broad and all(isinstance(statement, ast.Pass | ast.Continue) for statement in node.body)


def stock_file_operation(node: ast.AST) -> bool:
    """A call of pyinfra's files.put or files.template, which leave secrets readable on the way."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr in ("put", "template")
        and isinstance(node.value, ast.Name)
        and node.value.id == "files"
    )


def sudo_password_argument(node: ast.AST) -> bool:
    """pyinfra's argument that puts the password into a command line."""
    name = "_sudo_password"
    return (isinstance(node, ast.keyword) and node.arg == name) or (
        isinstance(node, ast.Constant) and node.value == name
    )


def asks_for_lab(node: ast.AST) -> bool:
    """A condition about the lab, or an import of it."""
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").startswith("provision.lab")
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return re.search(r"\blab\b", ast.unparse(node.test)) is not None
    return False


def asks_for_distribution(node: ast.AST) -> bool:
    """A comparison with the name of a distribution, or a look at the family that it is of."""
    if isinstance(node, ast.Attribute) and node.attr == "family" and isinstance(node.value, ast.Attribute):
        return node.value.attr == "profile"
    if not isinstance(node, ast.Compare):
        return False
    words = [
        str(part.value).lower()
        for side in (node.left, *node.comparators)
        for part in ast.walk(side)
        if isinstance(part, ast.Constant) and isinstance(part.value, str)
    ]
    return any(word.split()[:1] and word.split()[0] in DISTRIBUTIONS for word in words)


PYTHON = re.compile(r"\.py$")
PROVISION = re.compile(r"^provision/.*\.py$")
COMPONENTS = re.compile(r"^provision/components/.*\.py$")
OUTSIDE_PROFILES = re.compile(r"^provision/(?!profiles/).*\.py$")
SCRIPTS = re.compile(r"(\.(py|sh|j2|yml|yaml|service|conf)|/run|/setup|Makefile|Vagrantfile)$")
EVERYTHING = re.compile(r"^(?!requirements\.lock$)")

RULES = (
    Rule(
        "a sudo password in an argument can be read in /proc",
        PYTHON,
        nodes(sudo_password_argument),
        "server.shell('ls', _sudo_password='x')\n",
    ),
    Rule(
        "pyinfra's own file operations leave secrets readable: use ops.file",
        PROVISION,
        nodes(stock_file_operation),
        "files.put(src='a', dest='b')\n",
    ),
    Rule(
        "a component knows nothing of the lab: use the node's limits",
        COMPONENTS,
        nodes(asks_for_lab),
        "if site.lab:\n    pass\n",
    ),
    Rule(
        "distributions differ by data in provision/profiles",
        OUTSIDE_PROFILES,
        nodes(asks_for_distribution),
        "x = 1 if name == 'debian' else 2\n",
    ),
    Rule(
        "distributions differ by what their profile offers, not by their family",
        OUTSIDE_PROFILES,
        nodes(asks_for_distribution),
        "test = TESTS[on.profile.family]\n",
    ),
    Rule(
        "a name in /tmp that others can make first: use mktemp",
        PROVISION,
        lines(r"/tmp/[\w.-]*\$\$|>\s*/tmp/"),
        "run('make 2>/tmp/words.$$')\n",
    ),
    Rule(
        "a failure that is thrown away",
        SCRIPTS,
        lines(r"\|\|\s*(true|:)(\s|$|[;\"')])"),
        "rm x |" + "| true\n",
    ),
    Rule(
        "an except that swallows everything",
        PYTHON,
        nodes(swallows),
        "try:\n    f()\nexcept Exception:\n    pass\n",
    ),
    Rule(
        "the address of a package registry",
        EVERYTHING,
        lines("|".join(map(re.escape, REGISTRY_HOSTS))),
        f"https://{REGISTRY_HOSTS[0]}/simple\n",
    ),
    Rule("a path of one machine", EVERYTHING, lines(r"(?<![\w.])/work" + r"/\w"), "see /work" + "/shared\n"),
)


@cache
def tracked() -> dict[str, str]:
    """All text files that are, or would be, committed: path -> text."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    found = {}
    for name in listed.decode().split("\0"):
        path = ROOT / name
        if path.is_file() and path != THIS:
            try:
                found[name] = path.read_text()
            except UnicodeDecodeError:
                continue  # not text
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_file_breaks(rule: Rule) -> None:
    found = [place for path, text in tracked().items() for place in rule.breaks(path, text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_the_rule_finds_what_breaks_it(rule: Rule) -> None:
    assert list(rule.broken(rule.sample))
    assert not list(rule.broken("x = 1\n"))


def imports(tree: Iterator[ast.AST]) -> Iterator[str]:
    """The packages that a file imports, by the first part of their names."""
    for node in tree:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def normal(distribution: str) -> str:
    return distribution.lower().replace("_", "-")


def test_what_is_imported_is_a_declared_dependency() -> None:
    """Not only what another dependency happens to bring along.

    What runs on nodes finds torch and prometheus_client among their packages.
    """
    declared = {
        normal(re.split(r"[^\w-]", each)[0])
        for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    }
    of_package = {**packages_distributions(), "pydantic_core": ["pydantic"]}
    undeclared = {
        f"{path}: {name}"
        for path, text in tracked().items()
        if re.match(r"provision/.*\.py$", path)
        for name in imports(iter(syntax(text)))
        if name not in {*sys.stdlib_module_names, "provision", "torch", "prometheus_client"}
        and not declared & {normal(distribution) for distribution in of_package.get(name, [])}
    }
    assert not undeclared
