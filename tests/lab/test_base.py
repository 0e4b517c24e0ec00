"""Base on real nodes: what a person changes is seen and mended, packages stay whole, names stay right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from provision.lab import Lab
from provision.report.model import Verdict
from tests.lab.checking import HEAD, KEY, WORKER, Bench, Case, bench, break_and_mend, hidden, tell_apart
from tests.lab.command import provision

BASE = {
    "timezone": "Europe/Zurich",
    "groups": {"research": 6001},
    "users": {
        "ada": {"uid": 5001, "group": "research", "sudo": "nopasswd", "keys": [KEY]},
        "bob": {"uid": 5002, "groups": ["video"]},
    },
    "absent_users": ["mallory"],
    "swap": "off",
    "sysctl": {"net.ipv4.tcp_fin_timeout": 30},
}
ID = "/etc/machine-id"
CASES = [
    hidden(
        "packages-whole",
        "sed -i '/^Package: iputils-ping$/,/^$/s/^Status: .*/Status: install ok unpacked/' /var/lib/dpkg/status",
        "/usr/bin/dpkg-query",
    ),
    hidden("packages-held", "rm /etc/apt/preferences.d/90-provision", "/usr/bin/apt-cache"),
    hidden("unattended-upgrades-kept-off", "rm /etc/apt/apt.conf.d/90-provision", "/usr/bin/apt-config"),
    hidden("host-name", "hostname vm-1-74", "/usr/bin/hostname"),
    hidden("names-resolve", f"sed -i '/{HEAD}/d' /etc/hosts", "/usr/bin/getent"),
    hidden("time-zone", "ln -sfn /usr/share/zoneinfo/Asia/Tokyo /etc/localtime", "/usr/bin/readlink"),
    hidden("locale", "echo LANG=C >/etc/locale.conf", "/usr/bin/locale"),
    hidden("accounts", "usermod -u 5999 ada", "/usr/bin/getent"),
    hidden("sudoers", "chmod 666 /etc/sudoers.d/provision", "/usr/sbin/visudo"),
    hidden("kernel-parameters", "sysctl -qw net.ipv4.tcp_fin_timeout=31", "/usr/sbin/sysctl"),
    hidden(
        "service-limits",
        "rm /etc/systemd/system.conf.d/90-provision.conf; systemctl daemon-reexec",
        "/usr/bin/systemctl",
    ),
    Case(
        "journal-persistent",
        "sed -i s/persistent/volatile/ /etc/systemd/journald.conf.d/90-provision.conf; "
        "systemctl restart systemd-journald; rm -r /var/log/journal/*",
        f"mv {ID} {ID}.away; mkdir {ID}",
        f"rmdir {ID}; mv {ID}.away {ID}",
    ),
]
SKIPPED = {"user-limits", "swap-off", "governor"}  # a container cannot: tried in tests/unit


@pytest.fixture(scope="module")
def on(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(lab, tmp_path_factory.mktemp("base"), "base", base=BASE) as made:
        yield made


def test_a_kernel_without_what_nobody_asked_for_is_no_fault(on: Bench) -> None:
    """As where IPv6 is switched off at boot: the parameters of its neighbour tables are not there."""
    on.lab.inside(WORKER, "mount -t tmpfs none /proc/sys/net/ipv6/neigh")
    try:
        found = on.found("kernel-parameters")
        answer = provision("apply", str(on.path), "--component", "base")
    finally:
        on.lab.inside(WORKER, "umount /proc/sys/net/ipv6/neigh")
    assert found.verdict is Verdict.PASS, found
    assert (answer.rc, answer.changed) == (0, {HEAD: 0, WORKER: 0})


def test_every_check_is_tried(on: Bench) -> None:
    tried = {case.check for case in CASES} | {"machine-id", "machine-id-unique"}
    assert tried | SKIPPED == on.names
    assert {name: on.found(name).verdict for name in SKIPPED} == dict.fromkeys(SKIPPED, Verdict.SKIP)


def test_a_check_without_its_source_cannot_tell(on: Bench) -> None:
    tell_apart(on, CASES)


def test_what_is_changed_by_hand_fails_and_is_mended(on: Bench) -> None:
    break_and_mend(on, CASES)


def test_files_modes_owners_and_accounts_changed_by_hand_are_mended(on: Bench) -> None:
    on.lab.inside(
        WORKER,
        "chown nobody /etc/hosts; chmod 600 /etc/security/limits.d/90-provision.conf; "
        "useradd mallory; userdel bob; rm -r /home/bob; rm /etc/ssh/authorized_keys.d/ada; "
        "echo evil >/etc/ssh/authorized_keys.d/mallory",
    )
    assert on.plan()[WORKER] >= 6
    assert on.apply()[WORKER] >= 6
    state = "stat -c '%a %U' /etc/hosts /etc/security/limits.d/90-provision.conf; id -u bob; stat -c %U /home/bob; "
    state += "ls /etc/ssh/authorized_keys.d; ! getent passwd mallory"
    assert on.lab.inside(WORKER, state).split("\n")[:5] == ["644 root", "644 root", "5002", "bob", "ada"]
    assert on.apply() == {HEAD: 0, WORKER: 0}


def test_machine_ids_must_be_there_and_differ(on: Bench) -> None:
    same = on.lab.inside(HEAD, f"cat {ID}").strip()
    on.lab.inside(WORKER, f"cp {ID} {ID}.own")
    try:
        on.lab.inside(WORKER, f"echo {same} >{ID}")
        clone = on.found("machine-id-unique", HEAD)
        on.lab.inside(WORKER, f"echo uninitialized >{ID}")
        fresh = on.found("machine-id", WORKER)
        on.lab.inside(WORKER, f"rm {ID}")
        gone = [on.found("machine-id", WORKER), on.found("machine-id-unique", HEAD)]
        on.lab.inside(WORKER, f"mkdir {ID}")
        unreadable = [on.found("machine-id", WORKER), on.found("machine-id-unique", HEAD)]
    finally:
        on.lab.inside(WORKER, f"[ ! -d {ID} ] || rmdir {ID}; mv {ID}.own {ID}")
    assert (clone.verdict, clone.read) == (Verdict.FAIL, f"equal-machine-id {same} on {HEAD}, {WORKER}")
    assert (fresh.verdict, fresh.read) == (Verdict.FAIL, "uninitialized")
    assert [found.verdict for found in gone] == [Verdict.FAIL, Verdict.FAIL]
    assert [found.verdict for found in unreadable] == [Verdict.UNKNOWN, Verdict.UNKNOWN]
    assert (on.found("machine-id").verdict, on.found("machine-id-unique", HEAD).verdict) == (
        Verdict.PASS,
        Verdict.PASS,
    )


def test_keys_that_are_kept_elsewhere_are_not_shut_out(on: Bench) -> None:
    ours, other = "/etc/ssh/sshd_config.d/00-provision-keys.conf", "/etc/ssh/sshd_config.d/50-site.conf"
    on.lab.inside(WORKER, f"mv {ours} {ours}.away; echo 'AuthorizedKeysFile /srv/keys/%u' >{other}")
    try:
        answer = provision("apply", str(on.path), "--component", "base")
    finally:
        on.lab.inside(WORKER, f"mv {ours}.away {ours}; rm {other}")
    assert answer.rc == 1
    assert "AuthorizedKeysFile of its own" in answer.nodes[WORKER]["reason"]
    on.apply()


def test_a_package_that_is_pinned_stays_and_a_missing_one_can_be_installed(on: Bench) -> None:
    simulated = on.lab.inside(
        WORKER,
        "apt-cache policy munge | grep -A1 '[*]'; apt-get -s install slurm-client-emulator | tail -n 1",
    )
    assert " 990\n" in simulated
    assert "Conf slurm-client-emulator" in simulated


def test_a_package_that_cannot_be_finished_stops_the_node_with_the_end_of_its_make_log(on: Bench) -> None:
    """As a driver whose module does not build: nothing else is done on that node, the others go on."""
    on.lab.inside(
        WORKER,
        "mkdir -p /tmp/broken/DEBIAN /var/lib/dkms/driver/1.0/build; "
        "printf 'Package: broken-driver\\nVersion: 1.0\\nArchitecture: all\\nMaintainer: x <x@example.org>\\n"
        "Description: does not configure\\n' >/tmp/broken/DEBIAN/control; "
        "printf '#!/bin/sh\\nexit 10\\n' >/tmp/broken/DEBIAN/postinst; chmod 755 /tmp/broken/DEBIAN/postinst; "
        "dpkg-deb -b /tmp/broken /tmp/broken.deb >/dev/null; ! dpkg -i /tmp/broken.deb; "
        "echo 'error: too few arguments to function' >/var/lib/dkms/driver/1.0/build/make.log",
    )
    try:
        found = on.found("packages-whole")
        answer = provision("apply", str(on.path), "--component", "base")
    finally:
        on.lab.inside(WORKER, "dpkg -P broken-driver; rm -r /tmp/broken /tmp/broken.deb /var/lib/dkms")
    assert (found.verdict, found.read) == (Verdict.FAIL, "broken-driver (half-configured)")
    assert answer.rc == 1
    assert "too few arguments to function" in answer.nodes[WORKER]["reason"]
    assert answer.nodes[HEAD]["verdict"] == "pass"
    assert on.apply() == {HEAD: 0, WORKER: 0}


def test_kernel_parameters_and_names_hold_after_a_reboot(on: Bench) -> None:
    on.lab.power_off(WORKER)
    on.lab.start(WORKER)
    assert {name: on.found(name).verdict for name in ("kernel-parameters", "names-resolve", "host-name")} == {
        "kernel-parameters": Verdict.PASS,
        "names-resolve": Verdict.PASS,
        "host-name": Verdict.PASS,
    }
    assert on.lab.inside(WORKER, "systemctl --failed --plain --no-legend") == ""
    assert on.apply() == {HEAD: 0, WORKER: 0}
