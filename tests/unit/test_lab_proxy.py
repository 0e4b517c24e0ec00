"""The package cache, over loopback, in front of a small archive of our own."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from provision.lab import proxy


class Archive:
    """An HTTP server on loopback that counts what is asked of it. `answers` maps a path to a raw answer."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, bytes] = {}
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.socket.accept()
            except OSError:
                return
            with client:
                request = client.recv(65536).decode()
                self.asked.append(request)
                client.sendall(
                    self.answers.get(
                        request.split(" ")[1], b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"
                    )
                )

    def stop(self) -> None:
        """From here on connections are refused."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()

    def has(self, path: str, body: bytes, length: int | None = None) -> str:
        head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
        self.answers[path] = head.encode() + body
        return f"http://127.0.0.1:{self.port}{path}"


@pytest.fixture
def archive() -> Iterator[Archive]:
    server = Archive()
    yield server
    if server.socket.fileno() >= 0:
        server.stop()


class Cache:
    """A running proxy and a client of it."""

    def __init__(self, folder: Path, ports: set[int]) -> None:
        listener = proxy.listen("127.0.0.1:0", None)
        self.address = listener.getsockname()
        self.started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve(folder, ports, listener)))
        self.thread.start()
        self.started.wait(5)

    async def _serve(self, folder: Path, ports: set[int], listener: socket.socket) -> None:
        self.loop, self.ended = asyncio.get_running_loop(), asyncio.Event()
        serving = asyncio.create_task(proxy.Proxy(folder, ports).serve(listener))
        self.started.set()
        await self.ended.wait()
        serving.cancel()

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.ended.set)
        self.thread.join()

    def get(self, url: str, method: str = "GET", extra: str = "") -> tuple[str, bytes]:
        """Status line and body."""
        with socket.create_connection(self.address, timeout=5) as client:
            client.sendall(f"{method} {url} HTTP/1.1\r\nHost: x\r\n{extra}\r\n".encode())
            client.shutdown(socket.SHUT_WR)
            answer = b""
            while chunk := client.recv(65536):
                answer += chunk
        head, _, body = answer.partition(b"\r\n\r\n")
        return head.split(b"\r\n")[0].decode(), body


@pytest.fixture
def cache(tmp_path: Path, archive: Archive) -> Iterator[Cache]:
    running = Cache(tmp_path / "packages", {archive.port})
    yield running
    running.stop()


def test_a_package_is_fetched_once(cache: Cache, archive: Archive, tmp_path: Path) -> None:
    url = archive.has("/debian/pool/m/munge.deb", b"package" * 10_000)
    assert cache.get(url) == ("HTTP/1.1 200 OK", b"package" * 10_000)
    assert cache.get(url) == ("HTTP/1.1 200 OK", b"package" * 10_000)
    assert len(archive.asked) == 1
    assert (tmp_path / "packages/127.0.0.1/debian/pool/m/munge.deb").read_bytes() == b"package" * 10_000


def test_an_index_by_digest_is_kept_and_a_release_file_is_not(cache: Cache, archive: Archive) -> None:
    index = archive.has("/dists/trixie/main/by-hash/SHA256/ab12", b"index")
    release = archive.has("/dists/trixie/InRelease", b"release")
    for url in (index, release, index, release):
        assert cache.get(url)[0] == "HTTP/1.1 200 OK"
    assert [request.split(" ")[1] for request in archive.asked].count(
        "/dists/trixie/main/by-hash/SHA256/ab12"
    ) == 1
    assert [request.split(" ")[1] for request in archive.asked].count("/dists/trixie/InRelease") == 2


def test_half_a_package_is_handed_on_and_never_kept(cache: Cache, archive: Archive, tmp_path: Path) -> None:
    url = archive.has("/pool/half.deb", b"half", length=8)
    assert cache.get(url)[1] == b"half"
    archive.has("/pool/half.deb", b"complete")
    assert cache.get(url)[1] == b"complete"
    assert (tmp_path / "packages/127.0.0.1/pool/half.deb").read_bytes() == b"complete"


def test_an_error_of_the_archive_is_passed_on_and_not_kept(cache: Cache, archive: Archive) -> None:
    url = f"http://127.0.0.1:{archive.port}/pool/none.deb"
    assert cache.get(url)[0] == "HTTP/1.1 404 Not Found"
    archive.has("/pool/none.deb", b"there now")
    assert cache.get(url) == ("HTTP/1.1 200 OK", b"there now")


def test_the_headers_of_the_request_are_passed_on_but_not_those_for_the_proxy(
    cache: Cache, archive: Archive
) -> None:
    url = archive.has("/dists/trixie/InRelease", b"release")
    cache.get(url, extra="If-Modified-Since: yesterday\r\nProxy-Authorization: secret\r\n")
    assert "if-modified-since: yesterday" in archive.asked[0]
    assert "secret" not in archive.asked[0]


def test_several_requests_on_one_connection(cache: Cache, archive: Archive) -> None:
    one, two = archive.has("/one.deb", b"1"), archive.has("/two.deb", b"2")
    with socket.create_connection(cache.address, timeout=5) as client:
        client.sendall("".join(f"GET {url} HTTP/1.1\r\n\r\n" for url in (one, two, one)).encode())
        client.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := client.recv(65536):
            answer += chunk
    assert [part[-1:] for part in answer.split(b"HTTP/1.1 200 OK")[1:]] == [b"1", b"2", b"1"]


def test_a_tunnel_carries_what_it_is_given(cache: Cache, archive: Archive) -> None:
    archive.has("/inside", b"secret traffic")
    with socket.create_connection(cache.address, timeout=5) as client:
        client.sendall(f"CONNECT 127.0.0.1:{archive.port} HTTP/1.1\r\n\r\n".encode())
        assert client.recv(100) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        client.sendall(b"GET /inside HTTP/1.1\r\n\r\n")
        assert client.recv(1000).endswith(b"secret traffic")


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "http://127.0.0.1:1/x.deb", "HTTP/1.1 403 Forbidden"),
        ("CONNECT", "127.0.0.1:22", "HTTP/1.1 403 Forbidden"),
        ("POST", "http://127.0.0.1/x", "HTTP/1.1 405 Method Not Allowed"),
        ("GET", "/relative", "HTTP/1.1 400 Bad Request"),
        ("GET", "ftp://127.0.0.1/x", "HTTP/1.1 400 Bad Request"),
        ("GET", "http://127.0.0.1/a/../../b.deb", "HTTP/1.1 400 Bad Request"),
        ("GET", "http://127.0.0.1/a/%2e%2e/b.deb", "HTTP/1.1 400 Bad Request"),
    ],
)
def test_what_apt_never_asks_for_is_refused(cache: Cache, method: str, url: str, status: str) -> None:
    assert cache.get(url, method)[0] == status


def test_an_archive_that_does_not_answer_is_a_bad_gateway(cache: Cache, archive: Archive) -> None:
    archive.stop()
    assert cache.get(f"http://127.0.0.1:{archive.port}/x")[0] == "HTTP/1.1 502 Bad Gateway"
