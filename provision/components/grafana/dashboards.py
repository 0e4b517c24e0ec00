"""The dashboards, built with Grafana's own SDK. Every expression answers on a cluster that this tool has set up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

from grafana_foundation_sdk.builders import common, prometheus, stat, table, timeseries
from grafana_foundation_sdk.builders import dashboard as builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import (
    BigValueGraphMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

DATASOURCE = DataSourceRef(type_val="prometheus", uid="provision-prometheus")
Kind = Literal["graph", "number", "table"]


@dataclass(frozen=True)
class Panel:
    """One picture: expressions with their legends; `unit` as Grafana calls it."""

    title: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: Kind = "graph"

    @property
    def width(self) -> int:
        """Of Grafana's 24 columns."""
        return {"graph": 12, "number": 4, "table": 24}[self.kind]


@dataclass(frozen=True)
class Dashboard:
    """One page. `per_node` gives it a choice of nodes, `$node` in its expressions."""

    uid: str
    title: str
    panels: Sequence[Panel]
    per_node: bool = False


def number(title: str, expr: str, unit: str = "short") -> Panel:
    return Panel(title, [(expr, "")], unit, "number")


DASHBOARDS = (
    Dashboard(
        "provision-overview",
        "Cluster",
        [
            number("Nodes that answer", 'count(up{job="node"} == 1)'),
            number("Nodes in all", 'count(up{job="node"})'),
            number("GPUs", "sum(slurm_node_gpus)"),
            number("GPUs that jobs have", "sum(slurm_node_gpus_allocated)"),
            number("Jobs that run", 'sum(slurm_jobs{state="running"}) or vector(0)'),
            number("Alerts", 'count(ALERTS{alertstate="firing", severity!="none"}) or vector(0)'),
            Panel("Nodes by Slurm's state", [("sum by (state) (slurm_nodes)", "{{state}}")]),
            Panel(
                "GPUs",
                [
                    ("sum(slurm_node_gpus)", "all"),
                    ("sum(slurm_node_gpus_allocated)", "given to jobs"),
                ],
            ),
            Panel("Processors busy", [("node:cpu_busy:ratio", "{{node}}")], "percentunit"),
            Panel(
                "Memory used",
                [("1 - node_memory_MemAvailable_bytes / node_memory_MemTotal_bytes", "{{node}}")],
                "percentunit",
            ),
            Panel(
                "Alerts that stand",
                [('ALERTS{alertstate="firing", severity!="none"} or on () vector(0)', "")],
                kind="table",
            ),
        ],
    ),
    Dashboard(
        "provision-node",
        "Node",
        [
            number("Up for", 'time() - node_boot_time_seconds{node=~"$node"}', "s"),
            number("Units that failed", 'sum(node_systemd_units{node=~"$node", state="failed"})'),
            number(
                "Clock off by",
                'max(abs(node_time_seconds{node=~"$node"} - timestamp(node_time_seconds)))',
                "s",
            ),
            Panel(
                "Processors by what they do",
                [
                    (
                        'sum by (mode) (rate(node_cpu_seconds_total{node=~"$node", mode!="idle"}[5m]))',
                        "{{mode}}",
                    )
                ],
            ),
            Panel("Load", [('node_load1{node=~"$node"}', "{{node}}")]),
            Panel(
                "Memory",
                [
                    ('node_memory_MemTotal_bytes{node=~"$node"}', "{{node}} all"),
                    ('node_memory_MemAvailable_bytes{node=~"$node"}', "{{node}} available"),
                ],
                "bytes",
            ),
            Panel(
                "File systems used",
                [
                    (
                        '1 - node_filesystem_avail_bytes{node=~"$node", fstype!~"tmpfs|ramfs|overlay"}'
                        " / node_filesystem_size_bytes",
                        "{{node}} {{mountpoint}}",
                    )
                ],
                "percentunit",
            ),
            Panel(
                "Network",
                [
                    (
                        'rate(node_network_receive_bytes_total{node=~"$node", device!="lo"}[5m])',
                        "{{node}} {{device}} in",
                    ),
                    (
                        '-rate(node_network_transmit_bytes_total{node=~"$node", device!="lo"}[5m])',
                        "{{node}} {{device}} out",
                    ),
                ],
                "Bps",
            ),
            Panel(
                "Services that do not run",
                [
                    (
                        'count by (node) (node_systemd_unit_state{node=~"$node", state="failed"} == 1)'
                        ' or 0 * count by (node) (up{node=~"$node", job="node"})',
                        "{{node}}",
                    )
                ],
            ),
        ],
        per_node=True,
    ),
    Dashboard(
        "provision-gpu",
        "GPUs",
        [
            number("GPUs seen", 'count(provision_gpu_temperature_celsius{node=~"$node"})'),
            number("Power", 'sum(provision_gpu_power_watts{node=~"$node"})', "watt"),
            number("Hottest", 'max(provision_gpu_temperature_celsius{node=~"$node"})', "celsius"),
            Panel(
                "Use",
                [('provision_gpu_utilization_percent{node=~"$node"}', "{{node}} GPU {{gpu}}")],
                "percent",
            ),
            Panel("Power", [('provision_gpu_power_watts{node=~"$node"}', "{{node}} GPU {{gpu}}")], "watt"),
            Panel(
                "Temperature",
                [('provision_gpu_temperature_celsius{node=~"$node"}', "{{node}} GPU {{gpu}}")],
                "celsius",
            ),
            Panel(
                "SM clock",
                [('provision_gpu_sm_clock_megahertz{node=~"$node"}', "{{node}} GPU {{gpu}}")],
                "rotmhz",
            ),
            Panel(
                "Memory used",
                [('provision_gpu_memory_used_mebibytes{node=~"$node"}', "{{node}} GPU {{gpu}}")],
                "mbytes",
            ),
            Panel(
                "Uncorrected memory errors",
                [('provision_gpu_ecc_uncorrected{node=~"$node"}', "{{node}} GPU {{gpu}}")],
            ),
        ],
        per_node=True,
    ),
    Dashboard(
        "provision-fabric",
        "Fabric",
        [
            number(
                "Findings about ports and links",
                'count(provision_health_finding{check=~"port|link-flaps|symbol-errors|transceiver|roce|nvlink.+"})'
                " or vector(0)",
            ),
            Panel(
                "Received",
                [
                    (
                        'rate(node_network_receive_bytes_total{node=~"$node", device!="lo"}[5m])',
                        "{{node}} {{device}}",
                    )
                ],
                "Bps",
            ),
            Panel(
                "Sent",
                [
                    (
                        'rate(node_network_transmit_bytes_total{node=~"$node", device!="lo"}[5m])',
                        "{{node}} {{device}}",
                    )
                ],
                "Bps",
            ),
            Panel(
                "Errors",
                [
                    (
                        'rate(node_network_receive_errs_total{node=~"$node"}[5m])'
                        " + rate(node_network_transmit_errs_total[5m])",
                        "{{node}} {{device}}",
                    )
                ],
            ),
            Panel(
                "Links lost and found",
                [('changes(node_network_carrier_changes_total{node=~"$node"}[1h])', "{{node}} {{device}}")],
            ),
        ],
        per_node=True,
    ),
    Dashboard(
        "provision-jobs",
        "Jobs and accounts",
        [
            number("Longest wait", "max(slurm_longest_wait_seconds)", "s"),
            number("Scheduler's last cycle", "max(slurm_schedule_cycle_last_microseconds)", "µs"),
            number("Threads of slurmctld", "max(slurm_controller_threads)"),
            Panel("Jobs by state", [("sum by (state) (slurm_jobs) or on () vector(0)", "{{state}}")]),
            Panel(
                "GPUs of accounts",
                [('sum by (account) (slurm_jobs_gpus{state="running"}) or on () vector(0)', "{{account}}")],
            ),
            Panel(
                "GPUs by type",
                [
                    ("sum by (type) (slurm_node_gpus_allocated)", "{{type}} allocated"),
                    (
                        "sum by (type) (slurm_node_gpus) - sum by (type) (slurm_node_gpus_allocated)",
                        "{{type}} idle",
                    ),
                ],
            ),
            Panel("Fair share", [("slurm_fair_share", "{{account}} {{user}}")]),
            Panel(
                "Scheduler's cycles",
                [
                    ("slurm_schedule_cycle_mean_microseconds", "main"),
                    ("slurm_backfill_cycle_last_microseconds", "backfill, last"),
                ],
                "µs",
            ),
            Panel(
                "Messages that wait",
                [("slurm_agent_queue", "to nodes"), ("slurm_dbd_queue", "to slurmdbd")],
            ),
        ],
    ),
    Dashboard(
        "provision-health",
        "Health and acceptance",
        [
            number("Nodes admitted", 'count(provision_acceptance{state="admitted"} == 1) or vector(0)'),
            number("Nodes quarantined", 'count(provision_acceptance{state="quarantined"} == 1) or vector(0)'),
            number("Nodes that fail", 'count(provision_health{verdict="fail"} == 1) or vector(0)'),
            number(
                "Nodes that cannot be told", 'count(provision_health{verdict="unknown"} == 1) or vector(0)'
            ),
            Panel("Acceptance", [("sum by (state) (provision_acceptance)", "{{state}}")]),
            Panel("Verdicts", [("sum by (verdict) (provision_health)", "{{verdict}}")]),
            Panel("What is not well", [("provision_health_finding or on () vector(0)", "")], kind="table"),
            Panel(
                "Last looked at",
                [("time() - provision_health_timestamp_seconds", "{{node}}")],
                "s",
            ),
        ],
    ),
    Dashboard(
        "provision-burnin",
        "Burn-in history",
        [
            number("Nodes burned in", "count(provision_burnin) or vector(0)"),
            number("Failed their last one", 'count(provision_burnin{verdict="fail"}) or vector(0)'),
            number("Not told by it", 'count(provision_burnin{verdict=~"unknown|skip"}) or vector(0)'),
            number("The oldest was", "time() - min(provision_burnin_timestamp_seconds)", "s"),
            Panel("Verdicts", [("sum by (verdict) (provision_burnin)", "{{verdict}}")]),
            Panel(
                "Days since",
                [("(time() - provision_burnin_timestamp_seconds) / 86400", "{{node}}")],
                "d",
            ),
            *(
                Panel(
                    title,
                    [
                        (
                            f'provision_burnin_figure{{measure="{measure}", node=~"$node"}} or on () vector(0)',
                            "{{node}}",
                        )
                    ],
                    unit,
                )
                for title, measure, unit in (
                    ("bf16 products, slowest GPU of a node", "matmul_bf16_tflops", "TFLOP/s"),
                    ("All-reduce, bus bandwidth of the run", "all_reduce_busbw_gbs", "GBs"),
                    ("Device copy, slowest GPU", "device_copy_gbs", "GBs"),
                    ("Peer to peer, slowest pair", "pair_gbs", "GBs"),
                    ("Host to device, slowest GPU", "host_to_device_gbs", "GBs"),
                    ("Device to host, slowest GPU", "device_to_host_gbs", "GBs"),
                )
            ),
            Panel(
                "Against the median of all nodes",
                [
                    (
                        'provision_burnin_figure{node=~"$node"}'
                        " / on (measure) group_left quantile by (measure) (0.5, provision_burnin_figure)",
                        "{{node}} {{measure}}",
                    )
                ],
                "percentunit",
            ),
        ],
        per_node=True,
    ),
)


def build(page: Dashboard) -> str:
    """The dashboard as the JSON that Grafana reads."""
    found = (
        builder.Dashboard(page.title)
        .uid(page.uid)
        .tags(["provision"])
        .readonly()
        .refresh("1m")
        .time("now-6h", "now")
        .timezone("browser")
    )
    if page.per_node:
        found = found.with_variable(
            builder.QueryVariable("node")
            .label("Node")
            .datasource(DATASOURCE)
            .query('label_values(up{job="node"}, node)')
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".+")
        )
    found = reduce(lambda made, panel: made.with_panel(_panel(panel)), page.panels, found)
    text: str = JSONEncoder(sort_keys=True, indent=1).encode(found.build())
    return f"{text}\n"


def _graph() -> Any:
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    shown = common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
    return timeseries.Panel().legend(legend.show_legend(True)).tooltip(shown)


# Each says an option at least: without one the SDK writes null, which Grafana's schema has not.
_BUILDERS: dict[Kind, Callable[[], Any]] = {
    "graph": _graph,
    "number": lambda: stat.Panel().graph_mode(BigValueGraphMode.NONE),
    "table": lambda: table.Panel().show_header(True),
}


def _panel(panel: Panel) -> Any:
    height = 4 if panel.kind == "number" else 8
    made = _BUILDERS[panel.kind]().title(panel.title).datasource(DATASOURCE).unit(panel.unit)
    made = made.span(panel.width).height(height)
    for index, (expr, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + index))
        made = made.with_target(query if panel.kind == "graph" else query.instant())
    return made
