"""Where a process belongs in the job: read from what srun, torchrun or nobody put into the environment."""

import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.workload import network
from provision.burnin.workload.placement import PlacementError, read, tasks_per_node

SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "gpu-[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURMD_NODENAME": "gpu-2",
}


def expand(text: str) -> list[str]:
    return {"gpu-[1-2]": ["gpu-1", "gpu-2"]}[text]


def test_srun_says_rank_node_and_where_rank_0_waits():
    place = read(SRUN, "gpu-2.cluster", expand)
    assert (place.launcher, place.rank, place.world_size) == ("slurm", 3, 4)
    assert (place.local_rank, place.local_world_size, place.host) == (1, 2, "gpu-2")
    assert (place.master, place.port) == ("gpu-1", 24711)
    assert place.hosts == ("gpu-1", "gpu-1", "gpu-2", "gpu-2")
    assert place.nodes == ("gpu-1", "gpu-2")


def test_torchrun_wins_over_the_srun_that_started_it():
    torchrun = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "gpu-1",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "x",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    place = read({**SRUN, **torchrun}, "gpu-2", expand)
    assert (place.launcher, place.rank, place.world_size, place.local_rank) == ("torchrun", 5, 8, 1)
    assert place.agent_store
    assert place.hosts == ()  # torchrun does not tell where the others are


def test_a_batch_script_without_srun_is_a_single_process():
    batch = {name: value for name, value in SRUN.items() if name != "SLURM_STEP_ID"}
    place = read(batch, "gpu-2", expand)
    assert (place.launcher, place.world_size, place.port) == ("alone", 1, 0)


def test_what_is_missing_is_named():
    broken = {name: value for name, value in SRUN.items() if name != "SLURM_NTASKS"}
    with pytest.raises(PlacementError, match="SLURM_NTASKS is not set"):
        read(broken, "gpu-2", expand)


def test_a_number_that_is_none_is_named():
    with pytest.raises(PlacementError, match="SLURM_PROCID='x' is not a number"):
        read({**SRUN, "SLURM_PROCID": "x"}, "gpu-2", expand)


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20))
def test_tasks_per_node_reads_what_slurm_writes(counts: list[int]):
    runs: list[list[int]] = []
    for count in counts:
        if runs and runs[-1][0] == count:
            runs[-1][1] += 1
        else:
            runs.append([count, 1])
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == counts


def test_tasks_per_node_refuses_what_it_does_not_know():
    with pytest.raises(PlacementError, match="cannot read '2x3'"):
        tasks_per_node("2x3")


def test_the_loopback_is_held_by_lo():
    assert network.held_addresses()["127.0.0.1"] == "lo"


def test_the_given_address_finds_its_interface():
    held = {"172.17.0.1": "docker0", "10.0.0.5": "ens3", "fd00::5": "ens3"}
    given = {"gpu-1": "10.0.0.5", "gpu-2": "fd00:0::5"}
    assert network.cluster_address("gpu-1", ["gpu-2"], given, held) == ("10.0.0.5", "ens3")
    assert network.cluster_address("gpu-2", ["gpu-1"], given, held) == ("fd00::5", "ens3")


def test_an_address_that_no_interface_holds_is_named_with_those_that_are():
    with pytest.raises(network.NetworkError, match=r"no interface holds 10\.0\.0\.9.*ens3 10\.0\.0\.5"):
        network.cluster_address("gpu-1", [], {"gpu-1": "10.0.0.9"}, {"10.0.0.5": "ens3"})


def test_a_peer_name_that_means_this_node_is_refused():
    with pytest.raises(network.NetworkError, match=r"localhost stands for this node in /etc/hosts"):
        network.cluster_address("gpu-1", ["localhost"], {}, {"127.0.0.1": "lo"})


def test_one_node_stays_on_the_loopback():
    assert network.cluster_address("gpu-1", [], {}, {"127.0.0.1": "lo"}) == ("127.0.0.1", "lo")


# TRN-01
def test_a_name_that_does_not_resolve_here_is_named():
    with pytest.raises(network.NetworkError, match=r"gpu-1 cannot resolve gpu-1\.cluster\.invalid"):
        network.check_master("gpu-1", "gpu-1.cluster.invalid", {"10.0.0.5": "ens3"})
    with pytest.raises(
        network.NetworkError, match=r"gpu-1\.cluster\.invalid, a node of this job, has no address"
    ):
        network.cluster_address("gpu-2", ["gpu-1.cluster.invalid"], {}, {"10.0.0.6": "ens3"})
    assert "cannot resolve gpu-1.cluster.invalid" in str(network.why_closed("gpu-1.cluster.invalid", 29500))


# TRN-02
def test_rank_0_is_looked_for_at_an_address_of_its_node():
    held = {"10.50.0.11": "ens3", "127.0.0.1": "lo"}
    network.check_master("gpu-1", "10.50.0.11", held)
    network.check_master("gpu-1", "127.0.1.1", held)  # its own name, in its own /etc/hosts
    with pytest.raises(
        network.NetworkError, match=r"10\.50\.9\.1 .* is no address of gpu-1.*ens3 10\.50\.0\.11"
    ):
        network.check_master("gpu-1", "10.50.9.1", held)


# TRN-04
def test_a_closed_port_is_told_with_its_reason():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert network.why_closed("127.0.0.1", port) is None
    assert network.why_closed("127.0.0.1", port) == "Connection refused"


# NCL-01
def test_a_peer_that_is_reached_from_another_address_is_named():
    held = {"10.20.1.12": "eth0", "10.20.2.12": "eth1"}
    sources = {"10.20.1.11": "10.20.2.12", "10.20.1.13": "10.20.1.12"}
    peers = {"gpu-1": "10.20.1.11", "gpu-3": "10.20.1.13"}
    odd = network.odd_routes("10.20.1.12", peers, held, sources.__getitem__)
    assert odd == {"gpu-1": "eth1 10.20.2.12"}


def test_a_peer_without_a_way_is_told_and_ends_nothing():
    def none(peer: str) -> str:
        raise network.NetworkError(f"no way to {peer}")

    assert network.odd_routes("10.0.0.5", {"gpu-2": "10.9.9.9"}, {}, none) == {"gpu-2": "no way to 10.9.9.9"}


def test_networks_of_the_loopback_are_read_with_their_length():
    assert "127.0.0.1/8" in network.held_networks()["lo"]


def test_the_users_file_wins_over_the_systems_and_both_are_read(tmp_path: Path):
    system, own = tmp_path / "nccl.conf", tmp_path / ".nccl.conf"
    system.write_text("# by the site\nNCCL_SOCKET_IFNAME==ens2\nNCCL_IB_TC=106 # lossless\n")
    assert network.nccl_configuration({"HOME": str(tmp_path)}, system) == {
        "NCCL_SOCKET_IFNAME": "=ens2",
        "NCCL_IB_TC": "106",
    }
    own.write_text("NCCL_IB_TC=0\n")
    assert network.nccl_configuration({"HOME": str(tmp_path)}, system)["NCCL_IB_TC"] == "0"
    other = {"HOME": str(tmp_path), "NCCL_CONF_FILE": str(tmp_path / "none")}
    assert network.nccl_configuration(other, system)["NCCL_IB_TC"] == "106"
    assert network.nccl_configuration({"HOME": "/nonexistent"}, tmp_path / "none") == {}
