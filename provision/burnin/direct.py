"""The burn-in on nodes without a scheduler: the same program, its ranks started over ssh on all nodes at once.

On each node it is a transient unit of systemd: it outlives a lost connection, a second one is refused, and stopping it
ends all its processes. The folder may be the same on all nodes, but need not: the program is put on every one, and
the result fetched from the node of the rank that wrote it.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from shlex import join, quote
from typing import TypeVar

from provision.burnin.launch import JobState, LaunchError, Outcome, archive, variables
from provision.components.slurm import acceptance
from provision.engine.remote import RemoteError

UNIT = "provision-burnin"
POLL_SECONDS = 2.0
STOP_SECONDS = 90
AT_ONCE = 64  # nodes that are asked at the same time
# Variables that a machine sets for a reason go along: a transient unit would start without them.
VARIABLES = "NCCL|UCX|CUDA|NVIDIA|GLOO|TORCH|OMP"
_MARK = "@@ log"
_T = TypeVar("_T")


@dataclass(frozen=True)
class Ranks:
    """What decides how one node's ranks are started."""

    node: str
    first: int  # rank
    local: int  # ranks on this node
    total: int
    address: str  # where rank 0 listens
    port: int


def start_script(
    ranks: Ranks,
    directory: str,
    python: str,
    user: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] = {},
) -> str:
    """The script that starts a node's ranks, for a root shell; `environment` is set over the machine's. Pure."""
    place = f"{ranks.first}:{ranks.local}:{ranks.total}:{ranks.address}:{ranks.port}"
    program = [*variables(environment), python, f"{directory}/burnin.pyz", "--spawn", place, *arguments]
    log = f"{directory}/job-{ranks.node}.log"
    unit = [
        "systemd-run", f"--unit={UNIT}", "--collect", "--quiet", f"--uid={user}", f"--setenv=NODE_NAME={ranks.node}",
        f"--property=TimeoutStopSec={STOP_SECONDS - 30}", "--property=LimitMEMLOCK=infinity",
        f"--property=StandardOutput=append:{log}", f"--property=StandardError=append:{log}",
    ]  # fmt: skip
    passed_on = (
        f'for name in $(compgen -e | grep -E "^({VARIABLES})_"); do set -- "$@" --setenv="$name"; done'
    )
    script = f'set --; {passed_on}; exec {join(unit)} "$@" {join(program)}'
    return f"bash -lc {quote(script)}"


class Direct:
    """Burn-in jobs on nodes that are spoken to as root; `shells` by node, in the order of their ranks."""

    def __init__(
        self,
        shells: Mapping[str, acceptance.Run],
        user: str,
        progress: Callable[[str], None],
        *,
        stop: threading.Event,
    ) -> None:
        self._shells = dict(shells)
        self._user = user
        self._progress = progress
        self._stop = stop
        self._started: set[str] = set()  # what runs on other nodes is another's
        self.lost: dict[str, str] = {}  # nodes that no longer answer, and why

    def run(
        self, root: str, addresses: Mapping[str, str], ranks_per_node: int, python: str, arguments: Sequence[str],
        timeout: float, environment: Mapping[str, str] = {},
    ) -> Outcome:  # fmt: skip
        """Start on all nodes and wait for the end. Raises LaunchError, and KeyboardInterrupt once all has ended."""
        directory = f"{root}/{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(3)}"
        nodes = list(self._shells)
        total, port = ranks_per_node * len(nodes), 20000 + secrets.randbelow(10000)
        address = addresses.get(nodes[0], nodes[0])
        options = [
            "--out", f"{directory}/result.json", "--raw", f"{directory}/ranks", "--addresses",
            f"{directory}/addresses.json", *arguments,
        ]  # fmt: skip
        self._prepare(directory, addresses)
        try:
            scripts = {
                node: start_script(
                    Ranks(node, index * ranks_per_node, ranks_per_node, total, address, port),
                    directory, python, self._user, options, environment,
                )
                for index, node in enumerate(nodes)
            }  # fmt: skip
            self._everywhere(lambda node: self._start(node, scripts[node]))
            log = self._watch(directory, timeout)
        except BaseException:
            self._end()
            raise
        return Outcome(UNIT, JobState("ENDED"), self._result(directory), directory, log)

    def _prepare(self, directory: str, addresses: Mapping[str, str]) -> None:
        self._progress(f"putting the program on {len(self._shells)} nodes")
        program, known = archive(), json.dumps(dict(addresses)).encode()
        user = quote(self._user)
        folders = f"install -d -m 755 -o {user} {quote(directory)} {quote(f'{directory}/ranks')}"

        def put(node: str) -> None:
            self._ask(node, f"mkdir -p {quote(directory)} && {folders}")
            self._ask(node, f"umask 022; cat > {quote(f'{directory}/burnin.pyz')}", program)
            self._ask(node, f"umask 022; cat > {quote(f'{directory}/addresses.json')}", known)

        self._everywhere(put)

    def _start(self, node: str, script: str) -> None:
        answer = self._shells[node](script, timeout=60)
        if answer.rc != 0:
            said = (answer.stderr or answer.stdout).strip() or f"exit {answer.rc}"
            advice = None
            if "already" in said:
                said, advice = f"another burn-in runs there ({said})", f"wait, or: systemctl stop {UNIT}"
            raise LaunchError(f"{node}: {said}", advice)
        self._started.add(node)

    def _watch(self, directory: str, timeout: float) -> list[str]:
        """Until the units have ended on all nodes that answer; the first node's lines are passed on."""
        start = time.monotonic()
        log: list[str] = []
        first = next(iter(self._shells))
        while True:
            runs = self._everywhere(lambda node: self._active(node, directory, log, first))
            late = [node for node, active in zip(self._shells, runs, strict=True) if active]
            if not late:
                return log
            if time.monotonic() - start > timeout:
                raise LaunchError(
                    f"the burn-in still ran after {timeout:.0f} s on {', '.join(late)}",
                    "look at its job logs there",
                )
            if self._stop.wait(POLL_SECONDS):
                raise KeyboardInterrupt

    def _active(self, node: str, directory: str, log: list[str], first: str) -> bool:
        if node in self.lost:
            return False
        path = quote(f"{directory}/job-{node}.log")
        tail = f"; echo; echo '{_MARK}'; tail -n +{len(log) + 1} {path}" if node == first else ""
        try:
            answer = self._shells[node](f"systemctl is-active {UNIT}{tail}", timeout=60)
        except RemoteError as error:
            self.lost[node] = str(error)
            self._progress(f"{node}: {error}; the burn-in goes on there")
            return False
        state, _, text = answer.stdout.partition(f"{_MARK}\n")
        for line in text.split("\n")[:-1]:
            log.append(line)
            self._progress(line)
        return state.split()[:1] in (["active"], ["activating"], ["deactivating"])

    def _result(self, directory: str) -> str | None:
        """From the first node that has it: the rank that writes is the lowest of those that are left."""
        for node, shell in self._shells.items():
            if node in self.lost:
                continue
            answer = shell(f"cat {quote(f'{directory}/result.json')}", timeout=60)
            if answer.rc == 0:
                return answer.stdout
        return None

    def _end(self) -> None:
        """Stop what was started, on all nodes that answer."""

        def end(node: str) -> None:
            if node in self._started and node not in self.lost:
                self._shells[node](f"systemctl stop {UNIT} 2>/dev/null", timeout=STOP_SECONDS)

        self._progress("stopping the burn-in on all nodes")
        self._everywhere(end)

    def _ask(self, node: str, command: str, stdin: bytes | None = None) -> None:
        answer = self._shells[node](command, stdin=stdin, timeout=60)
        if answer.rc != 0:
            said = (answer.stderr or answer.stdout).strip() or f"exit {answer.rc}"
            raise LaunchError(f"on {node}: {command}: {said}")

    def _everywhere(self, work: Callable[[str], _T]) -> list[_T]:
        """`work` on every node at the same time; the first error is raised when all are done."""
        with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
            futures = [pool.submit(work, node) for node in self._shells]
        return [future.result() for future in futures]
