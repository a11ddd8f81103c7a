"""Servers on this machine that misbehave on purpose: a file server, and one with the few answers of the Hub that
huggingface_hub asks for."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Files:
    """Paths and contents. `faults[path]` is used up from its front: a status such as 500, or

    "cut" (half of what the header says), "short" (half, and the header agrees), "wrong" (other bytes), "silent" (no
    length), "hang" (half, then nothing more), "all" (the range that was asked for is ignored), "crawl" (slowly). With
    `elsewhere`, another server's address, every file is a redirect to its place there.
    """

    def __init__(self) -> None:
        self.elsewhere = ""
        self.contents: dict[str, bytes] = {}
        self.faults: dict[str, list[int | str]] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, range
        self.headers: list[dict[str, str]] = []
        self.url = ""

    def count(self, path: str, method: str = "GET") -> int:
        return Counter((method, path) for method, path, _ in self.requests)[method, path]

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        if path not in self.contents:
            return reply(request, 404, b"no such file")
        if self.elsewhere:
            return reply(request, 302, b"", {"Location": self.elsewhere + path})
        content = self.contents[path]
        tag = f'"{hashlib.md5(content).hexdigest()}"'
        faults = self.faults.get(path, []) if request.command == "GET" else []
        fault = faults.pop(0) if faults else None
        if isinstance(fault, int):
            return reply(request, fault, b"sorry")
        start = 0
        if fault != "all" and (asked := request.headers.get("Range")) and request.headers.get("If-Range", tag) == tag:
            start = int(asked.removeprefix("bytes=").split("-")[0])
            if start >= len(content):
                return reply(request, 416, b"")
        headers = {"ETag": tag, "Accept-Ranges": "bytes", **self.extra(path)}
        body = content[start:]
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        if fault == "wrong":
            body = bytes(byte ^ 1 for byte in body)
        if fault == "short":
            body = body[: len(body) // 2]
        reply(request, 206 if start else 200, body, headers, str(fault))

    def extra(self, path: str) -> dict[str, str]:
        return {}

    def dispatch(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append((request.command, path, request.headers.get("Range")))
        self.headers.append(dict(request.headers.items()))
        self.answer(request, path)


class Hub(Files):
    """`datasets[repo]` is {file: content} at COMMIT; other paths answer as on the real Hub."""

    def __init__(self) -> None:
        super().__init__()
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.missing: set[str] = set()  # listed, but gone

    def answer(self, request: BaseHTTPRequestHandler, path: str) -> None:
        parts = path.strip("/").split("/")
        if path.startswith("/api/datasets/"):
            repo, what, rest = "/".join(parts[2:4]), parts[4], parts[5:]
            if self.faults.get(path):
                return reply(request, self.faults[path].pop(0), b"sorry")
            if repo not in self.datasets:
                return reply(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if rest[0] not in ("main", COMMIT):
                return reply(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            found = self.info(repo) if what == "revision" else self.tree(repo, "/".join(rest[1:]))
            if not found:
                return reply(request, 404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return reply(request, 200, json.dumps(found).encode(), {"Content-Type": "application/json"})
        repo, name = "/".join(parts[1:3]), "/".join(parts[5:])
        if name in self.missing or name not in self.datasets.get(repo, {}):
            return reply(request, 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        self.contents[path] = self.datasets[repo][name]
        super().answer(request, path)

    def extra(self, path: str) -> dict[str, str]:
        return {"X-Repo-Commit": COMMIT}

    def info(self, repo: str) -> dict:
        return {"id": repo, "sha": COMMIT, "private": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}

    def tree(self, repo: str, folder: str) -> list[dict]:
        names = [name for name in self.datasets[repo] if name.startswith(f"{folder}/" if folder else "")]
        return [entry(name, self.datasets[repo][name]) for name in sorted(names, reverse=True)]


def entry(name: str, content: bytes) -> dict:
    digest = hashlib.sha256(content).hexdigest()
    lfs = {"oid": digest, "size": len(content), "pointerSize": 130}
    return {"type": "file", "path": name, "size": len(content), "oid": digest[:40], "lfs": lfs}


def reply(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: dict[str, str] | None = None, fault: str = ""
) -> None:
    request.send_response(status)
    for name, value in (headers or {}).items():
        request.send_header(name, value)
    if fault != "silent":
        request.send_header("Content-Length", str(len(body)))
    request.send_header("Connection", "close")
    request.end_headers()
    request.close_connection = True
    if request.command == "HEAD":
        return
    with suppress(ConnectionError):
        half = len(body) // 2
        request.wfile.write(body[:half] if fault in ("cut", "hang", "crawl") else body)
        request.wfile.flush()
        if fault == "hang":
            request.connection.settimeout(20)
            request.connection.recv(1)  # until the client gives up
        if fault == "crawl":
            for at in range(half, len(body), 1000):  # seconds: whoever wants to stop it has time to
                request.wfile.write(body[at : at + 1000])
                request.wfile.flush()
                threading.Event().wait(0.2)


@contextmanager
def serving(files: Files) -> Iterator[Files]:
    """Serve until the end of the block; `files.url` is the address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            files.dispatch(self)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield files
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
