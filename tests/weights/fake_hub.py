"""As much of the Hugging Face hub as an upload needs, on this machine."""

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread


class FakeHub(ThreadingHTTPServer):
    """Writes the files of a commit into a folder; answers with `status` to the first request of an upload."""

    def __init__(self, folder: Path, status: int) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.folder = folder
        self.status = status
        self.created: list[dict[str, object]] = []
        self.tokens: set[str | None] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answers(BaseHTTPRequestHandler):
    server: FakeHub

    def do_GET(self) -> None:
        self._answer(404, {})

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/api/repos/create":
            self.server.tokens.add(self.headers["authorization"])
            self.server.created.append(json.loads(sent))
            self._answer(self.server.status, {"url": f"{self.server.address}/someone/name", "error": "not yours"})
        elif "/preupload/" in self.path:
            files = [file["path"] for file in json.loads(sent)["files"]]
            modes = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in files]
            self._answer(200, {"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, sent.splitlines()):
                if line["key"] == "file":
                    content = base64.b64decode(line["value"]["content"])
                    (self.server.folder / line["value"]["path"]).write_bytes(content)
            address = f"{self.server.address}/someone/name/commit/{'0' * 40}"
            self._answer(200, {"success": True, "commitOid": "0" * 40, "commitUrl": address})
        else:
            self._answer(200, {})

    def _answer(self, status: int, value: dict[str, object]) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *what: object) -> None:
        """Say nothing."""


@contextmanager
def fake_hub(folder: Path, status: int = 200) -> Iterator[FakeHub]:
    """A hub that runs for as long as the block."""
    with FakeHub(folder, status) as hub:
        thread = Thread(target=hub.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            hub.shutdown()
            thread.join()
