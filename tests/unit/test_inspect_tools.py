"""DCGM's tables, NCCL's logs and Slurm's answers in the forms of their versions."""

from __future__ import annotations

import json

import pytest

from provision.components.slurm import lint
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN, WARN
from provision.inspect.judge import inspect
from tests.unit.test_inspect import DIAG, NCCL, bad, found, overall

BORDER = "+---------------------------+------------------------------------------------+\n"


def diag(*rows: tuple[str, str], end: str = BORDER) -> str:
    head = f"{BORDER}| Diagnostic                | Result                                         |\n"
    return head + BORDER.replace("-", "=") + "".join(f"| {a:<25} | {b:<46} |\n" for a, b in rows) + end


def verdicts(text: str, check: str) -> set[tuple[str, str]]:
    return {(each.verdict, each.subject) for each in found(text) if each.check == check}


def test_a_row_a_gpu_of_version_4_is_judged_by_itself() -> None:
    rows = [
        ("memory", "Pass"),
        ("", "GPU0: Pass"),
        ("", "GPU1: Pass"),
        ("pcie", "Fail"),
        ("", "GPU0: Pass"),
        ("", "GPU1: Fail"),
        ("Warning: GPU1", "Error using CUDA API cudaMalloc"),
    ]
    (told,) = [each for each in found(diag(*rows)) if each.verdict == FAIL]
    assert (told.subject, told.read, told.why) == ("GPU 1", "pcie: Fail", "Error using CUDA API cudaMalloc")
    assert verdicts(diag(*rows[:3]), "dcgm-diag") == {(PASS, "GPU 0"), (PASS, "GPU 1")}


def test_gpus_that_passed_beside_one_that_failed_are_no_remark_of_version_3() -> None:
    rows = [
        ("GPU Memory", "Fail - GPU: 1"),
        ("", "Pass - GPUs: 0, 2"),
        ("Warning", "GPU 1: Unable to allocate"),
        ("", "memory"),
    ]
    (told,) = [each for each in found(diag(*rows)) if each.verdict == FAIL]
    assert (told.subject, told.why) == ("GPU 1", "GPU 1: Unable to allocate memory")
    assert verdicts(diag(*rows), "dcgm-diag") == {(FAIL, "GPU 1"), (PASS, "GPU 0"), (PASS, "GPU 2")}


def test_what_a_test_measured_is_nothing_against_it() -> None:
    rows = [
        ("PCIe", "Pass - All"),
        ("Info", "GPU 0 GPU to Host bandwidth:  14.26 GB/s, GPU"),
        ("", "0 Host to GPU bandwidth:  8.66 GB/s"),
        ("GPU Memory", "Pass - All"),
        ("Info", "GPU 0 Allocated 83892938283 bytes (98.4%)"),
        ("Info", "GPU 1 Allocated 83892938283 bytes (98.4%)"),
    ]
    assert bad(diag(*rows)) == []


def test_a_test_that_passed_with_a_remark_is_not_well() -> None:
    told = json.loads(DIAG)
    (result,) = told["DCGM Diagnostic"]["test_categories"][1]["tests"][0]["results"]
    result["warnings"] = [{"error_id": 26, "warning": "Couldn't allocate at least 75.0% of GPU memory"}]
    assert bad(json.dumps(told)) == [(WARN, "dcgm-diag")]


def test_a_summary_that_is_worse_than_all_its_results_counts() -> None:
    told = json.loads(DIAG)
    test = told["DCGM Diagnostic"]["test_categories"][0]["tests"][0]
    test["test_summary"] = {"status": "Fail", "warnings": [{"error_id": 1, "warning": "host engine"}]}
    assert bad(json.dumps(told)) == [(FAIL, "dcgm-diag")]


def test_nccls_newer_lines_with_a_moment_are_read() -> None:
    line = "[2025-08-12 10:11:12] gpu-1:33:33 [0] init.cc:1772 NCCL WARN Cuda failure 'driver is too old'\n"
    (told,) = found(line)
    assert (told.verdict, told.subject) == (FAIL, "gpu-1")
    assert "driver is too old" in str(told.read)


def test_the_network_that_several_nodes_went_by_is_judged_beside_their_results() -> None:
    log = "gpu-7:33:33 [0] NCCL INFO Using network Socket\n"
    several = NCCL.replace("Pid  101 on gpu-7", "Pid  101 on gpu-8")
    assert (WARN, "nccl-transport") in bad(several + log)
    assert "nccl-transport" not in {check for _, check in bad(NCCL + log)}  # one node needs none


SINFO = (
    "PARTITION AVAIL  TIMELIMIT  NODES  STATE NODELIST\n"
    "train*       up   infinite      1  {:>5} gpu-9\n"
    "train*       up   infinite      2   idle gpu-[1-2]\n"
    "empty        up   infinite      0    n/a\n"
)
SINFO_N = "NODELIST   NODES PARTITION STATE\ngpu-1          1    train* idle\ngpu-9          1    train* {}\n"
SINFO_LONG = (
    "NODELIST   NODES PARTITION       STATE CPUS    S:C:T MEMORY TMP_DISK WEIGHT AVAIL_FE REASON\n"
    "gpu-1          1    train*        idle 192     2:48:2 204796        0      1     h100 none\n"
    "gpu-9          1    train*       {} 192     2:48:2 204796        0      1     h100 gres/gpu count repor\n"
)


@pytest.mark.parametrize("form", [SINFO, SINFO_N, SINFO_LONG])
def test_sinfo_is_read_in_all_its_forms(form: str) -> None:
    assert overall(form.format("mix")) == PASS
    (told,) = [each for each in found(form.format("down*")) if each.verdict == FAIL]
    assert told.subject == "gpu-9"
    (told,) = [each for each in found(form.format("drain")) if each.verdict == WARN]
    assert told.subject == "gpu-9"


def test_reasons_of_sinfo_are_told_with_their_cause() -> None:
    text = (
        "REASON               USER      TIMESTAMP           NODELIST\n"
        "Not responding       slurm     2025-03-04T08:12:38 gpu-9\n"
        "bad cable            alice     2025-03-03T08:12:38 gpu-[3,7]\n"
    )
    assert {(each.verdict, each.check, each.subject) for each in found(text)} == {
        (FAIL, "slurm-not-responding", "gpu-9"),
        (WARN, "scheduler", "gpu-[3,7]"),
    }


def test_a_node_of_scontrol_that_is_cut_off_is_not_taken_for_a_line_of_slurm_conf() -> None:
    text = (
        "NodeName=gpu-1 Arch=x86_64 CoresPerSocket=48\n   CPUAlloc=0 CPUEfctv=192 CPUTot=192 CPULoad=0.15\n"
    )
    assert overall(text) == UNKNOWN
    assert overall(text + "   State=IDLE ThreadsPerCore=2\n") == UNKNOWN
    assert overall(text + "   State=IDLE ThreadsPerCore=2\n   CfgTRES=cpu=192,gres/gpu=8\n") == PASS


CONF = (
    "ClusterName=atlas\nGresTypes=gpu\n"
    "NodeName=gpu-[1-2] CPUs=192 Boards=1 SocketsPerBoard=2 CoresPerSocket=48 ThreadsPerCore=2\n"
    "PartitionName=train Nodes=gpu-[1-2]\n"
)


def test_boards_count_and_partitions_have_nodes_that_exist() -> None:
    assert bad(CONF) == []
    assert bad(CONF.replace("CPUs=192", "CPUs=190")) == [(FAIL, "slurm-conf")]
    (mistake,) = lint.partition_mistakes(CONF.replace("Nodes=gpu-[1-2]", "Nodes=gpu-[1-3]"))
    assert str(mistake) == "slurm.conf:4: no NodeName line for gpu-3"
    assert lint.partition_mistakes(CONF.replace("Nodes=gpu-[1-2]", "Nodes=ALL")) == []
    assert lint.partition_mistakes("Include nodes.conf\nNodeName=gpu-1\nPartitionName=x Nodes=gpu-2\n") == []
    nodeset = CONF + "NodeSet=all Nodes=gpu-[1-2]\nPartitionName=y Nodes=all\n"
    assert lint.partition_mistakes(nodeset) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("NodeName=gpu-1 Name=gpu File=/dev/nvidia[0-7] Count=4", "Count=4 and 8 device files"),
        ("NodeName=gpu-1 Name=gpu Typ=h100 File=/dev/nvidia[0-7]", "does not know the key typ"),
    ],
)
def test_lines_of_gres_conf_that_slurmd_refuses_are_named(line: str, words: str) -> None:
    (mistake,) = lint.gres_mistakes(line + "\n")
    assert words in mistake.message
    assert (
        lint.gres_mistakes("NodeName=gpu-1 Name=gpu Type=h100 File=/dev/nvidia[0-7] Count=8 Cores=0-7\n")
        == []
    )


@pytest.mark.parametrize(
    ("line", "check", "subject"),
    [
        (
            "fatal: can't stat gres.conf file /dev/nvidia7: No such file or directory",
            "slurm-gres-device",
            "Slurm",
        ),
        ("error: Node gpu-1 has low real_memory size (2047000 < 2047961)", "slurm-memory-low", "gpu-1"),
    ],
)
def test_slurms_log_is_told_with_its_cause(line: str, check: str, subject: str) -> None:
    (told,) = found(f"[2024-03-04T09:00:00.123] {line}\n")
    assert (told.verdict, told.check, told.subject) == (FAIL, check, subject)


def test_skips_of_version_4_stay_skips() -> None:
    rows = [("software", "Pass"), ("nvbandwidth", "Skip"), ("", "GPU0: Skip")]
    assert (SKIP, "GPU 0") in verdicts(diag(*rows), "dcgm-diag")
    assert overall(diag(*rows)) == UNKNOWN


def test_a_card_that_does_not_answer_on_the_bus_is_told() -> None:
    card = "{}:00.0 3D controller [0302]: NVIDIA Corporation GH100 [H100 SXM5 80GB] [10de:2330] (rev {})\n"
    (told,) = [
        each for each in found(card.format("1c", "a1") + card.format("3b", "ff")) if each.verdict == FAIL
    ]
    assert (told.check, told.subject, told.action) == ("off-bus", "3b:00.0", "reboot")


@pytest.mark.parametrize(
    ("text", "expect"),
    [
        (diag(("memory", "Warn"), ("pcie", "Pass")), {}),
        ("ClusterName=a\nProctrackType=proctrack/linuxproc\nNodeName=n1 CPUs=4\n", {}),
        ("ClusterName=a\nGresTypes=gpu\nTaskPlugin=task/none\nNodeName=n1 CPUs=4 Gres=gpu:1\n", {}),
        ("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-3\nGPU1\tNV18\t X \t0-3\n", {"gpus": 4}),
    ],
)
def test_what_is_wrong_comes_with_what_to_do(text: str, expect: dict[str, int]) -> None:
    (judged,) = inspect([("x", text)], expect)
    wrong = [one for one in judged.findings if one.verdict in (WARN, FAIL)]
    assert wrong
    assert [one.line() for one in wrong if not (one.action and one.advice)] == []
