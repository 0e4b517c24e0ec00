"""What is read from NCCL's own log: transports, NVLS, channels, algorithms."""

from hypothesis import given
from hypothesis import strategies as st

from provision.burnin.result import Transport
from provision.burnin.workload.nccl_log import transport, unread


def read(*messages: str, rank: int = 0, ranks: int = 16) -> Transport:
    lines = [f"node-1:100:101 [0] NCCL {message}" for message in messages]
    return Transport.model_validate(transport("\n".join(lines), rank, ranks))


START = "INFO ncclCommInitRankConfig comm 0xab12 rank 0 nranks 16 cudaDev 0 nvmlDev 0 busId 60 commId 0x1 - Init START"


def test_infiniband_with_direct_access_to_gpu_memory():
    found = read(
        "INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_3:1/RoCE [RO]; OOB eth0:10.0.0.1<0>",
        "INFO Using network IB",
        START,
        "INFO NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)",
        "INFO Channel 00/0 : 8[0] -> 0[0] [receive] via NET/IB/0/GDRDMA",
        "INFO Channel 01/0 : 8[0] -> 0[0] [receive] via NET/IB/1",
        "INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA",
        "INFO Channel 02/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "INFO Channel 03/0 : 0[0] -> 1[1] via P2P/CUMEM",
        "INFO 24 coll channels, 24 collnet channels, 16 nvls channels, 32 p2p channels, 32 p2p channels per peer",
    )
    assert (found.network, found.devices, found.nvls) == ("IB", ["mlx5_0:1/IB", "mlx5_3:1/RoCE"], True)
    assert (found.collective_channels, found.nvls_channels, found.p2p_channels) == (24, 16, 32)
    ways = {(way.peer, way.direction, way.via): way.channels for way in found.connections}
    assert ways == {
        (8, "receive", "NET/IB/0/GDRDMA"): 1,
        (8, "receive", "NET/IB/1"): 1,
        (8, "send", "NET/IB/0/GDRDMA"): 1,
        (1, "send", "P2P/CUMEM"): 2,
    }
    assert found.why is None


def test_a_silent_fall_back_to_sockets_shows():
    found = read(
        "INFO NET/IB : No device found.",
        "INFO NET/IB : Using [RO]; OOB eth0:10.0.0.1<0>",
        "INFO NET/Socket : Using [0]eth0:10.0.0.1<0> [1]eth1:10.1.0.1<0>",
        "INFO Using network Socket",
        START,
        "INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/Socket/0",
    )
    assert found.network == "Socket"
    assert found.devices == ["eth0:10.0.0.1<0>", "eth1:10.1.0.1<0>"]
    assert found.connections[0].via == "NET/Socket/0"


def test_switched_off_nvls_is_off_whatever_else_the_log_says():
    assert read("INFO NCCL_NVLS_ENABLE set by environment to 0.", START).nvls is False
    assert read(START, "INFO NVLS multicast support is not available on dev 0").nvls is False
    channels = "INFO 24 coll channels, 24 collnet channels, 0 nvls channels, 32 p2p channels, 32 p2p channels per peer"
    assert read(START, channels).nvls is False
    assert read(START).nvls is None


def test_choices_are_kept_once_and_warnings_in_full():
    choice = "INFO AllReduce: 1048576 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={0..23}"
    warning = (
        "WARN NET/IB : Got completion from peer 10.0.0.2<39861> with status=12 opcode=0 len=0 vendor err 129"
    )
    found = read(START, choice, choice, warning)
    (kept,) = found.choices
    assert (kept.operation, kept.bytes, kept.algorithm, kept.protocol) == (
        "AllReduce",
        1048576,
        "RING",
        "SIMPLE",
    )
    assert kept.channels == 24
    assert found.warnings == [warning.removeprefix("WARN ")]


def test_other_communicators_of_the_process_are_left_out():
    part = (
        "INFO ncclCommSplit comm 0xcd34 rank 0 nranks 2 cudaDev 0 nvmlDev 0 busId 60 commId 0x2 - Init START"
    )
    found = read(
        START,
        "INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM",
        part,
        "INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0",
    )
    assert [way.via for way in found.connections] == ["P2P/CUMEM"]


def test_older_versions_give_channels_without_numbers_of_connections():
    found = read(
        START,
        "INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
        "INFO Ring 01 : 0[8000] -> 1[9000] via P2P/IPC",
    )
    assert [way.via for way in found.connections] == ["P2P/IPC", "SHM/direct/direct"]


def test_no_log_is_no_good_news():
    assert Transport.model_validate(unread(3, "no such file")).why == "no such file"
    silent = read()
    assert silent.why
    assert silent.network is None


@given(st.text())
def test_any_text_is_read_without_error(text: str):
    Transport.model_validate(transport(text, 0, 2))
    Transport.model_validate(transport(f"h:1:2 [0] NCCL INFO {text}", 0, 2))
