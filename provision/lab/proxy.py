"""An HTTP forward proxy for apt, with a cache of the files that never change.

    python -m provision.lab.proxy --listen 10.77.0.1:3128 --cache DIR [--netns PATH]

It listens in the network namespace at PATH and connects out from the one it was started in: nodes reach
package archives (ports 80 and 443) and nothing else, without routes, NAT or DNS of their own.
Archives (`*.deb`) and indices named by their digest (`by-hash/`) are kept below DIR by host and path.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from provision.lab.netns import inside

PORTS = {80, 443}
CHUNK = 1 << 16
MAX_HEAD = 1 << 15
HOP_BY_HOP = {"connection", "proxy-connection", "keep-alive", "proxy-authorization", "te", "upgrade"}
UPSTREAM_TIMEOUT = 60.0


class Refused(Exception):
    """A request that is answered with an error: status line and one sentence."""

    def __init__(self, status: str, why: str) -> None:
        super().__init__(why)
        self.status = status


def cacheable(path: str) -> bool:
    """Whether what is at `path` never changes: package files, and indices named by their own digest."""
    return path.endswith((".deb", ".udeb")) or "/by-hash/SHA256/" in path


def cache_file(cache: Path, host: str, path: str) -> Path:
    """Where the body of http://host/path is kept. Raises Refused for a path that leads out of the cache."""
    parts = [part for part in unquote(path).split("/") if part]
    if not host or "/" in host or any(part in (".", "..") or "\0" in part for part in (host, *parts)):
        raise Refused("400 Bad Request", f"a path that cannot be: {path}")
    return cache.joinpath(host, *parts)


def parse_head(head: bytes) -> tuple[str, dict[str, str]]:
    """First line and headers (names in lower case) of a request or an answer."""
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    return first, headers


async def _read_head(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), UPSTREAM_TIMEOUT)


async def _body(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """The body of an answer: `length` bytes, or all until the other side closes."""
    left = length
    while left is None or left > 0:
        chunk = await asyncio.wait_for(
            reader.read(CHUNK if left is None else min(CHUNK, left)), UPSTREAM_TIMEOUT
        )
        if not chunk:
            return
        left = None if left is None else left - len(chunk)
        yield chunk


class Proxy:
    """One proxy; `serve` runs it on a listening socket until it is cancelled."""

    def __init__(self, cache: Path, ports: set[int] = PORTS) -> None:
        self.cache = cache
        self.ports = ports

    async def serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._client, sock=listener, limit=MAX_HEAD)
        async with server:
            await server.serve_forever()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            pass  # the client or the archive went away; apt sees the short answer and tries again
        finally:
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can carry another."""
        first, headers = parse_head(await reader.readuntil(b"\r\n\r\n"))
        try:
            method, target, *_ = first.split(" ")
            if method == "CONNECT":
                await self._tunnel(target, reader, writer)
                return False
            if method not in ("GET", "HEAD"):
                raise Refused("405 Method Not Allowed", f"{method}: only GET, HEAD and CONNECT")
            return await self._fetch(method, target, headers, writer)
        except (Refused, OSError, ValueError) as error:
            status = error.status if isinstance(error, Refused) else "502 Bad Gateway"
            text = f"{first}: {error}\n".encode()
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n".encode()
            )
            writer.write(text)
            await writer.drain()
            return False

    async def _connect(
        self, host: str | None, port: int
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if not host or port not in self.ports:
            raise Refused("403 Forbidden", f"port {port} of {host}: allowed are ports {sorted(self.ports)}")
        return await asyncio.wait_for(asyncio.open_connection(host, port, limit=MAX_HEAD), UPSTREAM_TIMEOUT)

    async def _tunnel(self, target: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(f"//{target}")
        far_reader, far_writer = await self._connect(address.hostname, address.port or 443)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while chunk := await source.read(CHUNK):
                sink.write(chunk)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()

        try:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:
            far_writer.close()

    async def _fetch(
        self, method: str, target: str, headers: dict[str, str], writer: asyncio.StreamWriter
    ) -> bool:
        url = urlsplit(target)
        if url.scheme != "http" or not url.hostname:
            raise Refused("400 Bad Request", "expected an absolute http:// address")
        kept = (
            cache_file(self.cache, url.hostname, url.path) if cacheable(url.path) and not url.query else None
        )
        if kept is not None and kept.is_file():
            await self._answer_from(kept, method, writer)
            return True
        far_reader, far_writer = await self._connect(url.hostname, url.port or 80)
        try:
            path = (url.path or "/") + (f"?{url.query}" if url.query else "")
            passed = "".join(f"{k}: {v}\r\n" for k, v in headers.items() if k not in HOP_BY_HOP | {"host"})
            request = f"{method} {path} HTTP/1.1\r\nHost: {url.netloc}\r\n{passed}Connection: close\r\n\r\n"
            far_writer.write(request.encode())
            head = await _read_head(far_reader)
            status, answer = parse_head(head)
            code = status.split(" ")[1]
            chunked = "chunked" in answer.get("transfer-encoding", "").lower()
            length = int(answer["content-length"]) if "content-length" in answer and not chunked else None
            if method == "HEAD" or code in ("204", "304"):
                length = 0
            lines = [
                line
                for line in head.split(b"\r\n")
                if line.split(b":")[0].strip().lower().decode("latin-1") not in HOP_BY_HOP
            ]
            alive = length is not None
            lines.insert(1, b"Connection: " + (b"keep-alive" if alive else b"close"))
            writer.write(b"\r\n".join(lines))
            keep = kept if code == "200" and method == "GET" and length is not None else None
            whole = await self._pass_body(far_reader, length, writer, keep)
            return alive and whole
        finally:
            far_writer.close()

    async def _pass_body(
        self,
        reader: asyncio.StreamReader,
        length: int | None,
        writer: asyncio.StreamWriter,
        keep: Path | None,
    ) -> bool:
        """Hand the body on, and keep it in the file `keep` when all of it came."""
        with contextlib.ExitStack() as stack:
            copy = None
            if keep is not None:
                keep.parent.mkdir(parents=True, exist_ok=True)
                copy = stack.enter_context(
                    tempfile.NamedTemporaryFile(dir=keep.parent, prefix=".part-", delete=True)
                )
            got = 0
            async for chunk in _body(reader, length):
                got += len(chunk)
                writer.write(chunk)
                if copy is not None:
                    copy.write(chunk)
                await writer.drain()
            whole = length is None or got == length
            if copy is not None and keep is not None and whole:
                copy.flush()
                os.fchmod(copy.fileno(), 0o644)
                with contextlib.suppress(FileExistsError):  # another node fetched the same file meanwhile
                    os.link(copy.name, keep)
        return whole

    async def _answer_from(self, file: Path, method: str, writer: asyncio.StreamWriter) -> None:
        with file.open("rb") as content:
            size = os.fstat(content.fileno()).st_size
            writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
            while method == "GET" and (chunk := content.read(CHUNK)):
                writer.write(chunk)
                await writer.drain()


def listen(address: str, netns: str | None) -> socket.socket:
    """A listening socket at `address` (host:port; port 0 takes any) in the network namespace at `netns`."""
    host, _, port = address.rpartition(":")
    if netns is None:
        return socket.create_server((host, int(port)), backlog=128)
    with inside(netns):
        return socket.create_server((host, int(port)), backlog=128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--netns")
    options = parser.parse_args()
    listener = listen(options.listen, options.netns)
    print(listener.getsockname()[1], flush=True)  # whoever started this waits for the line
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    asyncio.run(Proxy(options.cache).serve(listener))


if __name__ == "__main__":
    main()
