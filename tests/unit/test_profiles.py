"""Data that differs by distribution: which profile a system has, and how its packages are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.engine.remote import local_shell
from provision.health import limits
from provision.profiles import UnsupportedDistribution, of_os_release
from provision.profiles.distribution import parse_os_release
from provision.profiles.gpu import all_models, gpu_model, measured_models, pci_model
from provision.profiles.packaging import MANAGERS, parse_dpkg

# OS-05, TLS-07
STATES = """dkms-of-a-driver install ok half-configured 550-1
driver install ok unpacked 550-1
driver-tools install ok installed 1.0-1
old-daemon deinstall ok config-files 0.9-1
driver-library hold ok installed 1.0-1
torn install reinstreq half-installed 1.0-1
never unknown ok not-installed
"""


def test_os_release() -> None:
    text = """
NAME="Some Linux"
# VERSION_ID=3
ID=debian
VERSION_ID="13"
BROKEN="x
HOME_URL='https://a b'
"""
    assert parse_os_release(text) == {
        "NAME": "Some Linux",
        "ID": "debian",
        "VERSION_ID": "13",
        "HOME_URL": "https://a b",
    }


@given(st.text())
def test_os_release_takes_any_text(text: str) -> None:
    assert all(isinstance(value, str) for value in parse_os_release(text).values())


def test_a_system_is_known_by_its_os_release_and_of_enterprise_linux_only_the_major_number_counts() -> None:
    assert of_os_release('ID=debian\nVERSION_ID="13"\n').key == "debian 13"
    assert of_os_release('ID="rocky"\nVERSION_ID="9.4"\n').key == "rocky 9"
    with pytest.raises(
        UnsupportedDistribution, match=r"plan9 \? is not supported; supported are: .*debian 13"
    ):
        of_os_release("ID=plan9\n")


@pytest.mark.parametrize("release", ["ubuntu 26.04", "rhel 10.1", "almalinux 10.0", "rocky 10.1"])
def test_what_no_source_was_found_for_is_not_guessed(release: str) -> None:
    identity, version = release.split()
    found = of_os_release(f"ID={identity}\nVERSION_ID={version}\n")
    assert found.packages("ssh") == ["openssh-server"]
    if found.family == "redhat":
        with pytest.raises(UnsupportedDistribution, match="no packages known for slurm-node "):
            found.packages("slurm-node")
        assert found.packages("slurm-node.repository") == ["slurm-slurmd", "slurm"]
    else:
        assert found.unit("slurm-login") in found.packages("slurm-login")


@pytest.mark.parametrize("purpose", ["slurm-login", "slurm-login.repository"])
def test_a_login_nodes_daemon_comes_with_its_packages_from_either_source(purpose: str) -> None:
    debian = of_os_release('ID=debian\nVERSION_ID="13"\n')
    assert any(name.endswith(debian.unit("slurm-login")) for name in debian.packages(purpose))


def test_installed_means_whole_whatever_is_wanted() -> None:
    assert MANAGERS["debian"].installed(STATES) == {"driver-tools", "driver-library"}
    assert MANAGERS["redhat"].installed("bash\nmunge\n") == {"bash", "munge"}


def test_half_way_packages_are_broken_and_removed_ones_are_not() -> None:
    broken = {package.name: package.state for package in parse_dpkg(STATES) if package.broken}
    assert broken == {"dkms-of-a-driver": "half-configured", "driver": "unpacked", "torn": "half-installed"}


def test_a_line_that_dpkg_would_not_print_is_an_error() -> None:
    with pytest.raises(ValueError, match="dpkg-query: no packages found"):
        parse_dpkg("dpkg-query: no packages found matching x\n")


WORD = st.text(st.characters(exclude_categories=("Z", "C")), min_size=1)


@given(st.lists(st.lists(WORD, min_size=4, max_size=5)))
def test_any_listing_of_that_form_is_read(rows: list[list[str]]) -> None:
    found = parse_dpkg("".join(" ".join(words) + "\n" for words in rows))
    assert [(package.name, package.state) for package in found] == [(words[0], words[3]) for words in rows]


@given(st.lists(WORD, min_size=1).filter(lambda words: len(words) not in (4, 5)))
def test_a_line_of_another_form_is_refused_with_its_text(words: list[str]) -> None:
    with pytest.raises(ValueError, match="not a line of dpkg-query"):
        parse_dpkg(" ".join(words))


@pytest.mark.parametrize("family", sorted(MANAGERS))
def test_shell_text_of_package_managers_is_shell(family: str) -> None:
    manager = MANAGERS[family]
    shell = local_shell()
    try:
        for text in (manager.install(["a b"]), manager.remove(["c"]), manager.whole, manager.make_whole):
            output = shell.run(f"sh -n <<'EOF'\n{text}\nEOF")
            assert (output.rc, output.stderr) == (0, ""), text
    finally:
        shell.close()


def test_what_keeps_packages_from_being_installed_is_completed_and_nothing_is_removed_for_it() -> None:
    """A package that a hand removed by force is missing to others: apt then refuses all else."""
    script = MANAGERS["debian"].install(["munge"])
    assert "get || { update && whole && get; }" in script
    assert "apt --fix-broken --no-remove install" in script


def test_nvlinks_are_what_the_node_agent_expects_without_a_bridge() -> None:
    links = {model.name: (model.nvlinks, model.nvlink_gbs) for model in all_models()}
    assert links["h200-sxm"] == (18, 26.562)
    assert links["b300-sxm"] == (18, 53.125)
    assert links["h100-nvl"] == links["l40s"] == (0, None)  # by a bridge at most; not at all
    agents = limits.load().models
    named = {product: model.name for model in all_models() for product in model.products if product in agents}
    assert named == {product: agents[product].model for product in named}, "one name in both files"


def test_a_gpu_is_known_by_its_pci_id_before_any_driver_is_there() -> None:
    found = pci_model(0x2330)
    assert found is not None
    assert (found.name, found.nvlinks, found.nvlink_gbs) == ("h100-sxm", 18, 26.562)
    assert pci_model(0x1234) is None
    assert gpu_model("h100-sxm") is found


def test_no_two_models_share_a_product_or_a_pci_id() -> None:
    for key in ("products", "pci"):
        named = [value for profile in all_models() for value in getattr(profile, key)]
        assert len(named) == len(set(named))
    assert "t4" not in measured_models()


def test_slices_of_a_gpu_fit_into_its_memory() -> None:
    for profile in all_models():
        for kind, count in profile.mig.items():
            assert count * int(kind.partition(".")[2].removesuffix("gb")) << 10 <= profile.memory * 1.1, kind
