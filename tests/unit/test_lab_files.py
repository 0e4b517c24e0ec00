"""The files that the lab puts on its nodes, its layers, and what it remembers."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.lab import files, layers, state
from provision.lab.command import InputError
from provision.lab.faults import FAULTS, XIDS, kernel_line
from provision.lab.host import Mirror
from provision.lab.lab import Lab
from provision.lab.network import hardware_address
from provision.lab.state import Node, Spec, plan_nodes


@given(workers=st.integers(0, state.MAX_WORKERS), gpus=st.integers(0, 16))
def test_every_node_has_a_name_and_addresses_of_its_own(workers: int, gpus: int) -> None:
    nodes = plan_nodes(workers, gpus)
    assert len(nodes) == workers + 1
    for part in ("name", "number", "address", "address6"):
        assert len({getattr(node, part) for node in nodes}) == len(nodes)
    assert len({hardware_address(node) for node in nodes}) == len(nodes)
    assert all(len(hardware_address(node)) == len("02:77:00:00:00:0a") for node in nodes)


def test_the_addresses_that_inventories_rely_on() -> None:
    head, first, second = plan_nodes(2, 2)
    assert (head.name, head.address, head.gpus) == ("lab-head", "10.77.0.10", 0)
    assert (first.name, first.address, first.address6) == ("lab-gpu-1", "10.77.0.11", "fd77::11")
    assert (second.name, second.address) == ("lab-gpu-2", "10.77.0.12")


@pytest.mark.parametrize(("workers", "gpus"), [(-1, 2), (201, 2), (2, -1), (2, 17)])
def test_sizes_that_cannot_be_are_refused(workers: int, gpus: int) -> None:
    with pytest.raises(InputError, match="expected 0 to"):
        plan_nodes(workers, gpus)


def test_a_spec_survives_its_file() -> None:
    nodes = tuple(replace(node, layers=("base-1", "lab-1")) for node in plan_nodes(3, 1))
    spec = Spec("trixie", "http://mirror.example/debian", None, ("base",), nodes)
    assert state.decode(json.loads(json.dumps(asdict(spec)))) == spec


def test_ssh_config_leads_through_the_lab_namespace_and_checks_host_keys(tmp_path: Path) -> None:
    text = files.ssh_config("plab-1", tmp_path / "key", tmp_path / "known", plan_nodes(1, 0))
    assert "Host lab-gpu-1\n    HostName 10.77.0.11\n" in text
    assert "    ProxyCommand nsenter --net=/run/netns/plab-1 nc -F %h %p\n    ProxyUseFdpass yes\n" in text
    assert "    StrictHostKeyChecking yes\n" in text
    assert f"    IdentityFile {tmp_path / 'key'}\n" in text


def test_known_hosts_names_the_node_and_both_addresses() -> None:
    node = plan_nodes(1, 0)[1]
    assert files.known_hosts({node.name: (node, "ssh-ed25519 AAAA comment\n")}) == (
        "lab-gpu-1,10.77.0.11,fd77::11 ssh-ed25519 AAAA\n"
    )


def test_limits_are_declared_and_exactly_their_units_are_masked() -> None:
    limits = files.load_limits(0)
    declared = json.loads(files.limits_json(limits))
    assert {"what": "clock", "reason": next(x.reason for x in limits if x.id == "clock")} in declared[
        "limits"
    ]
    assert declared["kernel_messages"] == "/var/log/kmsg"
    assert len({limit.id for limit in limits}) == len(limits)
    masked = {path for path, target in files.shared_links(limits).items() if target == "/dev/null"}
    assert masked == {f"etc/systemd/system/{x.what[5:]}" for x in limits if x.what.startswith("unit:")}


def test_limits_of_a_machine_hold_only_where_it_lacks_the_capability() -> None:
    everything, nothing = files.load_limits(~0), files.load_limits(0)
    assert {x.id for x in nothing} - {x.id for x in everything} == {x.id for x in nothing if x.without}
    assert "rlimit:memlock" in {x.what for x in files.load_limits(~(1 << 24))}


def test_slurmd_gets_the_preload_only_where_cgroups_are_hybrid() -> None:
    drop_in = "etc/systemd/system/slurmd.service.d/zz-lab.conf"
    assert "LD_PRELOAD" in str(files.shared_files((), True)[drop_in].content)
    assert "LD_PRELOAD" not in str(files.shared_files((), False)[drop_in].content)


def test_apt_sources_of_a_node_have_security_only_where_there_is_an_archive() -> None:
    text = files.apt_sources(
        Mirror("http://m.example/debian", "http://m.example/sec"), "trixie", ["main", "contrib"]
    )
    assert "URIs: http://m.example/debian\nSuites: trixie trixie-updates\nComponents: main contrib\n" in text
    assert "URIs: http://m.example/sec\nSuites: trixie-security\n" in text
    assert "security" not in files.apt_sources(Mirror("http://m.example/debian"), "trixie", ["main"])


def test_folders_of_a_node_look_like_those_of_the_layer_below(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    (lower / "home/ops").mkdir(parents=True)
    (lower / "home/ops").chmod(0o750)
    (lower / "home/ops/.ssh").mkdir(mode=0o700)
    upper.mkdir()
    own = (lower.stat().st_uid, lower.stat().st_gid)
    files.place(upper, [lower], {"home/ops/.ssh/authorized_keys": files.File("key\n", 0o600, own)})
    assert (upper / "home/ops").stat().st_mode & 0o7777 == 0o750
    assert (upper / "home/ops/.ssh").stat().st_mode & 0o7777 == 0o700
    assert (upper / "home/ops/.ssh/authorized_keys").stat().st_mode & 0o7777 == 0o600
    assert (upper / "home/ops/.ssh/authorized_keys").read_text() == "key\n"


def test_a_layer_is_made_anew_when_what_it_consists_of_or_lies_on_changes() -> None:
    recipe = layers.load_recipe()
    stack = recipe.stack("worker")
    names = layers.folder_names(recipe, stack)
    assert names == layers.folder_names(recipe, stack)
    assert [name.rpartition("-")[0] for name in names] == [layer.name for layer in stack]
    changed = (replace(stack[0], packages=(*stack[0].packages, "tree")), *stack[1:])
    assert not set(names) & set(layers.folder_names(recipe, changed))
    last = (*stack[:-1], replace(stack[-1], packages=("tree",)))
    assert layers.folder_names(recipe, last)[:-1] == names[:-1]
    assert layers.folder_names(replace(recipe, suite="forky"), stack)[0] != names[0]


def test_head_and_workers_share_their_lowest_layers() -> None:
    recipe = layers.load_recipe()
    head, worker = (layers.folder_names(recipe, recipe.stack(role)) for role in ("head", "worker"))
    assert head[:2] == worker[:2]
    assert head[2] != worker[2]


def test_an_unknown_layer_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="--layers slrum: no such layer; there are base, software"):
        layers.load_recipe().select(["base", "slrum"])
    assert [x.name for x in layers.load_recipe().select(["torch"]).layers] == ["base", "torch"]


def test_what_packages_enabled_is_taken_back_and_masks_stay(tmp_path: Path) -> None:
    folder = tmp_path / "etc/systemd/system"
    (folder / "multi-user.target.wants").mkdir(parents=True)
    (folder / "multi-user.target.wants/munge.service").symlink_to("/usr/lib/systemd/system/munge.service")
    (folder / "chronyd.service").symlink_to("/usr/lib/systemd/system/chrony.service")
    (folder / "x.service").symlink_to("/dev/null")
    (folder / "own.service").write_text("[Unit]\n")
    assert layers.disable_units(tmp_path) == ["chronyd.service", "multi-user.target.wants/munge.service"]
    assert (folder / "x.service").is_symlink()
    assert (folder / "own.service").exists()


def test_a_file_is_written_whole_with_its_mode(tmp_path: Path) -> None:
    target = tmp_path / "a/b"
    own = (tmp_path.stat().st_uid, tmp_path.stat().st_gid)
    state.write_file(target, "secret", 0o600, own)
    assert target.read_text() == "secret"
    assert target.stat().st_mode & 0o7777 == 0o600
    assert list(target.parent.iterdir()) == [target]


def test_a_lab_cannot_live_where_overlays_cannot_be_mounted(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="blanks, colons"):
        state.Paths(tmp_path / "a b")


def test_two_state_folders_are_two_labs(tmp_path: Path) -> None:
    assert state.Paths(tmp_path / "a").id == state.Paths(tmp_path / "a").id
    assert state.Paths(tmp_path / "a").id != state.Paths(tmp_path / "b").id


@given(xid=st.sampled_from(sorted(XIDS)), gpu=st.integers(0, 15))
def test_an_xid_line_is_a_kernel_record(xid: int, gpu: int) -> None:
    head, _, text = kernel_line(1000, 5, xid, gpu).partition(";")
    assert head == "3,1000,5,-"
    assert text.startswith(f"NVRM: Xid (PCI:0000:{11 + gpu:02x}:00): {xid}, ")
    assert text.endswith("\n")


def test_every_fault_says_what_it_does_and_takes_plain_options() -> None:
    plain = {"by", "count", "gpu", "link", "message", "package", "path", "seconds", "times", "unit", "xid"}
    for fault in FAULTS.values():
        assert fault.doc
        assert set(fault.options) <= plain


def test_what_was_done_to_a_node_is_told_with_the_way_back() -> None:
    assert FAULTS["unplug"].told("n1") == (
        "n1: the node's network cable is pulled; take it back: provision lab fault unplug n1 --undo"
    )
    assert FAULTS["fill-disk"].told("n1").startswith("n1: the file system at /var/log is full (")
    assert FAULTS["fill-disk"].told("n1", path="/home").startswith("n1: the file system at /home is full (")
    assert FAULTS["gpu-nvlink-down"].told("n1", link=3).startswith("n1: the NVLink 3 of GPU 0 is inactive; ")
    assert FAULTS["xid"].told("n1") == (
        "n1: the kernel reports NVIDIA error 79 on GPU 0 (stays until the next boot)"
    )
    for fault in FAULTS.values():
        assert "--" not in fault.told("n1", path="/x").removesuffix("--undo")


def test_faults_that_are_misspelt_or_lack_an_option_are_refused(tmp_path: Path) -> None:
    lab = Lab(tmp_path / "lab")
    with pytest.raises(InputError, match=r"unplugg: no such fault; did you mean unplug\?"):
        lab.fault("unplugg", "lab-gpu-1")
    with pytest.raises(InputError, match=r"there is none: run `provision lab up`"):
        lab.fault("unplug", "lab-gpu-1")
    state.save(lab.paths, Spec("trixie", "http://d", None, (), plan_nodes(2, 0)))
    with pytest.raises(InputError, match=r"lab-gpu1: no such node .*; did you mean lab-gpu-1\?"):
        lab.fault("unplug", "lab-gpu1")
    with pytest.raises(InputError, match=r"edit: needs --path"):
        lab.fault("edit", "lab-gpu-1")


def test_a_node_is_a_value() -> None:
    assert Node("n", "worker", 11, 2, ()) == Node("n", "worker", 11, 2, ())
