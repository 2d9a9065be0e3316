"""A hub for one process: the few endpoints through which huggingface_hub uploads and downloads, on loopback."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

COMMIT = "0" * 40
"""The only one that there ever is: a later push goes into it."""


class Hub(ThreadingHTTPServer):
    """Repositories by name, each a dict of files. `asked` holds what it was asked for and did not know."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        path, body = unquote(self.path), self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            said = json.loads(body)
            name = "/".join(filter(None, (said.get("organization") or "me", said["name"])))
            self.server.repositories.setdefault(name, {})
            self.answer({"url": f"{self.server.url}/{name}"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif path.startswith("/api/models/") and "/preupload/" in path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self.answer({"files": files})
        elif path.startswith("/api/models/") and "/commit/" in path:
            name = path.removeprefix("/api/models/").partition("/commit/")[0]
            files = self.server.repositories[name]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "deletedFile":
                    del files[line["value"]["path"]]
            self.answer({"commitUrl": f"{self.server.url}/{name}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self.unknown()

    def do_GET(self) -> None:
        path = unquote(self.path).partition("?")[0]
        if path.startswith("/api/models/"):
            name, _, listed = path.removeprefix("/api/models/").partition("/tree/")
            name = name.partition("/revision/")[0]
            if listed and name in self.server.repositories:
                held = self.server.repositories[name]
                self.answer([{"type": "file", "path": key, "size": len(held[key]), "oid": ""} for key in held])
                return
            if name not in self.server.repositories:
                self.unknown("RepoNotFound")
                return
            files = [{"rfilename": file} for file in self.server.repositories[name]]
            self.answer({"id": name, "modelId": name, "sha": COMMIT, "siblings": files, "tags": [], "private": False})
            return
        name, _, rest = path.strip("/").partition("/resolve/")
        file = rest.partition("/")[2]
        if name not in self.server.repositories:
            self.unknown("RepoNotFound")
        elif file not in self.server.repositories[name]:
            self.unknown("EntryNotFound")
        else:
            held = self.server.repositories[name][file]
            self.answer(held, {"ETag": f'"{hashlib.sha256(held).hexdigest()}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, what: object, headers: dict[str, str] | None = None, status: int = 200) -> None:
        body = what if isinstance(what, bytes) else json.dumps(what).encode()
        kind = "application/octet-stream" if isinstance(what, bytes) else "application/json"
        self.send_response(status)
        for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def unknown(self, code: str | None = None) -> None:
        if code is None:
            self.server.asked.append(f"{self.command} {self.path}")
        self.answer({}, {"X-Error-Code": code, "X-Repo-Commit": COMMIT} if code else None, 404)


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
