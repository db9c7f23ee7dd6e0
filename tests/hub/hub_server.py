"""A model hub on 127.0.0.1 that implements those requests of `huggingface_hub` that uploads and downloads make."""

import base64
import hashlib
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

USER = "tester"


class Hub(ThreadingHTTPServer):
    """The server and its content.

    Attributes:
        url: Address of the server.
        token: The token that writing requires.
        repos: Files of each repository, by path.
        objects: Large files by SHA-256.
        created: What was asked for when each repository was created.
        interruptions: Parts of paths. The connection of the next request whose path has the first one is closed.
    """

    daemon_threads = True

    def __init__(self, token: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.token = token
        self.repos: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.created: dict[str, dict[str, Any]] = {}
        self.interruptions: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        match self._parts():
            case ["api", "models", owner, name, "tree", *_]:
                self._fail("EntryNotFound")
            case ["api", "models", owner, name, *_] if f"{owner}/{name}" in self.server.repos:
                files = self.server.repos[f"{owner}/{name}"]
                siblings = [{"rfilename": path} for path in files]
                self._send({"id": f"{owner}/{name}", "sha": _revision(files), "siblings": siblings, "tags": []})
            case [owner, name, "resolve", _, *path] if f"{owner}/{name}" in self.server.repos:
                files = self.server.repos[f"{owner}/{name}"]
                content = files.get("/".join(path))
                if content is None:
                    self._fail("EntryNotFound", {"X-Repo-Commit": _revision(files)})
                else:
                    headers = {"X-Repo-Commit": _revision(files), "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
                    self._send(content, headers=headers)
            case _:
                self._fail("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def do_PUT(self) -> None:
        content, (_, oid) = self._body(), self._parts()
        if self._drop():
            return
        assert hashlib.sha256(content).hexdigest() == oid
        self.server.objects[oid] = content
        self._send({})

    def do_POST(self) -> None:
        body, parts = self._body(), self._parts()
        if self._drop():
            return
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._send({"error": "Invalid credentials"}, 401)
            return
        match parts:
            case ["api", "repos", "create"]:
                asked = json.loads(body)
                repo = f"{asked.get('organization') or USER}/{asked['name']}"
                self.server.created[repo] = asked
                status = 409 if repo in self.server.repos else 200
                self.server.repos.setdefault(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
                self._send({"url": f"{self.server.url}/{repo}"}, status)
            case ["api", "validate-yaml"]:
                self._send({"errors": [], "warnings": []})
            case ["api", "models", _, _, "preupload", _]:
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = {path: "lfs" if path.endswith(".safetensors") else "regular" for path in paths}
                kept = {"shouldIgnore": False}
                self._send({"files": [{"path": path, "uploadMode": mode} | kept for path, mode in modes.items()]})
            case [_, _, "info", "lfs", "objects", "batch"]:
                self._send({"transfer": "basic", "objects": list(map(self._large_file, json.loads(body)["objects"]))})
            case ["api", "models", owner, name, "commit", _]:
                files = self.server.repos[f"{owner}/{name}"]
                for operation in map(json.loads, body.splitlines()):
                    value = operation["value"]
                    if operation["key"] == "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    elif operation["key"] == "lfsFile":
                        files[value["path"]] = self.server.objects[value["oid"]]
                url = f"{self.server.url}/{owner}/{name}/commit/{_revision(files)}"
                self._send({"commitUrl": url, "commitOid": _revision(files)})
            case _:
                self._fail("EntryNotFound")

    def _large_file(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if wanted["oid"] in self.server.objects:
            return wanted
        return wanted | {"actions": {"upload": {"href": f"{self.server.url}/objects/{wanted['oid']}"}}}

    def _parts(self) -> list[str]:
        return [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _drop(self) -> bool:
        """Close the connection without a response if this request is to be interrupted."""
        if not self.server.interruptions or self.server.interruptions[0] not in self.path:
            return False
        self.server.interruptions.pop(0)
        self.close_connection = True
        return True

    def _fail(self, code: str, headers: dict[str, str] | None = None) -> None:
        self._send({"error": code}, 404, {"X-Error-Code": code, **(headers or {})})

    def _send(self, content: bytes | Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _revision(files: dict[str, bytes]) -> str:
    """Return a commit hash that is determined by the content."""
    return hashlib.sha1(b"".join(path.encode() + content for path, content in sorted(files.items()))).hexdigest()
