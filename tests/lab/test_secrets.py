"""Secrets of the cluster are nowhere where others can see them, at no moment: watched by another user everywhere."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from provision.lab import Lab
from tests.lab.admitted import HEAD, NODES
from tests.lab.command import Answer, answer, start

WATCHER = Path(__file__).with_name("watcher.py")
SMTP, HOOK = (
    "smtp-9d41c07b5e",
    "https://alerts.example.org/hook/5c1f20e7aa",
)  # what the site file gets from elsewhere
SPY = "spy"


@dataclass
class Seen:
    """What was seen: (machine, where, content)."""

    records: list[tuple[str, str, bytes]] = field(default_factory=list)

    def of(self, secret: bytes) -> list[str]:
        """Where a secret stands, as it is or encoded."""
        forms = shapes(secret)
        return sorted(
            {f"{node}: {where}" for node, where, content in self.records if any(f in content for f in forms)}
        )


def shapes(secret: bytes) -> list[bytes]:
    """A secret as it is, in hexadecimal, and the middle of its base64 wherever it begins in a longer text.

    The middle: 24 bytes, which are in one line of any base64 that is broken into lines.
    """
    part = secret[: len(secret) // 2] if len(secret) > 24 else secret
    found = [part, part.hex().encode(), part.hex().upper().encode()]
    for skip in range(3):
        whole = base64.b64encode(secret[skip : skip + 24])
        found.append(whole[: len(whole) // 4 * 4 - 4])
    return found


class OnNodes:
    """The watcher as an ordinary user on all nodes."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.running: dict[str, subprocess.Popen[str]] = {}

    def begin(self) -> None:
        for node in NODES:
            self.lab.inside(
                node,
                f"id {SPY} >/dev/null 2>&1 || useradd --create-home --home-dir /var/spy {SPY}\n"
                "install -m 644 /dev/stdin /var/watcher.py",
                stdin=WATCHER.read_text(),
            )
            unit = "--unit=watcher --property=LimitNOFILE=4096 --quiet --pipe --collect --service-type=exec"
            command = f"systemd-run {unit} --uid={SPY} python3 /var/watcher.py /var/spy/seen"
            self.running[node] = subprocess.Popen(
                [*self.lab.ssh(node, "root"), command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        for node, process in self.running.items():
            assert process.stdout
            assert process.stdout.readline() == "watching\n", f"{node}: {process.communicate()[1]}"

    def end(self) -> Seen:
        seen = Seen()
        for node, process in self.running.items():
            alive = self.lab.inside(node, "systemctl is-active watcher || [ $? = 3 ]").strip()
            assert alive == "active", f"{node}: the watcher has ended: {process.communicate()[1]}"
            self.lab.inside(node, "systemctl stop watcher")
            _, said = process.communicate(timeout=60)
            assert process.returncode == 0, f"{node}: {said}"
            for line in self.lab.inside(node, "cat /var/spy/seen").splitlines():
                record = json.loads(line)
                seen.records.append((node, record["where"], base64.b64decode(record["content"])))
        return seen


@contextmanager
def arguments_here() -> Iterator[Seen]:
    """The arguments of all processes of this machine, those within nodes among them."""
    seen, known, ended = Seen(), set[bytes](), threading.Event()

    def watch() -> None:
        while not ended.wait(0.005):
            for name in os.listdir("/proc"):
                if name.isdigit():
                    try:
                        content = Path(f"/proc/{name}/cmdline").read_bytes()
                    except OSError:
                        continue  # gone
                    if content not in known:
                        known.add(content)
                        seen.records.append(("this machine", f"/proc/{name}/cmdline", content))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


@dataclass
class Watched:
    """Two applies that were watched: what was seen where, and the secrets that could have been."""

    seen: Seen
    planted: dict[str, bytes]
    answers: list[Answer]
    secrets: dict[str, bytes]
    folder: Path
    lab: Lab


@pytest.fixture(scope="module")
def watched(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """A first apply on a fresh lab, then a second one that logs in with a sudo password."""
    folder = tmp_path_factory.mktemp("secrets")
    document = yaml.safe_load(Path("inventories/lab.yml").read_text())
    document["access"]["ssh_config"] = str(lab.paths.ssh_config)
    mail = {
        "to": ["ops@example.org"],
        "sender": "lab@example.org",
        "smarthost": "mail.example.org:587",
        "user": "lab",
        "password": {"env": "LAB_SMTP"},
    }
    document["monitoring"] = {"alerts": {"webhook": {"file": "hook"}, "mail": mail}}
    site = folder / "lab.yml"
    site.write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "hook").write_text(HOOK)
    (folder / "hook").chmod(0o600)
    planted = {
        kind: f"planted-{kind}-{os.urandom(16).hex()}".encode()
        for kind in ("argument", "file", "environment")
    }
    spies = OnNodes(lab)
    spies.begin()
    with pytest.MonkeyPatch.context() as patch, arguments_here() as here:
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        patch.setenv("LAB_SMTP", SMTP)
        answers = [answer(start("apply", str(site)))]
        plant(lab, planted)
        for node in NODES:
            lab.fault("sudo-password", node)
        password = lab.paths.sudo_password.read_text().strip()
        document["access"]["sudo_password"] = True
        site.write_text(yaml.safe_dump(document, sort_keys=False))
        patch.setenv("PROVISION_SUDO_PASSWORD", password)
        lab.inside(HEAD, "rm /etc/munge/munge.key /etc/slurm/jwt_hs256.key")
        answers.append(answer(start("apply", str(site))))
        answers.append(answer(start("verify", str(site))))
    seen = spies.end()
    for node in NODES:
        lab.fault("sudo-password", node, undo=True)
    seen.records += here.records
    secrets = {"smtp": SMTP.encode(), "hook": HOOK.encode(), "sudo": password.encode()}
    for name in lab.inside(HEAD, "ls /var/lib/provision/secrets").split():
        secrets[name] = base64.b64decode(lab.inside(HEAD, f"base64 /var/lib/provision/secrets/{name}"))
    return Watched(seen, planted, answers, secrets, folder, lab)


def plant(lab: Lab, planted: dict[str, bytes]) -> None:
    """Leaks of the three kinds, each for a moment, on every node."""
    word = {kind: text.decode() for kind, text in planted.items()}
    for node in NODES:
        lab.inside(
            node,
            f"""sh -c 'sleep 0.3' {word["argument"]}
            echo {word["file"]} >/tmp/.hidden; chmod 600 /tmp/.hidden; sleep 0.3; rm /tmp/.hidden
            runuser -u {SPY} -- env LEAK={word["environment"]} sleep 0.3""",
        )


def test_the_watcher_sees_what_leaks_for_a_moment(watched: Watched) -> None:
    for kind, text in watched.planted.items():
        for node in NODES:
            assert [place for place in watched.seen.of(text) if place.startswith(f"{node}: ")], (kind, node)


def test_both_runs_worked_and_all_kinds_of_secrets_were_there(watched: Watched) -> None:
    assert [found.rc for found in watched.answers[:2]] == [0, 0], watched.answers
    assert watched.answers[1].changed[HEAD] >= 2
    assert {"munge.key", "slurm-jwt.key", "smtp", "hook", "sudo"} <= set(watched.secrets)
    assert all(len(value) >= 10 for value in watched.secrets.values())


def test_no_other_user_saw_a_secret_at_any_moment(watched: Watched) -> None:
    leaks = {name: places for name, secret in watched.secrets.items() if (places := watched.seen.of(secret))}
    assert leaks == {}


def test_no_log_of_a_node_holds_a_secret(watched: Watched) -> None:
    logs = Seen()
    for node in NODES:
        script = "journalctl --no-pager -a -o cat; find /var/log -type f ! -path '/var/log/journal/*' -exec cat {} +"
        logs.records.append((node, "logs", watched.lab.inside(node, f"({script}) | base64 -w0").encode()))
    logs.records = [(node, where, base64.b64decode(content)) for node, where, content in logs.records]
    assert all(content for _, _, content in logs.records)
    leaks = {name: places for name, secret in watched.secrets.items() if (places := logs.of(secret))}
    assert leaks == {}


def test_nothing_that_the_controller_prints_or_keeps_holds_a_secret(watched: Watched) -> None:
    kept = Seen([("this machine", "output", str(found).encode()) for found in watched.answers])
    own = {watched.folder / "hook"}
    files = [path for path in watched.folder.rglob("*") if path.is_file() and path not in own]
    assert {"journal.db", "lab.secrets", "lab.lock.yml"} <= {path.name for path in files}
    kept.records += [("this machine", str(path), path.read_bytes()) for path in files]
    leaks = {name: places for name, secret in watched.secrets.items() if (places := kept.of(secret))}
    assert leaks == {}
    assert [path for path in files if path.stat().st_mode & 0o077 and "state" in path.parts] == []


def test_files_that_hold_secrets_are_their_owners_alone(watched: Watched) -> None:
    """Every file of a node, searched by root: a secret is only where nobody else reads."""
    needles = [shapes(secret)[0] for secret in watched.secrets.values()]
    script = """
import os, stat, sys, base64
needles = [base64.b64decode(line) for line in sys.stdin]
for top in ("/etc", "/var", "/run", "/tmp", "/home", "/root", "/usr/local", "/opt", "/srv", "/shared", "/scratch"):
    for folder, folders, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            found = os.lstat(path)
            if stat.S_ISREG(found.st_mode) and found.st_size < 1 << 26:
                content = open(path, "rb").read()
                if any(needle in content for needle in needles):
                    print(oct(found.st_mode & 0o777), found.st_uid, path)
"""
    for node in NODES:
        watched.lab.inside(node, "cat >/root/search.py", stdin=script)
        lines = watched.lab.inside(
            node,
            "python3 /root/search.py",
            stdin="".join(base64.b64encode(n).decode() + "\n" for n in needles),
        ).splitlines()
        places = {line.split(maxsplit=2)[2]: line.split()[0] for line in lines}
        assert "/etc/munge/munge.key" in places, "the search finds what is there"
        assert {path: mode for path, mode in places.items() if not mode.endswith("0")} == {}
