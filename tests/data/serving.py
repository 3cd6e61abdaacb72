"""Servers for the tests: a folder over HTTP, and as much of the Hugging Face hub as its client asks for."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import BinaryIO
from urllib.parse import urlsplit


@contextmanager
def folder(path: Path, cuts: dict[str, list[int]] | None = None) -> Iterator[tuple[str, list[str]]]:
    """Serve a folder's files; yields the address and the names of the files that are fetched.

    `cuts` are lengths, by name: the first answers end there, though more was announced.
    """
    fetched: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            fetched.append(self.path)
            super().do_GET()

        def copyfile(self, source: BinaryIO, outputfile: BinaryIO) -> None:
            left = (cuts or {}).get(self.path.lstrip("/"), [])
            outputfile.write(source.read(left.pop(0) if left else -1))

        def log_message(self, *_: object) -> None:
            pass

    with _running(partial(Handler, directory=path)) as address:
        yield address, fetched


@contextmanager
def hub(name: str, files: dict[str, bytes], commits: dict[str, str]) -> Iterator[str]:
    """Serve one data set as the hub does, the same files in each of its revisions; yields the address."""
    known = {**commits, **{commit: commit for commit in commits.values()}}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._reply(send=False)

        def do_GET(self) -> None:
            self._reply(send=True)

        def _reply(self, send: bool) -> None:
            kind, _, rest = urlsplit(self.path).path.partition(f"/datasets/{name}/")
            action, _, rest = rest.partition("/")
            revision, _, file = rest.partition("/")
            commit = known.get(revision)
            if commit is None:
                self._send(404, b"", send, {"X-Error-Code": "RevisionNotFound"})
            elif kind == "/api" and action == "revision":
                self._send(200, json.dumps({"id": name, "sha": commit, "siblings": []}).encode(), send)
            elif kind == "/api" and action == "tree" and not file:
                listed = [{"type": "file", "path": file, "size": len(files[file]), "oid": "0" * 40} for file in files]
                self._send(200, json.dumps(listed).encode(), send)
            elif kind == "" and action == "resolve" and file in files:
                self._send(200, files[file], send, {"X-Repo-Commit": commit, "ETag": f'"{file}"'})
            else:
                self._send(404, b"", send, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})

        def _send(self, code: int, data: bytes, send: bool, headers: dict[str, str] | None = None) -> None:
            first, total = 0, len(data)
            wanted = self.headers.get("Range", "").removeprefix("bytes=")
            if wanted and code == 200:
                start, _, end = wanted.partition("-")
                first, data, code = int(start), data[int(start) : int(end or total) + 1], 206
            self.send_response(code)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            if code == 206:
                self.send_header("Content-Range", f"bytes {first}-{first + len(data) - 1}/{total}")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if send:
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with _running(Handler) as address:
        yield address


@contextmanager
def _running(handler: object) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
