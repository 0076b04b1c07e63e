"""The Hugging Face hub's HTTP interface on loopback, as far as uploads and downloads of models use it."""

import base64
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "{:040x}"


@dataclass
class Repository:
    private: bool
    writers: tuple[str, ...] = ("me",)
    commits: list[str] = field(default_factory=list)
    files: dict[str, bytes] = field(default_factory=lambda: {".gitattributes": b""})

    @property
    def head(self) -> str:
        return COMMIT.format(len(self.commits) + 1)


class HubServer(ThreadingHTTPServer):
    """Repositories by name, and what was asked. It quotes the token in what it refuses, as a bad server might."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.tokens = {"hf_mine": ("me", "write"), "hf_reader": ("me", "read"), "hf_other": ("other", "write")}
        """Users and roles."""
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # uploaded by LFS, by SHA-256
        self.asked: list[tuple[str, str, str | None]] = []  # method, path and authorization
        self.fails_at = ""  # part of the path of requests that are refused


class Handler(BaseHTTPRequestHandler):
    server: HubServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        match self._begun():
            case ["api", "whoami-v2"]:
                self._answer({"name": self._user[0], "auth": {"accessToken": {"role": self._user[1]}}})
            case ["api", "models", owner, name] | ["api", "models", owner, name, "revision", _]:
                if (found := self._found(f"{owner}/{name}")) is not None:
                    files = [{"rfilename": file} for file in found.files]
                    facts = {"private": found.private, "sha": found.head, "siblings": files}
                    self._answer({"id": f"{owner}/{name}", **facts})
            case ["api", "models", owner, name, "tree", *_]:
                if (found := self._found(f"{owner}/{name}")) is not None:
                    sizes = {file: {"size": len(data), "oid": _oid(data)} for file, data in found.files.items()}
                    self._answer([{"type": "file", "path": file, **size} for file, size in sizes.items()])
            case [owner, name, "resolve", head, *place]:
                if (found := self._found(f"{owner}/{name}")) is not None:
                    data = found.files["/".join(place)]
                    self._answer(data, headers={"ETag": _oid(data), "X-Repo-Commit": head})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        match self._begun():
            case ["api", "repos", "create"]:
                asked = json.loads(content)
                name = f"{asked['organization']}/{asked['name']}"
                if asked["organization"] != self._user[0]:
                    return self._refuse(403, f"You don't have the rights to create a model under {name}")
                if name in self.server.repositories:
                    return self._answer({"error": "exists", "url": f"{self.server.address}/{name}"}, 409)
                self.server.repositories[name] = Repository(asked["visibility"] == "private", (self._user[0],))
                self._answer({"url": f"{self.server.address}/{name}"})
            case ["api", "validate-yaml"]:
                self._answer({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", "main"]:
                files = json.loads(content)["files"]
                modes = [("lfs" if file["path"].endswith((".safetensors", ".png")) else "regular") for file in files]
                pairs = zip(files, modes, strict=True)
                self._answer({"files": [{"path": f["path"], "uploadMode": m, "shouldIgnore": False} for f, m in pairs]})
            case [_, _, "info", "lfs", "objects", "batch"]:
                wanted, at = json.loads(content)["objects"], f"{self.server.address}/lfs/"
                uploads = [{**each, "actions": {"upload": {"href": at + each["oid"]}}} for each in wanted]
                self._answer({"objects": uploads})
            case ["api", "models", owner, name, "commit", "main"]:
                self._commit(self.server.repositories[f"{owner}/{name}"], content, f"{owner}/{name}")

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        match self._begun(secret=False):
            case ["lfs", oid]:
                assert hashlib.sha256(content).hexdigest() == oid
                self.server.objects[oid] = content
                self._answer({})

    def _commit(self, found: Repository, content: bytes, name: str) -> None:
        lines = [json.loads(line) for line in content.splitlines()]
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, found.head):
            return self._refuse(412, "A commit has happened since")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                found.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                found.files[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                del found.files[value["path"]]
        found.commits.append(header["summary"])
        self._answer({"commitUrl": f"{self.server.address}/{name}/commit/{found.head}", "commitOid": found.head})

    def _begun(self, secret: bool = True) -> list[str]:
        """Parts of the path; none where the request is answered already."""
        path, given = self.path.partition("?")[0], self.headers.get("Authorization")
        self.server.asked.append((self.command, path, given))
        self._user = self.server.tokens.get((given or "").removeprefix("Bearer "), ("", ""))
        if self.server.fails_at and self.server.fails_at in path:
            self._refuse(400, f"this server takes nothing from {given}")
        elif secret and not self._user[0]:
            self._refuse(401, f"Invalid credentials {given}")
        else:
            return path.removeprefix("/").replace(".git/", "/").split("/")
        return []

    def _found(self, name: str) -> Repository | None:
        found = self.server.repositories.get(name)
        if found is None or (found.private and self._user[0] not in found.writers):
            self._refuse(404, "Repository not found", "RepoNotFound")
            return None
        return found

    def _refuse(self, code: int, said: str, kind: str = "") -> None:
        self._answer({"error": said}, code, {"X-Error-Message": said, "X-Error-Code": kind})

    def _answer(self, value: Any, code: int = 200, headers: Mapping[str, str] = {}) -> None:
        content = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(code)
        for key, text in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(key, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@contextmanager
def hub_served() -> Iterator[HubServer]:
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
