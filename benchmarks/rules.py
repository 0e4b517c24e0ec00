"""How long Prometheus takes to load the targets of a large cluster, and to evaluate all rules of this project on them.

    python -m benchmarks.rules [--nodes 1000] [--prometheus PATH]

A real server, configured as on a monitor, scrapes that many simulated nodes on the loopback: of each a node exporter's
series (64 processors, 8 memory controllers, 3 file systems, 6 interfaces, 15 units) and the health agent's of 8 GPUs,
of the head Slurm's of all nodes. What rules look back at for an hour and more is in the store beforehand. A node in a
hundred has a GPU with an XID: its alerts must come.

Two figures of each group: how long its longest evaluation took, as the server itself tells it
(prometheus_rule_group_last_duration_seconds), among scrapes and whatever else the machine did; and the processor time
that its expressions need, asked one by one of the same server while it scrapes nothing. The last line says pass, fail,
or that a busy machine could not show it: all rules once may take 10 s of wall clock. Exit status 1 unless they pass.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import requests
import yaml
from prometheus_client import generate_latest
from rich.console import Console
from rich.table import Table

from provision.components.prometheus import exports
from provision.components.prometheus.checks import parse_metrics
from provision.components.prometheus.settings import MonitoringSettings
from provision.components.slurm_exporter import metrics as slurm
from provision.health import metrics as health
from provision.health.finding import FAIL, PASS, Finding
from provision.health.readings import Device
from provision.site.models import Site, SiteFile

INTERVAL = 15  # seconds, the default of `monitoring.interval`
MOST = 10.0  # seconds that all rules together may take once
CONTROLLERS = 8  # of memory
SICK = 100  # one node in so many
GPUS = 8
PLACES = (("/", "ext4"), ("/scratch", "xfs"), ("/home", "nfs4"))
DEVICES = (*(f"ib{n}" for n in range(5)), "eth0")
UNITS = (
    "ssh", "munge", "slurmd", "chrony", "prometheus-node-exporter", "systemd-journal-upload", "nvidia-persistenced",
    "nvidia-fabricmanager", "nvidia-dcgm", "provision-health", "docker", "containerd", "rpcbind", "cron", "dbus",
)  # fmt: skip


def large_site(nodes: int, folder: Path) -> Site:
    """A head and `nodes` workers without addresses."""
    document = {
        "cluster": "large",
        "groups": {
            "head": {"hosts": "head", "roles": ["head", "monitor"]},
            "gpu": {"hosts": f"gpu-[0001-{nodes:04}]", "roles": ["worker"]},
        },
        "monitoring": {"interval": f"{INTERVAL}s"},
    }
    return Site.from_file(SiteFile.model_validate(document), folder / "large.yml")


# ---- what nodes tell


def node_exporter(now: float) -> str:
    """Series of a node exporter, with the names and labels that rules and dashboards read."""
    samples: list[tuple[str, float]] = [
        ("node_time_seconds", now),
        ("node_boot_time_seconds", now - 1e6),
        ("node_memory_MemTotal_bytes", 2e12),
        ("node_memory_MemAvailable_bytes", 1.5e12),
        ("node_vmstat_oom_kill", 0),
        ("node_timex_sync_status", 1),
        ("node_timex_maxerror_seconds", 0.01),
        ("node_nf_conntrack_entries", 200),
        ("node_nf_conntrack_entries_limit", 262144),
        ("node_textfile_scrape_error", 0),
        ('node_systemd_units{state="failed"}', 0),
        ("provision_certificate_end_seconds", now + 3e7),
    ]
    for cpu in range(64):
        samples += [
            (f'node_cpu_seconds_total{{cpu="{cpu}",mode="{mode}"}}', now % 1e6)
            for mode in ("idle", "iowait", "irq", "nice", "softirq", "steal", "system", "user")
        ]
        samples.append((f'node_cpu_core_throttles_total{{package="{cpu // 32}",core="{cpu % 32}"}}', 0))
    for controller in range(CONTROLLERS):
        samples += [
            (f'node_edac_{kind}_errors_total{{controller="{controller}"}}', 0)
            for kind in ("correctable", "uncorrectable")
        ]
    for place, kind in PLACES:
        at = f'device="/dev/x",fstype="{kind}",mountpoint="{place}"'
        samples += [
            (f"node_filesystem_{name}{{{at}}}", value)
            for name, value in (
                ("size_bytes", 2e12),
                ("avail_bytes", FREE),
                ("readonly", 0),
                ("files", 1e8),
                ("files_free", 9e7),
            )
        ]
    for device in DEVICES:
        samples += [
            (f'node_network_{name}{{device="{device}"}}', 0)
            for name in (
                "receive_errs_total",
                "transmit_errs_total",
                "carrier_changes_total",
                "receive_bytes_total",
                "transmit_bytes_total",
            )
        ]
    for unit in UNITS:
        samples += [
            (
                f'node_systemd_unit_state{{name="{unit}.service",state="{state}",type="simple"}}',
                int(state == "active"),
            )
            for state in ("activating", "active", "deactivating", "failed", "inactive")
        ]
        samples.append((f'node_systemd_unit_start_time_seconds{{name="{unit}.service"}}', 1000))
    samples += [
        (f'node_scrape_collector_success{{collector="{name}"}}', 1)
        for name in (
            "cpu",
            "filesystem",
            "meminfo",
            "netclass",
            "netdev",
            "stat",
            "systemd",
            "textfile",
            "time",
            "timex",
        )
    ]
    return "".join(f"{series} {value:.15g}\n" for series, value in samples)


FREE = 1e12  # bytes of every file system


def health_agent(now: float, *, sick: bool) -> str:
    """What the health agent writes on a node with 8 GPUs, one of which had an XID where it is `sick`."""
    gpus = [
        Device(
            f"GPU {index}",
            {
                "index": index,
                "uuid": f"GPU-{index}",
                "temperature.gpu": 60,
                "temperature.gpu.tlimit": 27,
                "power.draw": 600.5,
                "clocks.sm": 1980,
                "utilization.gpu": 100,
                "memory.used": 70000,
                "ecc.errors.uncorrected.volatile.total": 0,
                "remapped_rows.uncorrectable": 0,
                "pcie.replays": 0,
            },
        )
        for index in range(GPUS)
    ]
    found = [
        Finding(PASS, "gpu-count", "node"),
        *([Finding(FAIL, "xid", "GPU 3", action="reset")] if sick else []),
    ]
    return health.text(Device("node", {"gpus": gpus}), found, 0.5, now, {"slurm": True})


def slurm_exporter(names: Sequence[str]) -> str:
    """What Slurm's exporter writes on the head of a busy cluster."""
    answers: dict[Sequence[str], Any] = {
        slurm.NODES: {
            "nodes": [
                {
                    "name": name,
                    "state": ["ALLOCATED"],
                    "gres": f"gpu:h100:{GPUS}",
                    "gres_used": f"gpu:h100:{GPUS}",
                }
                for name in names
            ]
        },
        slurm.JOBS: {"jobs": []},
        slurm.STATISTICS: {"statistics": {}},
    }
    registry, _ = slurm.collect(lambda command: json.dumps(answers[command]) if command in answers else "")
    return generate_latest(registry).decode()


class Nodes:
    """All nodes behind one port of the loopback, by path; each kind of page is made once a second."""

    def __init__(self, head: str, workers: Sequence[str]) -> None:
        self.head, self.sick = head, set(workers[::SICK])
        self.slurm = slurm_exporter(workers)
        self.pages: dict[tuple[bool, bool], tuple[float, bytes]] = {}
        self.port = 0
        self.started = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True).start()
        self.started.wait()

    def page(self, name: str) -> bytes:
        kind, now = (name == self.head, name in self.sick), time.time()
        if kind not in self.pages or now - self.pages[kind][0] > 1:
            head, sick = kind
            text = node_exporter(now) + health_agent(now, sick=sick) + (self.slurm if head else "")
            self.pages[kind] = (now, text.encode())
        return self.pages[kind][1]

    async def serve(self) -> None:
        server = await asyncio.start_server(self.answer, "127.0.0.1", 0, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self.started.set()
        await server.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while request := await reader.readline():
                while (await reader.readline()).strip():
                    pass  # what headers say does not matter
                page = self.page(request.split()[1].decode().strip("/"))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(page), page))
                await writer.drain()
        except ConnectionError:
            return  # the server has ended
        finally:
            writer.close()


# ---- the server


def configuration(site: Site, folder: Path, nodes: int, own: int) -> Path:
    """The monitor's own configuration and files, without TLS; all nodes at the port `nodes`, itself at `own`."""
    settings = site.settings("prometheus", site.head, MonitoringSettings)
    document = yaml.safe_load(exports.prometheus_yml(site, site.head, settings))
    del document["alerting"]
    document["rule_files"] = [str(folder / "rules" / "*.yml")]
    found = exports.targets(site)
    document["scrape_configs"] = [
        job for job in document["scrape_configs"] if job["job_name"] in ("node", "prometheus")
    ]
    for job in document["scrape_configs"]:
        for key in ("scheme", "tls_config", "basic_auth"):
            del job[key]
        path = folder / f"{job['job_name']}.json"
        job["file_sd_configs"] = [{"files": [str(path)]}]
        groups = found[job["job_name"]]
        for group in groups:
            if job["job_name"] == "node":
                group["targets"] = [f"127.0.0.1:{nodes}"]
                group["labels"]["__metrics_path__"] = f"/{group['labels']['node']}"
            else:
                group["targets"] = [f"127.0.0.1:{own}"]
        path.write_text(exports.targets_json(groups))
    (folder / "rules").mkdir()
    for path_there, text in exports.rules().items():
        (folder / "rules" / Path(path_there).name).write_text(text)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(document))
    return path


def looked_back() -> Iterator[tuple[str, str, float, int]]:
    """Name, labels, value and seconds of what rules look back at for long, on every node."""
    for place, kind in PLACES:
        labels = f'device="/dev/x",fstype="{kind}",mountpoint="{place}"'
        yield "node_filesystem_avail_bytes", labels, FREE, 6 * 3600
    for controller in range(CONTROLLERS):
        for kind in ("correctable", "uncorrectable"):
            yield f"node_edac_{kind}_errors_total", f'controller="{controller}"', 0, 3600
    for device in DEVICES:
        yield "node_network_carrier_changes_total", f'device="{device}"', 0, 3600


def history(names: Sequence[str], until: float) -> Iterator[str]:
    """All of `looked_back` up to now, as OpenMetrics."""
    rows = sorted(looked_back())
    for metric in dict.fromkeys(row[0] for row in rows):
        yield f"# TYPE {metric} unknown\n"
        for _, labels, value, seconds in (row for row in rows if row[0] == metric):
            for name in names:
                series = f'{metric}{{group="gpu",instance="{name}:9100",job="node",node="{name}",{labels}}} {value:g}'
                first = until - seconds
                yield from (
                    f"{series} {first + step * INTERVAL:.3f}\n" for step in range(seconds // INTERVAL)
                )
    yield "# EOF\n"


def backfill(promtool: str, names: Sequence[str], store: Path) -> None:
    path = store.with_name("history.txt")
    with path.open("w") as file:
        file.writelines(history(names, time.time()))
    subprocess.run(
        [
            promtool,
            "tsdb",
            "create-blocks-from",
            "--max-block-duration=24h",
            "openmetrics",
            "--quiet",
            path,
            store,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    path.unlink()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, path: str, **values: str) -> requests.Response:
    session = requests.Session()
    session.trust_env = False  # no proxy on the loopback
    answer = session.get(f"http://127.0.0.1:{port}/{path}", params=values, timeout=300)
    answer.raise_for_status()
    return answer


def query(port: int, expression: str) -> float:
    result = ask(port, "api/v1/query", query=expression).json()["data"]["result"]
    return float(result[0]["value"][1]) if result else 0.0


def until(what: str, happened: partial[bool], server: subprocess.Popen[bytes], within: float) -> float:
    """Seconds until it happened. Ends the program when it does not."""
    print(f"{what} ...", file=sys.stderr, flush=True)
    started = time.monotonic()
    while True:
        if server.poll() is not None:
            raise SystemExit(f"prometheus ended with status {server.returncode}")
        if happened():
            return time.monotonic() - started
        if time.monotonic() - started > within:
            raise SystemExit(f"{what}: not within {within:g} s")
        time.sleep(0.5)


def ready(port: int) -> bool:
    try:
        return bool(ask(port, "-/ready"))
    except (requests.ConnectionError, requests.HTTPError):
        return False  # it does not listen yet, or reads its store


def loaded(port: int, targets: int) -> bool:
    return len(ask(port, "api/v1/targets", state="active").json()["data"]["activeTargets"]) == targets


def holds(port: int, expression: str, least: float) -> bool:
    return query(port, expression) >= least


def durations(port: int) -> dict[str, float]:
    """Group of rules -> seconds of its last evaluation."""
    name = 'prometheus_rule_group_last_duration_seconds{rule_group="'
    return {
        series[len(name) :].rpartition(";")[2].rstrip('"}'): value
        for series, value in parse_metrics(ask(port, "metrics").text).items()
        if series.startswith(name)
    }


def evaluated(port: int) -> bool:
    """Whether every group of rules has come to its turn."""
    found = durations(port)
    groups = (group["name"] for each in exports.rule_groups().values() for group in each)
    return all(found.get(name, 0.0) > 0 for name in groups)


def verdict(took: float, needs: float) -> str:
    """What the seconds of wall clock that all rules took once, and those of a processor that they need, come to."""
    said = f"all rules once: {took:.1f} s of wall clock, {needs:.1f} s of a processor, at most {MOST:g} s"
    if took <= MOST:
        return f"pass: {said}"
    return f"{'fail' if needs > MOST else 'not shown, the machine was busy'}: {said}"


def processor_seconds(server: subprocess.Popen[bytes]) -> float:
    """What the server has used so far."""
    fields = Path(f"/proc/{server.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def needed(port: int, config: Path, server: subprocess.Popen[bytes]) -> dict[str, float]:
    """Group of rules -> processor seconds of its expressions. The server scrapes and evaluates nothing meanwhile."""
    moment = f"{time.time():.3f}"
    document = yaml.safe_load(config.read_text()) | {"scrape_configs": [], "rule_files": []}
    config.write_text(yaml.safe_dump(document))
    server.send_signal(signal.SIGHUP)
    until("no scrapes", partial(loaded, port, 0), server, 120)
    time.sleep(INTERVAL)  # what was under way comes to its end
    found: dict[str, float] = {}
    for group in (group for groups in exports.rule_groups().values() for group in groups):
        before = processor_seconds(server)
        for rule in group["rules"]:
            ask(port, "api/v1/query", query=rule["expr"], time=moment)
        found[group["name"]] = processor_seconds(server) - before
    return found


def measure(
    nodes: int, prometheus: str, promtool: str, evaluations: int
) -> tuple[dict[str, float], dict[str, tuple[float, float]]]:
    """Figures by what they are; group of rules -> seconds of its longest evaluation, and of a processor."""
    with tempfile.TemporaryDirectory(prefix="provision-benchmark-") as name:
        folder = Path(name)
        site = large_site(nodes, folder)
        workers = [node.name for node in site.nodes.values() if node.has("worker")]
        simulated = Nodes(site.head.name, workers)
        own = free_port()
        config = configuration(site, folder, simulated.port, own)
        print("history ...", file=sys.stderr, flush=True)
        backfill(promtool, workers, folder / "data")
        server = subprocess.Popen(
            [
                prometheus,
                f"--config.file={config}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{own}",
                "--log.level=error",
            ]
        )
        try:
            until("server", partial(ready, own), server, 120)
            targets = len(site.nodes) + 1
            figures = {
                "targets loaded": until("targets", partial(loaded, own, targets), server, 120),
                "all of them up": until(
                    "scrapes", partial(holds, own, "sum(max_over_time(up[2m]))", targets), server, 600
                ),
            }
            xids = 'count(ALERTS{alertname="GpuXidFatal", alertstate="firing"})'
            until("alerts", partial(holds, own, xids, len(simulated.sick)), server, 300)
            until("evaluations", partial(evaluated, own), server, 600)
            longest: dict[str, float] = {}
            for number in range(evaluations):
                print(f"evaluation {number + 1} of {evaluations} ...", file=sys.stderr, flush=True)
                time.sleep(INTERVAL)
                for group, seconds in durations(own).items():
                    longest[group] = max(seconds, longest.get(group, 0.0))
            failed = query(own, "sum(prometheus_rule_evaluation_failures_total)")
            if failed:
                raise SystemExit(f"{failed:g} evaluations of rules failed")
            figures["series in memory"] = query(own, "prometheus_tsdb_head_series")
            figures["memory, GiB"] = query(own, 'process_resident_memory_bytes{job="prometheus"}') / 2**30
            processor = needed(own, config, server)
            groups = {name: (longest.get(name, 0.0), seconds) for name, seconds in processor.items()}
            return figures, groups
        finally:
            server.terminate()
            server.wait()


def main() -> None:
    """Print two tables and the verdict; exit status 1 unless it is pass."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument(
        "--prometheus", default=shutil.which("prometheus"), help="the server; promtool lies beside it"
    )
    parser.add_argument("--evaluations", type=int, default=8)
    options = parser.parse_args()
    if options.prometheus is None:
        parser.error("no prometheus on PATH: name one by --prometheus, or apt-get install prometheus")
    promtool = str(Path(options.prometheus).with_name("promtool"))
    figures, groups = measure(options.nodes, options.prometheus, promtool, options.evaluations)
    table = Table("what", "", box=None, title=f"{options.nodes} nodes", title_justify="left")
    for what, value in figures.items():
        table.add_row(what, f"{value:.2f}")
    intervals = {
        group["name"]: group.get("interval", f"{INTERVAL}s")
        for found in exports.rule_groups().values()
        for group in found
    }
    costs = Table("group", "every", "took, s", "needs, s of a processor", box=None)
    for name, (longest, seconds) in groups.items():
        costs.add_row(name, intervals[name], f"{longest:.2f}", f"{seconds:.2f}")
    took, needs = (sum(column) for column in zip(*groups.values(), strict=True))
    costs.add_row("all once", "", f"{took:.2f}", f"{needs:.2f}")
    for each in (table, costs):
        Console(width=100).print(each)
    said = verdict(took, needs)
    print(said)
    if not said.startswith("pass"):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
