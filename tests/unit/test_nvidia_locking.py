"""The version lock: what goes together, what is refused before any node is touched, and what the lock file may say."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.components.nvidia import locking
from provision.components.nvidia.exports import Chosen
from provision.profiles.gpu import all_models
from provision.profiles.nvidia import number, rules, runs
from provision.profiles.nvidia_packages import nvidia_distributions, nvidia_packages
from provision.profiles.packaging import parse_offer
from provision.site.load import examine_text
from provision.site.lock import Lock, NvidiaLock
from provision.site.models import Site, SiteFile

TODAY = date(2026, 1, 15)
ROCKY = locking.Offer("g1", "rocky 9", "5.14.0-570.el9_6.x86_64", {})
UBUNTU = locking.Offer("g1", "ubuntu 24.04", "6.8.0-90-generic", {})
SELF_BUILT = locking.Offer("g1", "ubuntu 24.04", "6.18.0-custom", {}, headers=True)


def make_site(model: str = "h100-sxm", count: int = 8, **nvidia: Any) -> Site:
    document = {
        "cluster": "tiny",
        "groups": {
            "head": {"hosts": "h1", "roles": ["head"]},
            "gpu": {"hosts": "g[1-2]", "roles": ["worker"], "gpu": {"model": model, "count": count}},
        },
        "scheduler": {"slurm": {}},
        "nvidia": nvidia,
    }
    return Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))


def refused(site: Site) -> dict[str, str]:
    """Rule -> why, of what is wrong and not only doubtful."""
    return {found.rule: found.message for found in locking.problems(site, TODAY) if not found.warning}


def warned(site: Site) -> dict[str, str]:
    return {found.rule: found.message for found in locking.problems(site, TODAY) if found.warning}


# What cannot work


@pytest.mark.parametrize(
    ("site", "rule", "why"),
    [
        (make_site("b200-sxm", modules="proprietary"), "nvidia-modules", "driven by open kernel modules only"),
        (make_site("v100-sxm-32gb", 4, modules="open"), "nvidia-modules", "no GSP before Turing"),
        (make_site("v100-sxm-32gb", 4, branch=590), "nvidia-branch", "does not drive v100-sxm-32gb"),
        (make_site("b200-sxm", branch=550), "nvidia-branch", "expected 570 or newer"),
        (make_site("b300-sxm", branch=570), "nvidia-branch", "expected 580 or newer"),
        (make_site(branch=571), "nvidia-branch", "nothing is known about this branch"),
        (make_site(branch=570, driver="580.126.20"), "nvidia-branch", "that of driver 580.126.20"),
        (make_site(branch=570, cuda="13.0"), "nvidia-cuda", "CUDA 13.0 needs driver 580.65.06 or newer"),
        (make_site(branch=570, cuda="13.0"), "nvidia-cuda", "of branch 535, 550, 565, 570 or 575"),
        (make_site(branch=550, cuda="13.2", compat="13.2"), "nvidia-cuda", "of branch 535, 570, 580 or 590"),
        (make_site("v100-sxm-32gb", 4, cuda="13.0"), "nvidia-cuda", "makes no code for v100-sxm-32gb"),
        (make_site("a100-pcie-80gb", 4, fabric_manager=True), "nvidia-fabric-manager", "has no NVSwitch"),
        (make_site("a100-sxm-80gb", 4, fabric_manager=True), "nvidia-fabric-manager", "4 x a100-sxm-80gb"),
        (make_site(fabric_manager=False), "nvidia-fabric-manager", "error 802"),
        (
            make_site(driver="580.126.20", fabric_manager="580.95.05"),
            "nvidia-fabric-manager",
            "another patch level",
        ),
        (make_site("t4", 2, mig={"all": {"1g.5gb": 2}}), "nvidia-mig", "cannot be divided by MIG"),
        (make_site("a100-pcie-80gb", 2, mig={"2": {"1g.10gb": 7}}), "nvidia-mig", "expected a GPU below 2"),
        (make_site("rtx-9090", 2), "nvidia-gpu", "is not known"),
        (make_site(branch=570, images=["nvidia/cuda:13.0.1-base-ubuntu24.04"]), "nvidia-cuda", "cuda:13.0.1"),
    ],
)  # fmt: skip
def test_a_set_that_cannot_work_is_refused_with_the_reason(site: Site, rule: str, why: str) -> None:
    found = refused(site)
    assert list(found) == [rule]
    assert why in found[rule]


@pytest.mark.parametrize(
    "site",
    [
        make_site(),
        make_site("b200-sxm"),
        make_site("v100-sxm-32gb", 4, cuda="12.8"),
        make_site("v100-sxm-32gb", 16, fabric_manager=True),
        make_site(branch=570, cuda="13.0", compat="13.0"),
        make_site(branch=580, cuda="13.0", images=["nvcr.io/nvidia/pytorch:25.09-py3"]),
        make_site("a30", 2, mig={"all": {"1g.6gb": 4}}),
    ],
)
def test_a_set_that_works_is_not(site: Site) -> None:
    assert refused(site) == {}


def test_a_branch_without_security_updates_is_told() -> None:
    site = make_site(branch=570)
    assert not [found for found in locking.problems(site, date(2026, 2, 28)) if found.warning]
    (late,) = [found for found in locking.problems(site, date(2026, 3, 1)) if found.warning]
    assert "gets no security updates since 2026-02" in late.message


def test_an_image_that_nobody_knows_is_a_warning_not_a_pass() -> None:
    assert (
        "which CUDA is in it is not known"
        in warned(make_site(images=["registry.example.org/train:7"]))["nvidia-image"]
    )


def test_check_names_the_line_and_connects_to_nothing(tmp_path: Path) -> None:
    text = (
        "cluster: tiny\ngroups:\n  head: {hosts: h1, roles: [head]}\n  gpu:\n    hosts: b1\n    roles: [worker]\n"
        "    gpu: {model: b200-sxm, count: 8}\nscheduler: {slurm: {}}\nnvidia:\n  modules: proprietary\n"
    )
    (found,) = [p for p in examine_text(text, tmp_path / "tiny.yml").problems if not p.warning]
    assert (found.rule, found.line) == ("nvidia-modules", 10)


def test_nodes_of_a_group_get_the_same_software() -> None:
    site = make_site()
    document = site.file.model_dump(exclude_unset=True)
    document["nodes"] = {"g2": {"settings": {"nvidia": {"branch": 570}}}}
    other = Site.from_file(SiteFile.model_validate(document), Path("tiny.yml"))
    assert "g2 and g1 of group gpu would get different software" in refused(other)["nvidia-differs"]


# CUDA and drivers


@pytest.mark.parametrize(
    ("driver", "cuda", "compat", "how"),
    [
        ("470.182.03", "12.2", None, "no"),  # NCL-15: newer driver or compat libraries
        ("470.182.03", "12.2", "12.2", "forward"),
        ("535.104.05", "12.4", None, "minor"),
        ("550.54.15", "12.2", None, "native"),
        ("418.67", "10.2", None, "no"),  # CTR-10
        ("570.195.03", "13.0", None, "no"),
        ("570.195.03", "13.0", "13.0", "forward"),
        ("570.195.03", "13.0", "13.2", "forward"),
        ("570.195.03", "13.1", "13.0", "no"),  # the package is older than the program
        ("550.54.15", "13.2", "13.2", "no"),  # not among the branches of that package
        ("560.35.05", "13.0", "13.0", "no"),
        ("570.195.03", "13.0", "13.9", "unknown"),
        ("580.126.20", "13.1", None, "minor"),
        ("580.126.20", "12.4", None, "native"),
        ("610.57.04", "14.0", None, "no"),
    ],
)
def test_which_driver_runs_which_cuda(driver: str, cuda: str, compat: str | None, how: str) -> None:
    found = runs(rules(), driver, cuda, compat=compat)
    assert found.how == how
    assert driver in found.why


@pytest.mark.parametrize(
    ("image", "cuda"),
    [
        ("nvidia/cuda:12.4.1-base-ubuntu22.04", "12.4"),
        ("docker.io/nvidia/cuda:13.0.1-devel-rockylinux9", "13.0"),
        ("nvcr.io/nvidia/pytorch:25.09-py3", "13.0"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "12.8"),
        ("mirror.example.org/nvidia/pytorch:24.12-py3", "12.6"),
        ("python:3.13", None),
    ],
)
def test_the_cuda_in_an_image(image: str, cuda: str | None) -> None:
    assert rules().image_cuda(image) == cuda


@given(st.lists(st.integers(1, 999), min_size=2, max_size=3))
def test_a_version_is_its_numbers(parts: list[int]) -> None:
    assert number(".".join(map(str, parts))) == tuple(parts)


def test_a_patch_level_counts() -> None:
    assert number("575.64") != number("575.64.03")
    assert number("575.64") < number("575.64.03")


# Resolving


def test_what_is_resolved_for_an_hgx() -> None:
    found = locking.resolve(make_site(cuda="13.0"), "gpu", TODAY, UBUNTU)
    assert found == NvidiaLock(
        gpus="8 x h100-sxm",
        distribution="ubuntu 24.04",
        kernel="generic",
        source="nvidia",
        branch=580,
        driver="580.126.20",
        modules="open",
        build="dkms",
        fabric_manager="580.126.20",
        cuda="13.0",
    )


@pytest.mark.parametrize(
    ("model", "count", "items"),
    [
        ("t4", 2, []),
        ("a100-sxm-80gb", 4, []),
        ("h100-sxm", 8, ["fabric-manager", "nscq"]),
        ("b200-sxm", 8, ["fabric-manager", "nscq", "nvlsm"]),
        ("gb200", 4, ["imex"]),
    ],
)
def test_what_belongs_to_the_interconnect(model: str, count: int, items: list[str]) -> None:
    lock = locking.resolve(make_site(model, count), "gpu", TODAY, UBUNTU)
    assert locking.item_names(lock) == ["driver", "modules.open.dkms", *items]


def test_a_distributions_driver_is_what_its_sources_offer() -> None:
    offer = locking.Offer(
        "g1",
        "debian 13",
        "6.12.57+deb13-amd64",
        {"libcuda1": ["550.163.01-2", "535.261.03-1"]},
    )
    lock = locking.resolve(
        make_site("a100-pcie-80gb", 4, source="distribution", modules="proprietary"), "gpu", TODAY, offer
    )
    assert (lock.driver, lock.branch, lock.kernel) == ("550.163.01", 550, "amd64")


@pytest.mark.parametrize("source", ["nvidia", "distribution"])
def test_modules_for_a_kernel_of_ones_own_are_built_with_its_headers(source: str) -> None:
    """Also where the distribution has precompiled ones, which are for its own kernels."""
    offer = replace(SELF_BUILT, versions={"libnvidia-compute-580-server": ["580.126.20-0ubuntu1"]})
    lock = locking.resolve(make_site("a100-pcie-80gb", 4, source=source, branch=580), "gpu", TODAY, offer)
    assert (lock.kernel, lock.build, lock.driver) == ("own", "dkms", "580.126.20")
    theirs = locking.resolve(make_site("a100-pcie-80gb", 4), "gpu", TODAY, replace(UBUNTU, headers=True))
    assert theirs.kernel == "generic"


def test_modules_that_do_not_build_are_not_chosen() -> None:
    versions = {"libcuda1": ["550.163.01-2"]}
    offer = locking.Offer("g1", "debian 13", "6.12.118+deb13-amd64", versions)
    site = make_site("a100-pcie-80gb", 4, source="distribution")
    assert locking.resolve(site, "gpu", TODAY, offer).modules == "proprietary"
    with pytest.raises(
        locking.Unresolvable, match=r"open modules of 550\.163\.01 do not build with kernel 6\.12\.118"
    ):
        locking.resolve(
            make_site("a100-pcie-80gb", 4, source="distribution", modules="open"), "gpu", TODAY, offer
        )


@pytest.mark.parametrize(
    ("site", "offer", "why"),
    [
        (make_site(source="distribution"), UBUNTU, "offer no driver"),
        (
            make_site(source="distribution"),
            locking.Offer("g1", "debian 13", "6.12.57+deb13-amd64", {"libcuda1": ["550.163.01-2"]}),
            "fabric-manager, nscq: not in source distribution on debian 13; take `source: nvidia`",
        ),
        (
            make_site("b200-sxm", source="distribution"),
            locking.Offer("g1", "debian 13", "6.12.57+deb13-amd64", {"libcuda1": ["550.163.01-2"]}),
            "whose branch does not drive b200-sxm",
        ),
        (make_site(), replace(SELF_BUILT, headers=False), r"has no headers: .* Boot one of .*/limits\.json"),
        (make_site(build="precompiled"), SELF_BUILT, r"no precompiled modules for kernel 6\.18\.0-custom"),
        (make_site(), locking.Offer("g1", "plan9 4", "4", {}), "no packages of NVIDIA's are known"),
        (make_site(source="distribution"), ROCKY, "no driver of its own"),
        (make_site(), locking.Offer("g1", "rocky 10", "6.12.0-55.el10.x86_64", {}), "checksum of CDF6BA43.pub"),
        (make_site(), locking.Offer("g1", "ubuntu 26.04", "7.0.0-14-generic", {}), "checksum of cuda-keyring_1"),
        (make_site(build="precompiled"), UBUNTU, "no precompiled open modules"),
        (make_site(also=["gdrcopy"]), ROCKY, "gdrcopy: not in source"),
    ],
)  # fmt: skip
def test_where_there_is_no_set_it_says_why(site: Site, offer: locking.Offer, why: str) -> None:
    with pytest.raises(locking.Unresolvable, match=why):
        locking.resolve(site, "gpu", TODAY, offer)


@pytest.mark.parametrize(
    ("version", "driver"),
    [
        ("550.163.01-2", "550.163.01"),
        ("3:580.126.20-1.el9", "580.126.20"),
        ("580.95.05-0ubuntu0.24.04.3", "580.95.05"),
        ("575.64-1", "575.64"),
        ("20240109+1", None),
        ("1.2.2", None),
        ("", None),
    ],
)
def test_the_drivers_number_in_a_packages_version(version: str, driver: str | None) -> None:
    assert locking.upstream(version) == driver


def test_what_package_managers_offer() -> None:
    text = (
        " libcuda1 | 550.163.01-2 | http://m.example.org trixie/non-free amd64 Packages\n"
        "nvidia-smi | 1 |\n|\nlibcuda1 | 535.1-1 |\n"
    )
    assert parse_offer(text) == {"libcuda1": ["550.163.01-2", "535.1-1"], "nvidia-smi": ["1"]}


@given(st.text())
def test_offers_take_any_text(text: str) -> None:
    assert all(versions for versions in parse_offer(text).values())


# The lock file


def changed(**keys: Any) -> list[str]:
    site = make_site()
    entry = locking.resolve(site, "gpu", TODAY, UBUNTU)
    return locking.lock_problems(site, Lock(nvidia={"gpu": entry.model_copy(update=keys)}))


def test_a_lock_that_fits() -> None:
    assert changed() == []


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"fabric_manager": "580.95.05"}, "fabric manager 580.95.05 and driver 580.126.20 must be of one patch level"),
        ({"fabric_manager": None}, "fabric manager None and driver"),
        ({"driver": "570.195.03"}, "driver 570.195.03 is not of branch 580"),
        ({"source": "distribution"}, "source is distribution in the lock, nvidia in the site file"),
        ({"gpus": "4 x h100-sxm"}, "gpus is 4 x h100-sxm in the lock, 8 x h100-sxm in the site file"),
        ({"cuda": "12.8"}, "cuda is 12.8 in the lock, None in the site file"),
    ],
)  # fmt: skip
def test_a_lock_that_does_not(keys: dict[str, Any], why: str) -> None:
    assert any(why in found for found in changed(**keys))


def test_a_group_without_a_set() -> None:
    assert locking.lock_problems(make_site(), Lock()) == ["group gpu has no set yet"]


# The data


def test_rules_name_only_what_there_is() -> None:
    known, models = rules(), {model.name for model in all_models()}
    assert set(known.switched) | set(known.multi_node) | set(known.needs) <= models
    assert {model.architecture for model in all_models()} <= set(known.architectures)
    for branch, entry in known.branches.items():
        assert number(entry.driver)[0] == branch
        assert entry.cuda in known.cuda.carried_by


@pytest.mark.parametrize("on", nvidia_distributions())
def test_every_source_has_a_driver_and_modules_for_every_branch(on: str) -> None:
    for source, origin in nvidia_packages(on).sources.items():
        for branch in rules().branches:
            items = origin.items(branch)
            assert items["driver"].version == "{driver}-*", (on, source)
            assert any(name.startswith("modules.open.") for name in items)
            assert any(name.startswith("modules.proprietary.") for name in items)


@pytest.mark.parametrize(
    ("on", "branch", "names"),
    [  # as the files in NVIDIA's repositories are called
        ("ubuntu 24.04", 570, "nvidia-fabricmanager-{branch} libnvidia-nscq-{branch} nvidia-imex-{branch}"),
        ("ubuntu 24.04", 580, "nvidia-fabricmanager libnvidia-nscq nvidia-imex"),
        ("ubuntu 26.04", 595, "nvidia-fabricmanager libnvidia-nscq nvidia-imex"),
        ("rocky 9", 570, "nvidia-fabric-manager libnvidia-nscq-{branch} nvidia-imex-{branch}"),
        ("rhel 10", 580, "nvidia-fabricmanager libnvidia-nscq nvidia-imex"),
    ],
)
def test_what_belongs_to_switches_is_called_otherwise_from_branch_580_on(
    on: str, branch: int, names: str
) -> None:
    items = nvidia_packages(on).sources["nvidia"].items(branch)
    assert [items[name].packages[0] for name in ("fabric-manager", "nscq", "imex")] == names.split()
    assert items["driver"].packages[0].endswith("{branch}") == (on.startswith("ubuntu") and branch < 590)


@pytest.mark.parametrize(
    ("on", "release", "flavour"),
    [
        ("ubuntu 24.04", "6.8.0-90-generic", "generic"),
        ("ubuntu 24.04", "6.14.0-37-generic", "generic-hwe-24.04"),
        ("ubuntu 24.04", "6.8.0-1014-nvidia", "nvidia"),
        ("ubuntu 22.04", "6.8.0-60-generic", "generic-hwe-22.04"),
        ("debian 12", "6.1.0-18-cloud-amd64", "cloud-amd64"),
        ("debian 13", "6.12.57+deb13-amd64", "amd64"),
        ("rocky 9", "5.14.0-570.el9_6.x86_64", "x86_64"),
        ("debian 13", "6.18.44-custom", None),
    ],
)
def test_the_flavour_of_a_kernel(on: str, release: str, flavour: str | None) -> None:
    assert nvidia_packages(on).kernel.flavour_of(release) == flavour


def test_no_placeholder_is_left_in_a_set() -> None:
    site = make_site("b200-sxm", cuda="13.0", compat="13.0", nccl="2.28.9", also=["dcgm", "gdrcopy"])
    chosen = Chosen.of(locking.resolve(site, "gpu", TODAY, UBUNTU))
    wanted = {**chosen.driver.wanted, **chosen.software.wanted}
    assert not [text for pair in wanted.items() for text in pair if "{" in text]
    assert set(chosen.driver.wanted).isdisjoint(chosen.software.wanted)
