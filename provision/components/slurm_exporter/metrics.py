"""What Slurm says, as metrics in a file for the node exporter. Runs on the head, with its Python (3.9 or newer).

    slurm_metrics.py FILE

One question that fails, hangs or answers nonsense leaves its metrics out and says so in slurm_source_up; the file is
replaced as a whole. Exit status 1 only where the file cannot be written.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Gauge, generate_latest, write_to_textfile

DEADLINE = 20  # seconds for one question
NODES = ("scontrol", "show", "nodes", "--json")
JOBS = ("squeue", "--states=all", "--json")  # left out, squeue hides jobs that have just ended
STATISTICS = ("sdiag", "--json")
SHARES = ("sshare", "-a", "-P", "-n", "-o", "Account,User,FairShare,EffectvUsage,NormShares")
DATABASE = ("sacctmgr", "-nP", "show", "cluster", "format=cluster")
# Not of Slurm's, but of this head's: how far each node has come. There is none before the first bring-up.
ACCEPTANCE = ("sh", "-c", "f=/var/lib/provision/acceptance.json; [ ! -e $f ] || cat $f")
BURNIN = ("sh", "-c", "for f in /var/lib/provision/burnin/*.json; do [ ! -e $f ] || cat $f; done")
MAINTENANCE = "rolling maintenance"  # the reason of nodes that this tool works on

_GRES = re.compile(r"gpu(?:[:/](?P<kind>[^:=,()]+|\(null\)))?[:=](?P<count>\d+)(?:\([^)]*\))?(?=,|$)")


class Unreadable(Exception):
    """A question was not answered, or not with what was asked for."""


# What reading and writing an answer of another shape raises: a number for a text, half a character, no end.
NONSENSE = (Unreadable, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


def gpus(text: str | None) -> dict[str, int]:
    """GPUs by type in any of Slurm's spellings: "gpu:h100:8(S:0-1)", "gpu:(null):4(IDX:0-3)", "gres/gpu:h100=2".

    An entry without a type beside typed ones counts the same GPUs again and is left out; alone its type is "".
    """
    counts: Counter[str] = Counter()
    for found in _GRES.finditer(text or ""):
        kind = found["kind"]
        counts["" if kind in (None, "(null)") else kind] += int(found["count"])
    if len(counts) > 1:
        counts.pop("", None)
    return dict(counts)


def words(value: Any) -> list[str]:
    """States as Slurm has written them over time: "IDLE+DRAIN", ["IDLE", "DRAIN"]."""
    parts = value.split("+") if isinstance(value, str) else value if isinstance(value, list) else []
    return [str(part).strip("*~#!%$@^-").lower() for part in parts]


def number(value: Any) -> float | None:
    """A number as Slurm's JSON has it: 5, {"set": true, "infinite": false, "number": 5}."""
    if isinstance(value, dict):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def ask(command: Sequence[str]) -> str:
    """What a program prints. Raises Unreadable."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        raise Unreadable(f"no answer in {DEADLINE} s") from None
    except OSError as error:
        raise Unreadable(str(error)) from None
    if done.returncode != 0:
        raise Unreadable(done.stderr.strip() or f"exit status {done.returncode}")
    return done.stdout


def listed(text: str, key: str) -> list[dict[str, Any]]:
    """The list of objects at `key` of a JSON answer. Raises Unreadable."""
    found = parsed(text).get(key)
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise Unreadable(f"no list {key} in the answer")
    return found


def parsed(text: str) -> dict[str, Any]:
    """A JSON object. Raises Unreadable."""
    try:
        document = json.loads(text)
    except ValueError:
        raise Unreadable(f"no JSON: {text[:60]!r}") from None
    if not isinstance(document, dict):
        raise Unreadable(f"not an object: {text[:60]!r}")
    return document


def gauge(
    registry: CollectorRegistry,
    name: str,
    meaning: str,
    labels: Sequence[str],
    values: Mapping[Any, float],
) -> None:
    """One metric with its samples: label values -> number."""
    metric = Gauge(name, meaning, labels, registry=registry)
    for key, value in values.items():
        (metric.labels(*key) if labels else metric).set(value)


# What rules ask for is told of every node, with 0: a series that only vanishes, while Prometheus is restarted, is taken
# for true for five minutes more.
LOST = ("down", "not_responding", "drained", "draining")


def node_metrics(registry: CollectorRegistry, text: str) -> None:
    """Nodes by state, GPUs configured and allocated by node and type, nodes that this tool works on."""
    states: Counter[str] = Counter(dict.fromkeys(LOST, 0))
    total: dict[tuple[str, str], float] = {}
    used: dict[tuple[str, str], float] = {}
    maintained: dict[tuple[str], float] = {}
    kinds: dict[tuple[str, str], float] = {}
    for node in listed(text, "nodes"):
        name = str(node.get("name"))
        flags = words(node.get("state"))
        states[state_of(flags)] += 1
        kinds.update({(name, lost): 0 for lost in LOST})
        kinds[(name, state_of(flags))] = 1
        maintained[(name,)] = int(str(node.get("reason") or "").startswith(MAINTENANCE))
        for kind, count in gpus(node.get("gres")).items():
            total[(name, kind)] = count
            used[(name, kind)] = 0
        for kind, count in gpus(node.get("gres_used")).items():
            used[(name, kind)] = count
    gauge(registry, "slurm_nodes", "Nodes by state", ["state"], {(s,): n for s, n in states.items()})
    gauge(registry, "slurm_node_state", "1 for the state that a node is in", ["slurm_node", "state"], kinds)
    gauge(registry, "slurm_node_gpus", "GPUs that Slurm may give", ["slurm_node", "type"], total)
    gauge(registry, "slurm_node_gpus_allocated", "GPUs that jobs have", ["slurm_node", "type"], used)
    gauge(
        registry, "slurm_node_maintenance", "1 while this tool works on the node", ["slurm_node"], maintained
    )


def state_of(flags: Sequence[str]) -> str:
    """One word for a node: what keeps it from work comes first."""
    for word in ("down", "fail", "error", "not_responding", "reboot_issued", "rebooting"):
        if word in flags:
            return "down" if word in ("fail", "error") else word
    if "drain" in flags or "drained" in flags or "draining" in flags:
        busy = {"allocated", "mixed", "completing"} & set(flags)
        return "draining" if busy or "draining" in flags else "drained"
    for word in ("maintenance", "maint", "reserved", "planned", "completing", "allocated", "mixed", "idle"):
        if word in flags:
            return "maintenance" if word == "maint" else word
    return flags[0] if flags else "unknown"


def job_metrics(registry: CollectorRegistry, text: str) -> None:
    """Jobs and their GPUs by state, account and partition; how long the longest has waited."""
    jobs: Counter[tuple[str, str, str]] = Counter()
    gpu: Counter[tuple[str, str, str]] = Counter()
    waits: list[float] = []
    now = time.time()
    for job in listed(text, "jobs"):
        state = (words(job.get("job_state")) or ["unknown"])[0]
        key = (state, str(job.get("account") or ""), str(job.get("partition") or ""))
        jobs[key] += 1
        asked = job.get("tres_alloc_str") if state == "running" else job.get("tres_req_str")
        gpu[key] += sum(gpus(str(asked or "").replace("gres/", "")).values())
        eligible = number(job.get("eligible_time")) or 0
        if state == "pending" and 0 < eligible < now:
            waits.append(now - eligible)
    labels = ["state", "account", "partition"]
    gauge(registry, "slurm_jobs", "Jobs", labels, jobs)
    gauge(registry, "slurm_jobs_gpus", "GPUs that jobs have or want", labels, gpu)
    gauge(
        registry, "slurm_longest_wait_seconds", "Of a job that could start", [], {(): max(waits, default=0)}
    )


STATISTIC = {
    "server_thread_count": "slurm_controller_threads",
    "agent_queue_size": "slurm_agent_queue",
    "dbd_agent_queue_size": "slurm_dbd_queue",
    "schedule_cycle_last": "slurm_schedule_cycle_last_microseconds",
    "schedule_cycle_mean": "slurm_schedule_cycle_mean_microseconds",
    "schedule_queue_length": "slurm_schedule_queue",
    "bf_cycle_last": "slurm_backfill_cycle_last_microseconds",
    "bf_cycle_mean": "slurm_backfill_cycle_mean_microseconds",
    "bf_queue_len": "slurm_backfill_queue",
    "jobs_submitted": "slurm_jobs_submitted",
    "jobs_started": "slurm_jobs_started",
    "jobs_completed": "slurm_jobs_completed",
    "jobs_failed": "slurm_jobs_failed",
}


def statistic_metrics(registry: CollectorRegistry, text: str) -> None:
    """What the scheduler says of itself, since its last reset (midnight UTC)."""
    statistics = parsed(text).get("statistics")
    if not isinstance(statistics, dict):
        raise Unreadable("no statistics in the answer")
    for key, name in STATISTIC.items():
        value = number(statistics.get(key))
        if value is not None:
            gauge(registry, name, f"{key} of sdiag", [], {(): value})


def share_metrics(registry: CollectorRegistry, text: str) -> None:
    """Fair share of every account and user."""
    share: dict[tuple[str, str], float] = {}
    usage: dict[tuple[str, str], float] = {}
    if not text.strip():
        raise Unreadable("no shares: the root account has one")
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 5:
            raise Unreadable(f"no line of shares: {line[:60]!r}")
        key = (fields[0].strip(), fields[1])
        for value, into in ((fields[2], share), (fields[3], usage)):
            try:
                into[key] = float(value)
            except ValueError:
                continue  # accounts have no factor of their own
    gauge(registry, "slurm_fair_share", "Fair-share factor, 1 is best", ["account", "user"], share)
    gauge(registry, "slurm_effective_usage", "Share of what was used", ["account", "user"], usage)


def database_metrics(registry: CollectorRegistry, text: str) -> None:
    """Whether accounting answers at all. One name a line."""
    names = text.split()
    if names != text.splitlines():
        raise Unreadable(f"no list of clusters: {text[:60]!r}")
    gauge(registry, "slurm_database_clusters", "Clusters in accounting", [], {(): len(names)})


def acceptance_metrics(registry: CollectorRegistry, text: str) -> None:
    """How far each node has come on its way to work, 1 for the state that it is in."""
    known = parsed(text) if text.strip() else {}
    states: dict[tuple[str, str], float] = {}
    for name, entry in known.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("state"), str):
            raise Unreadable(f"no state of {name} in the answer")
        states[(name, entry["state"])] = 1
    gauge(registry, "provision_acceptance", "How far a node has come", ["slurm_node", "state"], states)


def burnin_metrics(registry: CollectorRegistry, text: str) -> None:
    """The last burn-in of each node: its verdict, when it was, and what was measured. A line of JSON a node."""
    verdicts: dict[tuple[str, str], float] = {}
    times: dict[tuple[str], float] = {}
    figures: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        record = parsed(line)
        node, at, measured = record.get("node"), number(record.get("at")), record.get("figures")
        if not isinstance(node, str) or at is None or not isinstance(measured, dict):
            raise Unreadable(f"no burn-in of a node: {line[:80]}")
        verdicts[(node, str(record.get("verdict")))] = 1
        times[(node,)] = at
        for measure, value in measured.items():
            read = number(value)
            if read is not None:
                figures[(node, measure)] = read
    gauge(registry, "provision_burnin", "Verdict of the last burn-in", ["slurm_node", "verdict"], verdicts)
    gauge(registry, "provision_burnin_timestamp_seconds", "When it was", ["slurm_node"], times)
    gauge(
        registry,
        "provision_burnin_figure",
        "A node's slowest GPU in the last burn-in, in GB/s or TFLOP/s as the measure says",
        ["slurm_node", "measure"],
        figures,
    )


SOURCES = (
    ("nodes", NODES, node_metrics),
    ("jobs", JOBS, job_metrics),
    ("statistics", STATISTICS, statistic_metrics),
    ("shares", SHARES, share_metrics),
    ("database", DATABASE, database_metrics),
    ("acceptance", ACCEPTANCE, acceptance_metrics),
    ("burnin", BURNIN, burnin_metrics),
)


def collect(run: Callable[[Sequence[str]], str] = ask) -> tuple[CollectorRegistry, dict[str, str]]:
    """All metrics, and what could not be asked: name of the source -> reason."""
    registry = CollectorRegistry()
    up: dict[tuple[str], float] = {}
    failures: dict[str, str] = {}
    for name, command, metrics in SOURCES:
        own = CollectorRegistry()
        try:
            metrics(own, run(command))
            generate_latest(own)
        except NONSENSE as error:
            failures[name] = str(error) or type(error).__name__
        else:
            registry.register(own)
        up[(name,)] = int(name not in failures)
    gauge(registry, "slurm_source_up", "1 where Slurm answered", ["source"], up)
    gauge(registry, "slurm_collected_timestamp_seconds", "When Slurm was asked", [], {(): time.time()})
    return registry, failures


def main() -> None:
    registry, failures = collect()
    for name, reason in failures.items():
        print(f"{name}: {reason}", file=sys.stderr)
    write_to_textfile(sys.argv[1], registry)


if __name__ == "__main__":
    main()
