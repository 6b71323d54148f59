"""A small Hub on the loopback interface: what `huggingface_hub` needs to push and pull over real HTTP.

It keeps every commit in memory and serves models, datasets and kernels. Nothing is authenticated: each request is
the user `user`. Start it with `LoopbackHub()`, point clients at `hub.url` through `HF_ENDPOINT` (read by the
client when it is imported, so in a subprocess), and stop it with `hub.close()`.

Routes, `KIND` being `models`, `datasets` or `kernels`, which is a prefix elsewhere but absent for models:

    GET  /api/whoami-v2                                  POST /api/repos/create, /api/validate-yaml
    POST /api/KIND/ID/preupload/REV, /commit/REV, /paths-info/REV, /branch/NAME
    POST /[KIND/]ID.git/info/lfs/objects/batch           PUT  /lfs/SHA256
    GET  /api/KIND/ID[/revision/REV], /tree/REV[/DIR], /refs
    GET or HEAD /[KIND/]ID/resolve/REV/FILE              with ETag, X-Repo-Commit and byte ranges
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".parquet", ".bin", ".png", ".jpg")
CREATED = "2026-01-01T00:00:00.000Z"


@dataclass(frozen=True)
class Blob:
    """One file's bytes; `sha256` is set when it was uploaded through LFS."""

    data: bytes
    sha256: str | None = None

    @property
    def oid(self) -> str:
        """Git's own name of the blob."""
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    def entry(self, path: str) -> dict[str, Any]:
        """The file as a row of a tree listing."""
        lfs = {"lfs": {"oid": self.sha256, "size": len(self.data), "pointerSize": 130}} if self.sha256 else {}
        return {"type": "file", "path": path, "size": len(self.data), "oid": self.oid, **lfs}


@dataclass
class Repo:
    """Commits of one repository, each a complete mapping from path to blob, and the newest of each branch."""

    branches: dict[str, str] = field(default_factory=lambda: {"main": ""})
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return self.branches["main"]

    def commit(self, files: dict[str, Blob], branch: str = "main") -> str:
        seed = self.branches[branch] + "".join(sorted(f"{path}{blob.oid}" for path, blob in files.items()))
        sha = hashlib.sha1(seed.encode()).hexdigest()
        self.branches[branch], self.commits[sha] = sha, files
        return sha


class NotFound(Exception):
    """Carries the `X-Error-Code` by which the client tells a missing repository from a missing file."""


class LoopbackHub:
    """The server and its state; usable from tests directly (`hub.repos`, `hub.requests`)."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def files(self, repo_id: str, kind: str = "models") -> dict[str, Blob]:
        """Files at the head of a repository."""
        repo = self.repos[kind, repo_id]
        return repo.commits[repo.head]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        self.body = self._read_body()
        try:
            for verbs, pattern, route in _ROUTES:
                match = re.fullmatch(pattern, path)
                if match and self.command in verbs:
                    with self.hub.lock:
                        reply = route(self, **match.groupdict())
                    self._send(*reply)
                    return
            raise NotFound("EntryNotFound")
        except NotFound as missing:
            code = str(missing)
            self._send(404, _json({"error": code}), {"X-Error-Code": code, "X-Error-Message": code})

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Stay silent: the requests are kept in `hub.requests`."""

    @property
    def hub(self) -> LoopbackHub:
        return self.server.hub  # type: ignore[attr-defined]

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repo(self, kind: str | None, repo_id: str) -> Repo:
        repo = self.hub.repos.get((kind or "models", repo_id))
        if repo is None:
            raise NotFound("RepoNotFound")
        return repo

    def _revision(self, kind: str | None, repo_id: str, rev: str) -> tuple[str, dict[str, Blob]]:
        repo = self._repo(kind, repo_id)
        sha = repo.branches.get(rev, rev)
        if sha not in repo.commits:
            raise NotFound("RevisionNotFound")
        return sha, repo.commits[sha]

    def whoami(self) -> "Reply":
        token = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return _ok({"type": "user", "name": "user", "orgs": [], "auth": token})

    def validate_yaml(self) -> "Reply":
        return _ok({"errors": [], "warnings": []})

    def create(self) -> "Reply":
        wanted = json.loads(self.body)
        repo_id = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
        key = (wanted.get("type", "model") + "s", repo_id)
        reply = {"url": f"{self.hub.url}/{repo_id}", "id": repo_id, "name": repo_id}
        if key in self.hub.repos:
            return 409, _json({"error": "exists", **reply}), {}
        self.hub.repos[key] = Repo()
        self.hub.repos[key].commit({})
        return _ok(reply)

    def preupload(self, kind: str, repo_id: str, rev: str) -> "Reply":
        self._revision(kind, repo_id, rev)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        modes = {path: "lfs" if path.endswith(LFS_SUFFIXES) else "regular" for path in paths}
        return _ok(
            {
                "files": [
                    {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                    for path, mode in modes.items()
                ]
            }
        )

    def lfs_batch(self, kind: str | None, repo_id: str) -> "Reply":
        self._repo(kind, repo_id)
        objects = [
            {**entry, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{entry['oid']}", "header": {}}}}
            for entry in json.loads(self.body)["objects"]
        ]
        return _ok({"transfer": "basic", "objects": objects})

    def lfs_put(self, sha256: str) -> "Reply":
        if hashlib.sha256(self.body).hexdigest() != sha256:
            return 400, _json({"error": "content does not match its sha256"}), {}
        self.hub.lfs[sha256] = self.body
        return 200, b"", {}

    def commit(self, kind: str, repo_id: str, rev: str) -> "Reply":
        _, files = self._revision(kind, repo_id, rev)
        files = dict(files)
        for line in self.body.splitlines():
            item = json.loads(line)
            key, value = item["key"], item["value"]
            if key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]))
            elif key == "lfsFile":
                files[value["path"]] = Blob(self.hub.lfs[value["oid"]], value["oid"])
            elif key == "deletedFile":
                del files[value["path"]]
            elif key == "deletedFolder":
                files = {path: blob for path, blob in files.items() if not path.startswith(value["path"])}
        sha = self._repo(kind, repo_id).commit(files, rev)
        url = f"{self.hub.url}/{repo_id}/commit/{sha}"
        return _ok({"commitUrl": url, "commitOid": sha, "pullRequestUrl": None, "success": True})

    def info(self, kind: str, repo_id: str, rev: str | None) -> "Reply":
        sha, files = self._revision(kind, repo_id, rev or "main")
        return _ok(
            {
                "id": repo_id,
                "sha": sha,
                "private": False,
                "gated": False,
                "disabled": False,
                "downloads": 0,
                "likes": 0,
                "tags": [],
                "createdAt": CREATED,
                "lastModified": CREATED,
                "siblings": [{"rfilename": path} for path in files],
            }
        )

    def tree(self, kind: str, repo_id: str, rev: str, folder: str | None) -> "Reply":
        _, files = self._revision(kind, repo_id, rev)
        recursive = parse_qs(urlsplit(self.path).query).get("recursive", ["false"])[0].lower() == "true"
        root = f"{folder}/" if folder else ""
        rows: dict[str, dict[str, Any]] = {}
        for path, blob in files.items():
            if not path.startswith(root):
                continue
            parents = path[len(root) :].split("/")[:-1]
            for depth in range(1, len(parents) + 1 if recursive else min(len(parents), 1) + 1):
                name = root + "/".join(parents[:depth])
                oid = hashlib.sha1(name.encode()).hexdigest()
                rows[name] = {"type": "directory", "path": name, "size": 0, "oid": oid}
            if recursive or not parents:
                rows[path] = blob.entry(path)
        if folder and not rows:
            raise NotFound("EntryNotFound")
        return _ok(list(rows.values()))

    def paths_info(self, kind: str, repo_id: str, rev: str) -> "Reply":
        _, files = self._revision(kind, repo_id, rev)
        if self.headers.get_content_type() == "application/json":
            wanted = json.loads(self.body)["paths"]
        else:
            wanted = parse_qs(self.body.decode())["paths"]
        return _ok([files[path].entry(path) for path in wanted if path in files])

    def refs(self, kind: str, repo_id: str) -> "Reply":
        branches = [
            {"name": name, "ref": f"refs/heads/{name}", "targetCommit": sha}
            for name, sha in self._repo(kind, repo_id).branches.items()
        ]
        return _ok({"branches": branches, "tags": [], "converts": []})

    def create_branch(self, kind: str, repo_id: str, name: str) -> "Reply":
        repo = self._repo(kind, repo_id)
        if name in repo.branches:
            return 409, _json({"error": "exists"}), {}
        repo.branches[name] = repo.head
        return _ok({})

    def resolve(self, kind: str | None, repo_id: str, rev: str, path: str) -> "Reply":
        sha, files = self._revision(kind, repo_id, rev)
        if path not in files:
            return 404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
        blob = files[path]
        headers = {
            "ETag": f'"{blob.sha256 or blob.oid}"',
            "X-Repo-Commit": sha,
            "Accept-Ranges": "bytes",
            "Content-Type": "application/octet-stream",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None or self.command == "HEAD":
            return 200, blob.data, headers
        total, first = len(blob.data), int(wanted[1])
        last = min(int(wanted[2] or total - 1), total - 1)
        if first > last:
            return 416, b"", {**headers, "Content-Range": f"bytes */{total}"}
        headers["Content-Range"] = f"bytes {first}-{last}/{total}"
        return 206, blob.data[first : last + 1], headers


Reply = tuple[int, bytes, dict[str, str]]


def _json(value: object) -> bytes:
    return json.dumps(value).encode()


def _ok(value: object) -> Reply:
    return 200, _json(value), {"Content-Type": "application/json"}


_API = r"/api/(?P<kind>models|datasets|kernels)/(?P<repo_id>[^/]+/[^/]+)"
_WEB = r"/(?:(?P<kind>datasets|kernels)/)?(?P<repo_id>[^/]+/[^/]+)"
_REV = r"(?P<rev>[^/]+)"
_ROUTES: list[tuple[tuple[str, ...], str, Callable[..., Reply]]] = [
    (("GET",), r"/api/whoami-v2", _Handler.whoami),
    (("POST",), r"/api/validate-yaml", _Handler.validate_yaml),
    (("POST",), r"/api/repos/create", _Handler.create),
    (("PUT",), r"/lfs/(?P<sha256>[0-9a-f]{64})", _Handler.lfs_put),
    (("POST",), _WEB + r"\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    (("POST",), _API + r"/preupload/" + _REV, _Handler.preupload),
    (("POST",), _API + r"/commit/" + _REV, _Handler.commit),
    (("POST",), _API + r"/paths-info/" + _REV, _Handler.paths_info),
    (("GET",), _API + r"/tree/" + _REV + r"(?:/(?P<folder>.+))?", _Handler.tree),
    (("GET",), _API + r"/refs", _Handler.refs),
    (("POST",), _API + r"/branch/(?P<name>[^/]+)", _Handler.create_branch),
    (("GET", "HEAD"), _API + r"(?:/revision/(?P<rev>[^/]+))?", _Handler.info),
    (("GET", "HEAD"), _WEB + r"/resolve/" + _REV + r"/(?P<path>.+)", _Handler.resolve),
]
