"""The way of a user: `lab up`, `up` and again, a look around by hand, then things that break.

The cluster is that of inventories/lab.yml in a lab of its own (.lab-test), so a lab that is in use stays as it is.
The tests build on one another, in this order.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.command import PROVISION, Answer, provision

ROOT = Path(__file__).parents[2]
STATE = ROOT / ".lab-test"
HEAD, WORKERS = "lab-head", ("lab-gpu-1", "lab-gpu-2")
NODES = (HEAD, *WORKERS)

Say = Callable[[str], None]


@pytest.fixture(scope="module")
def say(request: pytest.FixtureRequest) -> Say:
    """A line on the terminal at once: what these tests do takes minutes."""
    capture = request.config.pluginmanager.getplugin("capturemanager")

    def show(text: str) -> None:
        with capture.global_and_fixture_disabled():
            print(f"\n    {text}", end="", flush=True)

    return show


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, say: Say) -> Iterator[str]:
    """The path of the site file of `make lab`, for a fresh lab whose nodes answer ssh. Gone afterwards."""
    folder = tmp_path_factory.mktemp("site")
    text = (ROOT / "inventories/lab.yml").read_text()
    text, found = re.subn(r"(?m)^(\s*ssh_config:).*$", rf"\1 {STATE}/ssh_config", text)
    assert found == 1
    (folder / "lab.yml").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROVISION_LAB_DIR", str(STATE))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        say("provision lab up --fresh")
        lab("up", "--fresh", say=say)
        yield str(folder / "lab.yml")
        say("provision lab down")
        lab("down", say=say)
        assert not STATE.exists()


@pytest.fixture(scope="module")
def user() -> str:
    """The first of the ordinary users that the site file describes."""
    described = yaml.safe_load((ROOT / "inventories/lab.yml").read_text())
    return str(next(iter(described["base"]["users"])))


@dataclass(frozen=True)
class Twice:
    """The answers of the first and the second `provision up`."""

    first: Answer
    second: Answer


@pytest.fixture(scope="module")
def twice(site: str, say: Say) -> Twice:
    return Twice(timed(say, "up", site), timed(say, "up", site))


def timed(say: Say, *words: str) -> Answer:
    """Run a verb, saying what and how long."""
    say(f"provision {' '.join(words)}")
    started = time.monotonic()
    found = provision(*words)
    say(f"  {time.monotonic() - started:.1f} s, exit status {found.rc}, changed {found.changed}")
    return found


def lab(*words: str, say: Say | None = None) -> None:
    """`provision lab ...`, its lines shown as they come; must succeed."""
    with subprocess.Popen(
        [*PROVISION, "lab", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout
        said = []
        for line in process.stdout:
            said.append(line)
            if say:
                say(f"  {line.rstrip()}")
    assert process.returncode == 0, "".join(said)


def on(node: str, command: str, *, user: str = "root", timeout: float = 120) -> str:
    """What a shell command answers on a node; it must succeed."""
    argv = ["ssh", "-F", str(STATE / "ssh_config"), "-o", "BatchMode=yes", "-l", "root", node]
    done = subprocess.run(
        [*argv, command if user == "root" else f"runuser -l {user} -c '{command}'"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{node}: {command}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout


def until(condition: Callable[[], Any], what: str, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.5)


def bad(found: Answer) -> list[str]:
    """The findings that are not good, one line each."""
    assert found.document is not None, found.stderr
    return [
        f"{f['subject']}: {f['check']}: {f['verdict']}: {f['read']} {f['why'] or ''}"
        for f in found.document["findings"]
        if f["verdict"] in ("fail", "unknown")
    ]


def settled(site: str, wanted: Callable[[list[str]], bool], seconds: float = 60) -> None:
    """Verify until the findings that are not good are as `wanted`: what was mended needs a moment to show."""
    deadline = time.monotonic() + seconds
    while not wanted(found := bad(provision("verify", site))):
        assert time.monotonic() < deadline, found


def converged(site: str) -> None:
    """Nothing is left to change, and every check is content."""
    again = provision("apply", site)
    assert (again.rc, again.changed) == (0, dict.fromkeys(NODES, 0)), again.operations
    settled(site, lambda found: not found)


# ---- brought up


def test_the_first_up_admits_every_node(twice: Twice) -> None:
    assert twice.first.rc == 0, bad(twice.first) or twice.first.stderr
    assert {name: node["state"] for name, node in twice.first.nodes.items()} == dict.fromkeys(
        NODES, "admitted"
    )
    assert all(count > 0 for count in twice.first.changed.values())


def test_the_second_up_changes_nothing_in_under_a_third_of_the_time(twice: Twice, say: Say) -> None:
    assert twice.first.document
    assert twice.second.document
    assert twice.second.rc == 0, bad(twice.second)
    assert twice.second.changed == dict.fromkeys(NODES, 0), twice.second.operations
    ratio = twice.second.document["seconds"] / twice.first.document["seconds"]
    say(f"  the second run took {ratio:.2f} of the first")
    assert ratio < 1 / 3


def test_a_second_apply_changes_nothing(site: str, twice: Twice, say: Say) -> None:
    again = timed(say, "apply", site)
    assert (again.rc, again.changed) == (0, dict.fromkeys(NODES, 0)), again.operations


def test_status_tells_of_every_node(site: str, twice: Twice) -> None:
    told = provision("status", site)
    assert told.rc == 0, bad(told)
    assert {name: node["state"] for name, node in told.nodes.items()} == dict.fromkeys(NODES, "admitted")


def test_another_admin_is_told_of_the_runs_of_this_one(
    site: str, twice: Twice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert twice.second.document
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    told = provision("status", site)
    assert told.document
    runs = {run["run"]: run for run in told.document["details"]["runs"]}
    last = runs[twice.second.document["details"]["run"]]
    assert (last["verb"], last["verdict"]) == ("up", "pass")
    assert {name: node["state"] for name, node in last["nodes"].items()} == dict.fromkeys(NODES, "admitted")
    assert on(HEAD, "stat -c '%U %a' /var/lib/provision/runs.jsonl") == "root 600\n"


# ---- by hand


def test_no_unit_has_failed(twice: Twice) -> None:
    assert {node: on(node, "systemctl --failed --no-legend --plain") for node in NODES} == dict.fromkeys(
        NODES, ""
    )


def test_all_workers_are_idle_and_run_one_job_together(twice: Twice) -> None:
    states = on(HEAD, "sinfo --noheader --Node --format='%N %T'").split("\n")
    assert {line.split()[0]: line.split()[1] for line in states if line} == dict.fromkeys(WORKERS, "idle")
    names = on(HEAD, "srun --nodes=2 --time=1 --immediate=30 hostname")
    assert sorted(names.split()) == sorted(WORKERS)


def test_a_batch_job_of_a_user_writes_to_the_shared_home_and_is_accounted(twice: Twice, user: str) -> None:
    wrapped = 'cd && sbatch --parsable --nodes=2 --time=1 --wrap "srun hostname >from-job"'
    number = on(HEAD, wrapped, user=user).strip()

    def state() -> str:
        return on(
            HEAD, f"sacct --noheader --parsable2 --allocations --jobs={number} --format=State,User"
        ).strip()

    until(lambda: state() not in ("", f"PENDING|{user}", f"RUNNING|{user}"), f"job {number} has ended")
    assert state() == f"COMPLETED|{user}"
    for node in NODES:
        assert sorted(on(node, "cat from-job", user=user).split()) == sorted(WORKERS)


def test_gpus_are_counted_and_a_job_sees_its_own_only(twice: Twice) -> None:
    described = json.loads(on(HEAD, "scontrol show nodes --json"))["nodes"]
    assert all(node["gres"].startswith("gpu:") for node in described)
    tried = on(
        HEAD,
        "srun --nodes=1 --gres=gpu:1 --time=1 --immediate=30 sh -c "
        "'for gpu in /dev/nvidia[0-9]*; do (: <$gpu) 2>&1 | grep -c \"not permitted\"; done; true'",
    )
    # opening a device without a driver behind it fails too, but not for a lack of permission
    assert sorted(tried.split()) == ["0", "1"]


def test_prometheus_reaches_all_its_targets(twice: Twice) -> None:
    ask = "curl -sS --config /etc/provision/monitoring.curl https://lab-head:9090/api/v1/targets"

    def health() -> set[str]:
        return {target["health"] for target in json.loads(on(HEAD, ask))["data"]["activeTargets"]}

    until(lambda: health() == {"up"}, "all targets are up")


# ---- broken and mended


def test_a_byte_in_slurm_conf_is_shown_by_plan_and_mended_by_apply(site: str, twice: Twice, say: Say) -> None:
    before = on(HEAD, "sha256sum /etc/slurm/slurm.conf")
    lab("fault", "edit", HEAD, "--path", "/etc/slurm/slurm.conf")
    plan = timed(say, "plan", site)
    assert plan.rc == 0
    assert plan.changed[HEAD] >= 1
    assert {name: plan.changed[name] for name in WORKERS} == dict.fromkeys(WORKERS, 0)
    assert any("/etc/slurm/slurm.conf" in op["title"] for op in plan.operations)
    assert on(HEAD, "sha256sum /etc/slurm/slurm.conf") != before, "a plan changes nothing"
    mended = timed(say, "apply", site)
    assert (mended.rc, mended.changed) == (0, plan.changed)
    assert on(HEAD, "sha256sum /etc/slurm/slurm.conf") == before
    converged(site)


def test_a_wrong_munge_key_is_found_by_verify_and_mended_by_apply(site: str, twice: Twice, say: Say) -> None:
    node, other = WORKERS
    lab("fault", "wrong-munge-key", node)
    found = timed(say, "verify", site)
    assert found.rc == 1
    assert found.nodes[node]["verdict"] == "fail"
    assert found.nodes[other]["verdict"] == "pass", bad(found)
    assert any(line.startswith(f"{node}: munge") for line in bad(found)), bad(found)
    mended = timed(say, "apply", site)
    assert mended.rc == 0, bad(mended)
    assert mended.changed[node] >= 1
    converged(site)


def test_a_node_lost_in_mid_apply_is_named_the_others_finish_and_the_next_run_completes(
    site: str, twice: Twice, say: Say
) -> None:
    lost, other = WORKERS
    for node in WORKERS:
        on(node, "DEBIAN_FRONTEND=noninteractive apt-get remove -qq prometheus-node-exporter >/dev/null")
    lab("fault", "apt-lock", lost, "--seconds", "600")  # its packages cannot be done before it is lost
    say(f"provision apply, and {lost} loses its power meanwhile")
    with subprocess.Popen(
        [*PROVISION, "apply", site], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stderr
        line = next(line for line in running.stderr if line.startswith(f"{lost}: "))
        say(f"  {line.rstrip()}")
        lab("fault", "kill-node", lost)
        _, said = running.communicate(timeout=300)
    assert running.returncode == 1, said
    answered = provision("report", site)
    assert answered.rc == 1
    assert answered.nodes[lost]["verdict"] == "fail"
    assert answered.nodes[lost]["reason"]
    say(f"  {lost}: {answered.nodes[lost]['reason']}")
    assert answered.nodes[other] | {"changed": 0} == answered.nodes[HEAD] | {"changed": 0}
    assert answered.nodes[other]["changed"] >= 1
    lab("fault", "kill-node", lost, "--undo")
    completed = timed(say, "apply", site)
    assert completed.rc == 0, bad(completed)
    assert completed.changed == {HEAD: 0, lost: completed.changed[lost], other: 0}
    assert completed.changed[lost] >= 1
    converged(site)


def test_wrong_input_is_refused_before_anything_is_done(site: str, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(Path(site).read_text().replace("roles:", "rolls:", 1))
    for verb in ("check", "plan", "apply", "verify", "up"):
        found = provision(verb, str(wrong))
        assert found.rc == 2, verb
        assert found.document
        assert any(f["line"] and f["source"] == str(wrong) for f in found.document["findings"]), verb
