"""What is done on a GPU node: facts in, commands out, against nvidia_operations.yml and by hand."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from provision.components.nvidia import exports, locking
from provision.components.nvidia.machine import Loaded, Machine
from provision.components.nvidia.operations import (
    PHASES,
    Ensure,
    Operation,
    Place,
    Reboot,
    Skip,
    Stop,
    Write,
    words,
)
from provision.profiles import distribution
from provision.site.models import Site, SiteFile

DATA = yaml.safe_load((Path(__file__).parent / "nvidia_operations.yml").read_text())
TODAY = date(2026, 1, 15)


def make_site(model: str = "h100-sxm", count: int = 8, **nvidia: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g1", "roles": ["worker"], "gpu": {"model": model, "count": count}},
        },
        "scheduler": {"slurm": {}},
        "nvidia": nvidia,
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


def place(
    site: Site,
    on: str = "ubuntu 24.04",
    kernel: str = "6.8.0-90-generic",
    limits: dict[str, str] | None = None,
    versions: dict[str, list[str]] | None = None,
    headers: bool = False,
    **machine: Any,
) -> Place:
    offer = locking.Offer("g1", on, kernel, versions or {}, headers)
    lock = locking.resolve(site, "gpu", TODAY, offer)
    node = site.nodes["g1"]
    manager = distribution(*on.split()).manager
    return Place(
        node,
        locking.settings(site, node),
        exports.Chosen.of(lock),
        Machine(kernel, **machine),
        limits or {},
        manager,
    )


def operations(at: Place) -> list[Operation]:
    return [operation for phase in PHASES for operation in phase(at)]


def said(at: Place) -> list[str]:
    return [words(operation, at.manager) for operation in operations(at)]


@pytest.mark.parametrize("on", DATA["distributions"])
@pytest.mark.parametrize("box", DATA["machines"])
def test_commands(on: str, box: str) -> None:
    case, after = DATA["distributions"][on], DATA["after"]
    site = make_site(**DATA["machines"][box], **case.get("settings", {}))
    at = place(site, on, case["kernel"])
    fabric = after["fabric"] if box in ("dgx-h100", "hgx-b200") else []
    shown = [line.split(": for k in")[0] for line in said(at)]
    assert shown == [
        *case["before"],
        *case["driver"][box],
        *case["built"],
        *after["loading"],
        *fabric,
        *after["devices"],
    ]


def test_ubuntus_own_modules_are_signed_and_need_no_build() -> None:
    site = make_site(source="distribution", branch=580)
    at = place(
        site,
        kernel="6.14.0-37-generic",
        versions={
            "libnvidia-compute-580-server": ["580.126.20-0ubuntu0.24.04.1", "580.95.05-0ubuntu0.24.04.3"]
        },
        secure_boot=True,
    )
    assert at.chosen.lock.build == "precompiled"
    assert at.chosen.driver.wanted["linux-modules-nvidia-580-server-open-generic-hwe-24.04"] == "*"
    assert at.chosen.driver.wanted["libnvidia-compute-580-server"] == "580.126.20-*"
    assert not [op for op in operations(at) if isinstance(op, Stop)]
    assert "write /etc/apt/sources.list.d/provision-nvidia.sources" not in said(at)


def test_the_headers_of_a_kernel_of_ones_own_are_looked_for_and_never_installed() -> None:
    at = place(make_site(), kernel="6.18.0-custom", headers=True)
    assert at.chosen.lock.kernel == "own"
    assert not [words for words in said(at) if "linux-headers" in words]
    (headers,) = [op for op in operations(at) if isinstance(op, Ensure) and op.title.startswith("headers of")]
    assert headers.test == "[ -e /lib/modules/6.18.0-custom/build ] || exit 1"
    (built,) = [op for op in operations(at) if isinstance(op, Ensure) and op.title.startswith("modules of")]
    assert "dkms autoinstall" in built.make
    assert "6.18.0-custom" in built.make


@pytest.mark.parametrize("key", ["absent", "new", "requested", "unknown"])
def test_secure_boot_waits_for_a_person_and_says_what_to_press(key: str) -> None:
    at = place(make_site(), secure_boot=True, key=key)
    (stop,) = [op for op in operations(at) if isinstance(op, Stop)]
    assert "Enroll MOK" in stop.advice
    assert "g1" in stop.advice
    titles = [op.title for op in operations(at) if isinstance(op, Ensure)]
    assert titles.index("the key waits to be enrolled") < titles.index("module 580.126.20 loaded")


def test_an_enrolled_key_is_enough() -> None:
    assert not [
        op for op in operations(place(make_site(), secure_boot=True, key="enrolled")) if isinstance(op, Stop)
    ]


def test_the_password_of_an_enrolment_never_stands_in_an_argument() -> None:
    at = place(make_site(), secure_boot=True, key="absent")
    (request,) = [op for op in operations(at) if isinstance(op, Ensure) and "waits" in op.title]
    assert "umask 077" in request.make
    assert "openssl passwd -6 -stdin <" in request.make


def test_a_loaded_nouveau_means_a_reboot_before_the_driver_is_loaded() -> None:
    found = operations(place(make_site(), nouveau=True))
    assert [op for op in found if isinstance(op, Reboot)]
    assert not [op for op in found if isinstance(op, Ensure) and "loaded" in op.title]
    assert not [op for op in found if isinstance(op, Ensure) and op.title == "modes of GPUs"]


def test_another_driver_is_taken_out_or_the_node_reboots() -> None:
    """OS-18: no GPU step between the packages and the reboot."""
    running = place(make_site(), loaded=Loaded("570.195.03", "open"))
    (swap,) = [
        op for op in operations(running) if isinstance(op, Ensure) and "in place of 570.195.03" in op.title
    ]
    assert swap.make.index("systemctl stop") < swap.make.index("rmmod") < swap.make.index("modprobe nvidia")
    stuck = operations(place(make_site(), loaded=Loaded("570.195.03", "open"), reboot=True))
    assert [op for op in stuck if isinstance(op, Reboot)]
    assert not [op for op in stuck if isinstance(op, Ensure) and op.title == "modes of GPUs"]


def test_the_other_kind_of_modules_of_the_same_version_is_another_driver() -> None:
    titles = [
        op.title
        for op in operations(place(make_site(), loaded=Loaded("580.126.20", "proprietary")))
        if isinstance(op, Ensure)
    ]
    assert "module 580.126.20 in place of 580.126.20" in titles


def test_what_a_node_cannot_do_is_skipped_with_its_reason() -> None:
    at = place(make_site(), limits={"module:*": "a container", "kernel": "its machine's"})
    skipped = {op.title: op.reason for op in operations(at) if isinstance(op, Skip)}
    assert skipped == {
        "headers of kernel 6.8.0-90-generic": "its machine's",
        "module 580.126.20 loaded": "a container",
        "device files and modes of GPUs": "a container",
    }


def test_a_mirror_stands_in_place_of_nvidias_address_with_the_same_key() -> None:
    at = place(make_site(mirror="https://mirror.example.org/cuda"))
    (entry,) = [op for op in operations(at) if isinstance(op, Write) and op.path.endswith(".sources")]
    assert "URIs: https://mirror.example.org/cuda/ubuntu2404/x86_64/\n" in entry.content
    assert "Signed-By: /usr/share/keyrings/provision-nvidia-d2a6b11c0963.gpg\n" in entry.content
    everything = "\n".join(str(op) for op in operations(at))
    assert "AllowInsecure" not in everything
    assert "trusted=yes" not in everything


@pytest.mark.parametrize(
    ("on", "kernel", "file", "within"),
    [
        ("ubuntu 26.04", "7.0.0-14-generic", "cuda-keyring_1.1-1_all.deb", "usr/share/keyrings/"),
        ("rhel 10", "6.12.0-124.8.1.el10_1.x86_64", "CDF6BA43.pub", None),
    ],
)
def test_a_keyring_that_the_site_vouches_for_is_the_repositorys_own(
    on: str, kernel: str, file: str, within: str | None
) -> None:
    at = place(make_site(keyring="0123456789ab" + "0" * 52), on, kernel)
    (fetch,) = [op for op in operations(at) if isinstance(op, Ensure) and op.title == "the repository's key"]
    assert file in fetch.make
    assert ("dpkg-deb --fsys-tarfile" in fetch.make) == (within is not None)
    assert within is None or within in fetch.make
    assert "0123456789ab" in fetch.test


def test_the_stream_follows_branch_and_kind() -> None:
    """OS-15: a request for 535.274.02 proprietary is stream 535-dkms, not a stream of that name."""
    site = make_site("a100-pcie-80gb", 4, driver="535.274.02", modules="proprietary")
    assert any(
        line.startswith("stream nvidia-driver:535-dkms: ")
        for line in said(place(site, "rocky 9", "5.14.0-570.el9_6.x86_64"))
    )


def test_on_top_of_the_driver() -> None:
    site = make_site(cuda="13.0", nccl="2.28.9", also=["dcgm"])
    line = [line for line in said(place(site)) if "cuda-toolkit" in line]
    assert line == [
        "apt-get install cuda-toolkit-13-0=13.0.* libnccl2=2.28.9-1+cuda13.0 libnccl-dev=2.28.9-1+cuda13.0 "
        "datacenter-gpu-manager-4-cuda13"
    ]
    assert said(place(site))[-1] == "systemctl enable --now nvidia-dcgm"
