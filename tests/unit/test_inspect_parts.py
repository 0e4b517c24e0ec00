"""What stands around a recording does not change its judgement, and a file with several is judged by all of them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from provision.cli import verbs
from provision.health.finding import FAIL, PASS, SKIP, UNKNOWN
from provision.inspect.judge import inspect, verdict
from provision.inspect.split import parts
from provision.inspect.text import Damaged, by_host, clean, decode
from tests.unit.test_inspect import IBSTAT, LOG, NCCL, TABLE, TOPO, WELL, XML, Q, bad, found, overall

app = typer.Typer()
verbs.register(app, [])

XID = "NVRM: Xid (PCI:0000:1b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FELL = LOG + f"[    3.000000] {XID}\n"
MOST = 1 << 20


def each_line(prefix: str, text: str) -> str:
    return "".join(f"{prefix}{line}\n" for line in text.splitlines())


WRAPPED = {
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "a byte order mark": lambda text: "\ufeff" + text,
    "colours": lambda text: "\x1b[32m" + text.replace("\n", "\x1b[0m\n", 3),
    "spaces behind each line": lambda text: text.replace("\n", "   \n") + "   \n  \n",
    "srun --label": lambda text: each_line("0: ", text),
    "mpirun --tag-output": lambda text: each_line("[1,0]<stdout>:", text),
    "mpirun --timestamp-output": lambda text: each_line("Tue Mar  4 08:12:38 2025[1,0]<stdout>:", text),
    "prterun": lambda text: each_line("[prterun-gpu-1-17@1,0]<stdout>: ", text),
    "kubectl logs --timestamps": lambda text: each_line("2025-03-04T08:12:38.123456789Z ", text),
    "a container's log": lambda text: each_line("2025-03-04T08:12:38.123456789Z stdout F ", text),
    "a runtime's JSON": lambda text: "".join(
        json.dumps({"log": line, "stream": "stdout"}) + "\n" for line in text.splitlines(keepends=True)
    ),
    "a prompt": lambda text: f"root@gpu-1:~# a-command --of it\n{text}root@gpu-1:~# \n",
    "a fence": lambda text: f"It says:\n\n```\n{text}```\n\nWhy?\n",
    "a quotation": lambda text: each_line("> > ", text),
    "an indent": lambda text: each_line("    ", text),
    "clush": lambda text: each_line("gpu-1: ", text),
}


@pytest.mark.parametrize("name", ["table", "xml", "q", "nvlink", "topo", "ibstat", "diag", "nccl", "log"])
@pytest.mark.parametrize("wrapping", WRAPPED)
def test_what_stands_around_a_recording_changes_nothing(wrapping: str, name: str) -> None:
    kind, text = WELL[name]
    wrapped = WRAPPED[wrapping](text.rstrip("\n") + "\n")
    assert bad(wrapped) == []
    assert overall(wrapped) == PASS
    assert any(part.kind.startswith(kind) for part in inspect([("file", wrapped)], {})[0].parts)


@pytest.mark.parametrize("wrapping", WRAPPED)
def test_what_is_broken_is_found_in_any_wrapping(wrapping: str) -> None:
    assert (FAIL, "xid") in bad(WRAPPED[wrapping](FELL))


def test_compressed_files_and_those_of_windows_are_read() -> None:
    assert decode(gzip.compress(TABLE.encode()), MOST) == TABLE
    for encoding in ("utf-8-sig", "utf-16"):
        assert decode(TABLE.encode(encoding), MOST) == TABLE
    assert decode(b"\xff\x00", MOST) == "\ufffd\x00"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(TABLE.encode())[:-20], "cut off"),
        (gzip.compress(TABLE.encode())[:20] + b"\xff" * 40, "not a sound gzip"),
        (gzip.compress(b"\n" * (MOST + 1)), "when unpacked"),
    ],
)
def test_a_damaged_container_is_wrong_input(content: bytes, words: str) -> None:
    with pytest.raises(Damaged, match=words):
        decode(content, MOST)


def test_the_verb_refuses_a_damaged_container(tmp_path: Path) -> None:
    file = tmp_path / "smi.txt.gz"
    file.write_bytes(gzip.compress(TABLE.encode())[:-20])
    result = CliRunner().invoke(app, ["inspect", str(file)])
    assert result.exit_code == 2
    assert "copy it again" in result.output


def test_the_standard_input_is_read_as_a_file_is() -> None:
    result = CliRunner().invoke(app, ["inspect", "-"], input=gzip.compress(FELL.encode()))
    assert result.exit_code == 1
    assert "FAIL xid node 0000:1b:00.0" in result.output


SESSIONS = {
    "no prompt": TABLE + FELL + IBSTAT,
    "kernel first": FELL + TABLE,
    "prompts of a shell": f"root@gpu-1:~# nvidia-smi\n{TABLE}root@gpu-1:~# dmesg\n{FELL}",
    "prompts of another": f"[root@gpu-1 ~]# nvidia-smi\n{TABLE}[root@gpu-1 ~]# dmesg -T\n{FELL}[root@gpu-1 ~]# \n",
    "bare prompts": f"$ nvidia-smi\n{TABLE}$ dmesg\n{FELL}",
    "prompts of root": f"# nvidia-smi\n{TABLE}# dmesg -T\n{FELL}",
    "set -x": f"+ nvidia-smi\n{TABLE}+ dmesg\n{FELL}",
    "tail of several files": f"==> smi.txt <==\n{TABLE}\n==> dmesg.txt <==\n{FELL}",
    "fences": f"A node:\n```\n{TABLE}```\nand\n```text\n{FELL}```\n",
    "XML, then the kernel": XML + FELL,
    "text, then the kernel": Q + FELL,
    "a topology, then the kernel": TOPO + FELL,
}


@pytest.mark.parametrize("name", SESSIONS)
def test_every_recording_in_a_file_is_judged(name: str) -> None:
    told = found(SESSIONS[name])
    assert (FAIL, "xid") in {(each.verdict, each.check) for each in told}
    assert any(each.check in ("gpu-count", "topology") for each in told)
    assert not [each for each in told if each.check == "recording" and each.verdict not in (PASS, SKIP)]


def test_outputs_of_one_kind_in_a_row_are_not_taken_for_one() -> None:
    broken = TABLE.replace("                  0 |", "                  3 |")
    assert bad(TABLE + broken) == [(FAIL, "ecc-uncorrected")]
    assert bad(XML + XML.replace("<attached_gpus>1", "<attached_gpus>8")) == [(UNKNOWN, "gpu-count")]
    assert bad(NCCL + NCCL.replace("0 OK", "2 FAILED")) == [(FAIL, "nccl-data")]
    assert bad(NCCL.replace("352.01", "200.00") + NCCL) == [(FAIL, "nccl-bandwidth")]


def test_findings_name_the_host_where_each_line_does() -> None:
    down = IBSTAT.replace("State: Active", "State: Down").replace("LinkUp", "Polling")
    told = found(each_line("gpu-1: ", IBSTAT) + each_line("gpu-2: ", down))
    assert {(each.verdict, each.subject) for each in told if each.check == "port"} == {
        (PASS, "gpu-1 mlx5_0:1"),
        (FAIL, "gpu-2 mlx5_0:1"),
    }


def test_a_gpu_that_does_not_answer_belongs_to_the_others_above_or_below() -> None:
    lost = "Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error\n"
    for text in (lost + TABLE, TABLE + lost):
        (told,) = [each for each in found(text) if each.check == "gpu-count"]
        assert (told.verdict, told.read) == (FAIL, "1 of 2")


def test_a_line_of_the_kernel_in_a_letter_tells_of_it_and_of_nothing_else() -> None:
    assert {(FAIL, "xid"), (UNKNOWN, "recording")} == set(
        bad(f"We saw this:\n[    3.000000] {XID}\nWhat now?\n")
    )
    harmless = "[    3.000000] NVRM: Xid (PCI:0000:1b:00): 43, pid=1, name=python, Ch 00000010"
    assert overall(f"We saw this:\n{harmless}\nWhat now?\n") == UNKNOWN


@given(st.text(max_size=300))
def test_no_character_is_lost_on_the_way_to_the_parts(text: str) -> None:
    plain = clean(text)
    joined = "".join(part.text for part in parts(plain))
    assert by_host(plain) or sum(map(str.isalnum, joined)) <= sum(map(str.isalnum, plain))
    assert verdict(inspect([("file", text)], {})) in (UNKNOWN, FAIL, SKIP, PASS)


def test_the_hosts_of_a_log_of_nccl_are_not_those_of_clush() -> None:
    assert by_host("gpu-1:12:34 [0] NCCL INFO Using network IB\ngpu-1:12:34 [0] NCCL INFO x\n") == {}
