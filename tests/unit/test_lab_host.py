"""What the lab finds out about the machine it runs on."""

from pathlib import Path

import pytest

from provision.lab import cgroup
from provision.lab.command import InputError, LabError
from provision.lab.host import (
    AptSource,
    Mirror,
    apt_sources,
    cgroup_root,
    debian_mirror,
    debians_own,
    missing_packages,
)

DEBIAN = """\
Types: deb deb-src
# a comment
URIs: https://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: https://mirror.example/debian-security/
Suites: bookworm-security
Components: main contrib
"""


def etc_apt(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "sources.list.d").mkdir()
    for name, text in files.items():
        (tmp_path / "sources.list.d" / name.replace("__", ".")).write_text(text)
    return tmp_path


def test_debian_mirror_and_its_security_archive_come_from_deb822(tmp_path: Path) -> None:
    found = apt_sources(etc_apt(tmp_path, debian__sources=DEBIAN))
    assert debian_mirror(found) == Mirror(
        "https://mirror.example/debian", "https://mirror.example/debian-security"
    )


def test_one_line_sources_are_read_with_options_and_comments(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://old.example/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://new.example/debian/ trixie main contrib # ours\n"
        "deb-src http://new.example/debian/ trixie main\n"
    )
    assert apt_sources(tmp_path) == [AptSource("http://new.example/debian/", "trixie", ("main", "contrib"))]
    assert debian_mirror(apt_sources(tmp_path)) == Mirror("http://new.example/debian")


def test_other_archives_are_not_taken_for_debian(tmp_path: Path) -> None:
    found = apt_sources(
        etc_apt(
            tmp_path,
            ubuntu__sources="Types: deb\nURIs: http://a.example/ubuntu\nSuites: noble\nComponents: main\n",
            docker__list="deb https://download.docker.com/linux/debian bookworm stable\n",
            cloud__list="deb https://cloud.example/apt cloud-sdk-bookworm main\n",
            disc__list="deb cdrom:[Debian]/ bookworm main\n",
            off__sources="Enabled: no\n" + DEBIAN,
        )
    )
    # the stanza that is switched off is Debian's archive; its security archive alone is no mirror
    assert debian_mirror(found) is None


def test_an_archive_named_debian_wins_over_an_unofficial_one_with_the_same_suites() -> None:
    found = [
        AptSource("http://extra.example/multimedia", "bookworm", ("main",)),
        AptSource("http://mirror.example/debian", "bookworm", ("main",)),
    ]
    assert debian_mirror(found) == Mirror("http://mirror.example/debian")


HYBRID = """\
25 20 0:22 / /sys/fs/cgroup rw - tmpfs tmpfs rw
26 25 0:23 / /sys/fs/cgroup/memory rw,relatime shared:3 - cgroup cgroup rw,memory
27 25 0:24 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""


def test_cgroup_v2_is_found_on_hybrid_and_on_pure_machines() -> None:
    assert cgroup_root(HYBRID) == (Path("/sys/fs/cgroup/unified"), True)
    assert cgroup_root("27 25 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n") == (
        Path("/sys/fs/cgroup"),
        False,
    )


def test_a_group_is_looked_for_in_every_hierarchy() -> None:
    assert cgroup.everywhere(Path("/sys/fs/cgroup/unified/one/node"), HYBRID) == [
        Path("/sys/fs/cgroup/memory/one/node"),
        Path("/sys/fs/cgroup/unified/one/node"),
    ]
    pure = "27 25 0:24 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
    assert cgroup.everywhere(Path("/sys/fs/cgroup/one"), pure) == [Path("/sys/fs/cgroup/one")]


def test_a_machine_without_cgroup_v2_is_told_what_to_do() -> None:
    with pytest.raises(LabError, match="boot with systemd"):
        cgroup_root("26 25 0:23 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n")


def test_missing_packages_are_named_once(tmp_path: Path) -> None:
    keyring = tmp_path / "keyring"
    keyring.touch()

    def nothing(_program: str) -> None:
        return None

    assert missing_packages(nothing, keyring).count("openssh-client") == 1
    assert {"gcc", "libc6-dev", "systemd-container"} <= set(missing_packages(nothing, keyring))
    assert missing_packages(lambda program: f"/bin/{program}", keyring) == []
    assert missing_packages(lambda program: f"/bin/{program}", tmp_path / "none") == [
        "debian-archive-keyring"
    ]


def test_where_apt_knows_no_debian_the_mirror_is_mmdebstraps_own(tmp_path: Path) -> None:
    program = tmp_path / "mmdebstrap"
    program.write_text(
        "    my $mirror    = 'http://mirror.example/debian';\n    my $secmirror = 'http://x.example/y';\n"
    )
    assert debians_own(program) == Mirror(
        "http://mirror.example/debian", "http://mirror.example/debian-security"
    )
    program.write_text("#!/usr/bin/perl\n")
    with pytest.raises(InputError, match="--mirror URL"):
        debians_own(program)
