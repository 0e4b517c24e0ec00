"""Tells Kubernetes what was decided of this node: a condition of the Node object and, where the site wants it, a taint.

The condition can be written with the kubelet's own credentials. A taint cannot: the API server's admission plugin
NodeRestriction keeps kubelets from changing taints (kubernetes/kubernetes#63167); it needs an account of its own.

Unknown never clears either. Taints by agents stop at the `budget`, over all nodes of the cluster. Only the
taint of this agent is ever taken back.
"""

from __future__ import annotations

import calendar
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

from provision.health import budget, kubeconfig
from provision.health.decide import Decision
from provision.health.finding import PASS, SKIP, UNKNOWN, WARN

CONDITION = "NodeUnhealthy"
TAINT = "provision/unhealthy"
SECONDS = 10.0  # for one answer of the API server
SECONDS_IN_ALL = 20.0  # systemd ends a reading after 60, all that it does included
PAGE = 100  # nodes of one answer: a Node with the names of its images has some 20 KiB
TRIES = 3  # somebody else may change the node at the same time

_TIME = "%Y-%m-%dT%H:%M:%SZ"
_VALUE = "%Y%m%dT%H%M%SZ"  # letters and digits: a taint's value may have nothing else
_STRATEGIC = "application/strategic-merge-patch+json"  # conditions are merged by their type
_MERGE = "application/merge-patch+json"
_REASONS = {"drain": "NeedsDrain", "reset": "NeedsReset", "reboot": "NeedsReboot", "rma": "NeedsReplacement"}


@dataclass(frozen=True)
class Settings:
    """What the site says of Kubernetes on this node."""

    kubeconfig: Path
    node: str  # its name there
    taint: str | None = None  # the effect; None: a condition alone


class ApiError(Exception):
    """The API server refused, or did not answer; the reason."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """An API server, by the access of a kubeconfig. It is asked for SECONDS_IN_ALL, and may be silent for `seconds`."""

    def __init__(self, access: kubeconfig.Access, seconds: float = SECONDS) -> None:
        self._access = access
        self._seconds = seconds
        self._end = time.monotonic() + SECONDS_IN_ALL

    def get(self, path: str) -> dict[str, Any]:
        return self._request("GET", path, None, {})

    def patch(self, path: str, document: Mapping[str, Any], kind: str) -> dict[str, Any]:
        return self._request("PATCH", path, json.dumps(document).encode(), {"Content-Type": kind})

    def _request(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> dict[str, Any]:
        """The document that is answered. Raises ApiError."""
        import http.client
        import ssl
        from urllib.parse import urlsplit

        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token}"
        server = urlsplit(self._access.server)
        seconds = min(self._seconds, self._end - time.monotonic())
        if seconds <= 0:
            raise ApiError(f"{self._access.server}: {SECONDS_IN_ALL:.0f} s were not enough for its answers")
        try:
            connection = http.client.HTTPSConnection(
                server.hostname or "", server.port or 443, timeout=seconds, context=self._context()
            )
            try:
                connection.request(method, server.path.rstrip("/") + path, body, headers)
                answer = connection.getresponse()
                text = answer.read()
            finally:
                connection.close()
            document = json.loads(text)
        except (OSError, ssl.SSLError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{self._access.server}: {error or type(error).__name__}") from error
        if not isinstance(document, dict):
            raise ApiError(f"{self._access.server}: {method} {path}: no object: {text[:80]!r}")
        if answer.status >= 300:
            why = document.get("message") or answer.reason
            raise ApiError(f"{self._access.server}: {answer.status}: {why}", answer.status)
        return document

    def _context(self) -> Any:
        import ssl

        context = ssl.create_default_context(cadata=self._access.authority)
        # from Python 3.13 on this refuses certificates without key identifiers, which every kubelet takes
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if self._access.certificate and self._access.key:
            # OpenSSL reads files alone: this one is in memory, and no other user can open it
            file = os.memfd_create("client")
            try:
                os.write(file, f"{self._access.certificate}\n{self._access.key}\n".encode())
                context.load_cert_chain(f"/proc/self/fd/{file}")
            finally:
                os.close(file)
        return context


# ---- what is to be said. Pure.


def condition(current: Mapping[str, Any] | None, decision: Decision, now: float) -> dict[str, Any]:
    """The node's condition after `decision`; current: as it is in the API. "True" is unhealthy."""
    status, reason, message = _status(decision)
    if status is None:
        if current is not None and current.get("status") == "True":
            status, reason, message = "True", current.get("reason", ""), current.get("message", "")
        else:
            status = "Unknown" if decision.verdict == UNKNOWN else "False"
    since = _written(now)
    if current is not None and current.get("status") == status:
        since = current.get("lastTransitionTime") or since
    return {
        "type": CONDITION,
        "status": status,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": _written(now),
        "lastTransitionTime": since,
    }


def _status(decision: Decision) -> tuple[str | None, str, str]:
    """Status, reason and message; no status where the decision neither sets nor clears the condition."""
    if decision.drain:
        return "True", _REASONS.get(decision.action or "", "NeedsDrain"), decision.reason
    if decision.verdict in (PASS, WARN, SKIP):
        return "False", "Well", decision.reason
    return None, "CannotTell" if decision.verdict == UNKNOWN else "NeedsMending", decision.reason


def taint(effect: str, now: float) -> dict[str, str]:
    """The taint of this agent. Its value is when it was set: what drains by agents in an hour are counted by."""
    return {"key": TAINT, "value": time.strftime(_VALUE, time.gmtime(now)), "effect": effect}


def found(node: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The condition of this agent in a Node object."""
    for each in (node.get("status") or {}).get("conditions") or ():
        if each.get("type") == CONDITION:
            condition_: Mapping[str, Any] = each
            return condition_
    return None


def tainted_since(node: Mapping[str, Any]) -> str | None:
    """The value of this agent's taint; None where the node has none."""
    return next((str(each.get("value")) for each in _taints(node) if each.get("key") == TAINT), None)


def _taints(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((node.get("spec") or {}).get("taints") or ())


def _written(now: float) -> str:
    return time.strftime(_TIME, time.gmtime(now))


def moment(text: Any, form: str = _TIME) -> float | None:
    """Seconds since 1970 of a time as Kubernetes writes it, or in another form; None where it is none."""
    try:
        return float(calendar.timegm(time.strptime(str(text), form)))
    except ValueError:
        return None


# ---- what is done


def tell(
    settings: Settings,
    decision: Decision,
    *,
    acting: bool,
    api: Api | None = None,
    now: Callable[[], float] = time.time,
) -> str:
    """Write condition and taint; what was done, in words. `acting`: taints may be changed.

    Raises ApiError, KubeconfigError.
    """
    at = api or Api(kubeconfig.load(settings.kubeconfig))
    path = f"/api/v1/nodes/{settings.node}"
    with _advised(settings):
        told = condition(found(at.get(path)), decision, now())
        node = at.patch(f"{path}/status", {"status": {"conditions": [told]}}, _STRATEGIC)
        if settings.taint is None or not acting or told["status"] == "Unknown":
            return ""
        unhealthy = told["status"] == "True"
        if unhealthy == (tainted_since(node) is not None):
            return ""
        if unhealthy:
            return _taint(at, settings, node, taint(settings.taint, now()), decision.reason, now)
        _set(at, settings, node, [])
        return "taint removed: all is well again"


def asked(settings: Settings, now: float) -> dict[str, Any]:
    """What the API has of this agent's condition. Raises ApiError, KubeconfigError."""
    with _advised(settings):
        node = Api(kubeconfig.load(settings.kubeconfig)).get(f"/api/v1/nodes/{settings.node}")
    has = found(node) or {}
    heard = moment(has.get("lastHeartbeatTime"))
    return {
        "status": has.get("status"),
        "reason": has.get("reason"),
        "message": has.get("message"),
        "seconds": None if heard is None else round(now - heard),
        "tainted": tainted_since(node),
    }


@contextmanager
def _advised(settings: Settings) -> Iterator[None]:
    """What the API server refuses within the block is told with what to do about it."""
    try:
        yield
    except ApiError as error:
        advice = {
            401: f"the certificate or token of {settings.kubeconfig} is not known there, or has expired",
            403: "a kubelet may write of its own node alone: health.kubernetes.node in the site file"
            if settings.taint is None
            else "a kubelet may not change taints: name the kubeconfig of an account that may, see docs/health.md",
            404: "health.kubernetes.node in the site file is the name that the node has there",
        }.get(error.status)
        if advice is None:
            raise
        raise ApiError(f"{error}; {advice}", error.status) from error


def _taint(
    api: Api,
    settings: Settings,
    node: Mapping[str, Any],
    own: Mapping[str, str],
    reason: str,
    now: Callable[[], float],
) -> str:
    """Taint the node with `own` within the budget; what was done, in words."""
    if budget.used_up(*_tainted(api, now()), now()):
        return f"ALERT: no taint, the budget of an hour is used up: {reason}"
    _set(api, settings, node, [own])
    if not budget.stays(settings.node, lambda: _tainted(api, now()), now):
        _set(api, settings, api.get(f"/api/v1/nodes/{settings.node}"), [])
        return f"ALERT: taint removed, the budget of an hour is used up: {reason}"
    return f"tainted: {reason}"


def _set(api: Api, settings: Settings, node: Mapping[str, Any], own: Sequence[Mapping[str, Any]]) -> None:
    """Replace this agent's taint by `own`; those of others stay.

    All taints are one value of the Node object: it is written only where nobody has changed it since it was read.
    """
    path = f"/api/v1/nodes/{settings.node}"
    for attempt in range(1, TRIES + 1):
        document = {
            "metadata": {"resourceVersion": (node.get("metadata") or {}).get("resourceVersion")},
            "spec": {"taints": [*(each for each in _taints(node) if each.get("key") != TAINT), *own]},
        }
        try:
            api.patch(path, document, _MERGE)
            return
        except ApiError as error:
            if error.status != 409 or attempt == TRIES:
                raise
            node = api.get(path)


def _tainted(api: Api, now: float) -> tuple[dict[str, float], int]:
    """Node -> when an agent tainted it, and how many nodes there are."""
    from urllib.parse import quote

    since: dict[str, float] = {}
    size, more = 0, ""
    while True:
        page = api.get(f"/api/v1/nodes?limit={PAGE}" + (f"&continue={quote(more)}" if more else ""))
        for each in page.get("items") or ():
            size += 1
            value = tainted_since(each)
            if value is not None:
                # a moment that cannot be read counts: the budget errs on the careful side
                since[each["metadata"]["name"]] = moment(value, _VALUE) or now
        more = (page.get("metadata") or {}).get("continue") or ""
        if not more:
            return since, size
