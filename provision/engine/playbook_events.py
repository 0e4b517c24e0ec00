"""What Ansible tells, in the engine's own events. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Event = dict[str, Any]

_MOST_SAID = 40  # lines of Ansible's own words that are kept for an error
_MOST_DETAIL = 2000  # characters


@dataclass
class Reader:
    """Turns ansible-runner's events into the engine's, one by one, and remembers what came of each node."""

    secrets: Sequence[str] = ()  # never shown, nor any line of them
    play: str = ""
    began: bool = False  # whether any play has begun: before that nothing was done on any node
    stats: Mapping[str, Mapping[str, int]] | None = None  # None: the playbook did not come to its end
    reasons: dict[str, str] = field(default_factory=dict)  # node -> how its last failed task failed
    said: list[str] = field(default_factory=list)

    def take(self, raw: Mapping[str, Any]) -> Iterator[Event]:
        """The events that tell what `raw` tells; most of Ansible's tell nothing."""
        data = raw.get("event_data") or {}
        host = data.get("host")
        match raw.get("event"):
            case "playbook_on_play_start":
                self.began = True
                self.play = self.shown(str(data.get("name") or data.get("play") or "play"))
            case "playbook_on_task_start" | "playbook_on_handler_task_start":
                yield {"event": "note", "text": f"{self.play}: {self._title(data)}"}
            case "playbook_on_no_hosts_matched":
                yield {"event": "note", "text": f"{self.play}: no node of the site is meant"}
            case "runner_on_start":
                yield {"event": "start", "node": host, "step": self.play, "title": self._title(data)}
            case "runner_on_ok":
                yield self._op(data, "changed" if _result(data).get("changed") else "same")
            case "runner_on_skipped":
                yield self._op(data, "skipped")
            case "runner_retry":
                result = _result(data)
                yield {
                    "event": "start",
                    "node": host,
                    "step": self.play,
                    "title": f"{self._title(data)} (attempt {result.get('attempts')})",
                }
            case "runner_on_failed" if data.get("ignore_errors"):
                yield self._op(data, "same", detail=f"failed, which the playbook ignores: {self._why(data)}")
            case "runner_on_failed":
                self.reasons[str(host)] = f"{self._title(data)}: {self._why(data)}"
                yield self._op(data, "failed", detail=self._why(data))
            case "runner_on_unreachable":
                self.reasons[str(host)] = f"unreachable: {self._why(data)}"
                yield self._op(data, "failed", detail=f"unreachable: {self._why(data)}")
            case "playbook_on_stats":
                self.stats = {key: value for key, value in data.items() if isinstance(value, dict)}
            case "verbose" | "error" | "warning" | "deprecated" | "system_warning":
                lines = self.shown(str(raw.get("stdout") or "")).splitlines()
                self.said = [*self.said, *filter(str.strip, lines)][-_MOST_SAID:]

    def shown(self, text: str) -> str:
        """`text` without any secret."""
        for line in self._hidden:
            text = text.replace(line, "***")
        return text

    @cached_property
    def _hidden(self) -> list[str]:
        """The secrets and their lines, since texts are cut into lines; what holds another comes before it."""
        lines = {line.strip() for secret in self.secrets for line in secret.splitlines()}
        telling = {line for line in lines if len(line) > 3}  # no brace on a line of its own
        return sorted({*filter(None, self.secrets), *telling}, key=len, reverse=True)

    def _op(self, data: Mapping[str, Any], outcome: str, detail: str | None = None) -> Event:
        event: Event = {
            "event": "op",
            "node": data.get("host"),
            "step": self.play,
            "title": self._title(data),
            "outcome": outcome,
            "seconds": round(float(data.get("duration") or 0.0), 3),
        }
        if detail:
            event["detail"] = detail
        return event

    def _title(self, data: Mapping[str, Any]) -> str:
        """The name of a task, `role : task` for one of a role; a name may be made of variables."""
        return self.shown(str(data.get("task") or data.get("task_action") or "task"))

    def _why(self, data: Mapping[str, Any]) -> str:
        return self.shown(explain(_result(data)))[:_MOST_DETAIL]


def explain(result: Mapping[str, Any]) -> str:
    """Why a task failed, out of its result: the failed items of a loop, else message and last words."""
    if result.get("_ansible_no_log") or result.get("censored"):
        return "(not shown: the task has no_log)"
    failed = [item for item in result.get("results") or [] if isinstance(item, dict) and item.get("failed")]
    if failed:
        return "; ".join(f"{item.get('item')}: {explain(item)}" for item in failed[:5])
    parts = [str(result.get(key) or "").strip() for key in ("msg", "module_stderr", "stderr")]
    if not parts[2]:
        parts.append(str(result.get("stdout") or "").strip())
    lines = [line for part in dict.fromkeys(filter(None, parts)) for line in part.splitlines()[-5:]]
    rc = result.get("rc")
    text = "; ".join(line.strip() for line in lines if line.strip())
    return text or (f"exit status {rc}" if rc is not None else "no reason given")


def node_events(reader: Reader, ended: str, seconds: float, nodes: Sequence[str]) -> list[Event]:
    """The last word on each node that took part.

    `ended` is ansible-runner's status: successful, failed, canceled, timeout. Without Ansible's own summary the
    run was cut short: then every node of `nodes` that had not failed by itself shares that fate.
    """
    cut = {"canceled": "interrupted", "timeout": "not done in time"}.get(ended)
    if reader.stats is None:
        verdicts = {
            node: reader.reasons.get(node) or cut or "the playbook did not come to its end" for node in nodes
        }
        return [_node(name, reason, 0, seconds) for name, reason in verdicts.items()]
    stats = reader.stats
    events = []
    for name in sorted(stats.get("processed", {})):
        bad = stats.get("failures", {}).get(name) or stats.get("dark", {}).get(name)
        reason = reader.reasons.get(name, "failed") if bad else cut
        events.append(_node(name, reason, stats.get("changed", {}).get(name, 0), seconds))
    return events


def _node(name: str, reason: str | None, changed: int, seconds: float) -> Event:
    return {
        "event": "node",
        "node": name,
        "verdict": "fail" if reason else "pass",
        "reason": reason,
        "changed": changed,
        "seconds": seconds,
    }


def _result(data: Mapping[str, Any]) -> Mapping[str, Any]:
    result = data.get("res")
    return result if isinstance(result, dict) else {}
