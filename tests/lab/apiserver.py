"""A real API server of Kubernetes with its etcd, on the loopback, for as long as a block lasts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.authority import Authority

PROGRAMS = ("etcd", "kube-apiserver", "kubectl")
READY_SECONDS = 180.0  # on a machine that does other work


@dataclass(frozen=True)
class ApiServer:
    """Where it is, who may talk to it, and its administrator's `kubectl`."""

    folder: Path
    authority: Authority
    port: int
    process: subprocess.Popen[bytes] = field(repr=False)

    def kubectl(self, *words: str, given: str = "", by: str = "admin") -> str:
        """What kubectl prints with the kubeconfig of `by`. Raises CalledProcessError, kubectl's words in `stderr`."""
        return subprocess.run(
            ["kubectl", "--kubeconfig", str(self.folder / f"{by}.conf"), *words],
            input=given,
            env={**os.environ, "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def node(self, name: str) -> dict[str, Any]:
        document = json.loads(self.kubectl("get", "node", name, "-o", "json"))
        assert isinstance(document, dict)
        return document

    def add(self, *names: str, of: str) -> None:
        """Node objects as kubelets make them, with a label that tells whose they are."""
        about = [{"name": name, "labels": {"of": of}} for name in names]
        nodes = [{"apiVersion": "v1", "kind": "Node", "metadata": each} for each in about]
        self.kubectl(
            "create", "-f", "-", given=json.dumps({"apiVersion": "v1", "kind": "List", "items": nodes})
        )

    def kubeconfig(self, name: str, *, token: str = "", port: int | None = None) -> Path:
        """A kubeconfig as kubectl writes it: by the certificate `name`, or by a token in a file beside it."""
        path = self.folder / f"{name}.conf"
        path.unlink(missing_ok=True)
        address, authority = f"https://127.0.0.1:{port or self.port}", self.folder / "ca.crt"
        self._configure(
            name, "set-cluster", "atlas", f"--server={address}", f"--certificate-authority={authority}"
        )
        if token:
            (self.folder / f"{name}.token").write_text(token)
            self._configure(name, "set", "users.me.tokenFile", f"{name}.token")
        else:
            pem = self.folder / f"{name}.pem"
            self._configure(
                name, "set-credentials", "me", f"--client-certificate={pem}", f"--client-key={pem}"
            )
        self._configure(name, "set-context", "atlas", "--cluster=atlas", "--user=me")
        self._configure(name, "use-context", "atlas")
        return path

    def _configure(self, name: str, *words: str) -> None:
        self.kubectl("config", *words, by=name)

    @contextmanager
    def hanging(self) -> Iterator[None]:
        """It takes connections, and answers nothing."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def api_server(folder: Path) -> Iterator[ApiServer]:
    """It judges rights by Node and RBAC, as kubeadm sets it up, and is gone afterwards."""
    authority = Authority.made(folder)
    authority.vouch("server", "/CN=kube-apiserver")
    authority.vouch("admin", "/O=system:masters/CN=admin")
    store, port = _free_port(), _free_port()
    with ExitStack() as stack:
        stack.enter_context(_running(folder, _etcd(folder, store, _free_port())))
        process = stack.enter_context(_running(folder, _apiserver(folder, port, store)))
        server = ApiServer(folder, authority, port, process)
        server.kubeconfig("admin")
        _wait(server)
        yield server


def _etcd(folder: Path, port: int, peers: int) -> list[str]:
    own, between = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{peers}"
    return [
        *("etcd", "--data-dir", str(folder / "etcd"), "--unsafe-no-fsync"),
        *("--listen-client-urls", own, "--advertise-client-urls", own),
        *("--listen-peer-urls", between, "--initial-advertise-peer-urls", between),
        *("--initial-cluster", f"default={between}"),
    ]


def _apiserver(folder: Path, port: int, store: int) -> list[str]:
    return [
        *("kube-apiserver", "--bind-address=127.0.0.1", f"--secure-port={port}"),
        *(f"--etcd-servers=http://127.0.0.1:{store}", "--service-cluster-ip-range=192.0.2.0/24"),
        *(f"--tls-cert-file={folder / 'server.crt'}", f"--tls-private-key-file={folder / 'server.key'}"),
        *(f"--client-ca-file={folder / 'ca.crt'}", "--authorization-mode=Node,RBAC"),
        *("--enable-admission-plugins=NodeRestriction", "--endpoint-reconciler-type=none"),
        f"--service-account-key-file={folder / 'server.crt'}",
        f"--service-account-signing-key-file={folder / 'server.key'}",
        "--service-account-issuer=https://kubernetes.default.svc",
    ]


@contextmanager
def _running(folder: Path, words: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A program that writes to a log of its name, ended with the block."""
    with open(folder / f"{words[0]}.log", "wb") as log:
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(server: ApiServer) -> None:
    """Until it is ready. Raises AssertionError with the end of its log."""
    deadline = time.monotonic() + READY_SECONDS
    while not _ready(server):
        log = (server.folder / "kube-apiserver.log").read_text(errors="replace")[-4000:]
        assert server.process.poll() is None, log
        assert time.monotonic() < deadline, log
        time.sleep(0.5)


def _ready(server: ApiServer) -> bool:
    try:
        return server.kubectl("get", "--raw", "/readyz") == "ok"
    except subprocess.CalledProcessError:
        return False


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
