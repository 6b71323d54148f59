"""Checkpoints at a URL: over HTTP ranges with failures on the way, and through other fsspec protocols."""

import json
import re
import shutil
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest
import torch

from modeling_latentmoe.training import sources
from modeling_latentmoe.training.loading import load_model, load_processor
from modeling_latentmoe.training.sources import RemoteFiles, fetch_small_files


class RangeServer(ThreadingHTTPServer):
    """Serves a folder over HTTP with byte ranges, counts, and fails as told.

    served: (file, bytes) of every answer to GET. fail: called with file and number of the request for that range,
    says how it fails: an HTTP status, "cut" for an answer that stops half-way, or None. ranges: False ignores them.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), RangeHandler)
        self.folder, self.ranges = folder, True
        self.served: list[tuple[str, int]] = []
        self.attempts: Counter[tuple[str, str]] = Counter()
        self.fail: Callable[[str, int], int | str | None] = lambda file, attempt: None
        self.url = f"http://127.0.0.1:{self.server_port}/models/k3"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def handle_error(self, request, client_address) -> None:
        """Clients hang up on half answers: nothing to print."""


class RangeHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: RangeServer

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        name = self.path.removeprefix("/models/k3/")
        path = self.server.folder / name
        if not path.is_file():
            return self.refuse(404)
        data, status, header = path.read_bytes(), 200, self.headers.get("Range", "")
        size = len(data)
        failure = None
        if body:
            self.server.attempts[name, header] += 1
            failure = self.server.fail(name, self.server.attempts[name, header])
        if isinstance(failure, int):
            return self.refuse(failure)
        if header and self.server.ranges:
            start, stop = (int(part) for part in re.fullmatch(r"bytes=(\d+)-(\d+)", header).groups())
            data, status = data[start : stop + 1], 206
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop}/{size}")
        self.end_headers()
        if body:
            half = failure == "cut"
            self.wfile.write(data[: len(data) // 2] if half else data)
            self.server.served.append((name, len(data)))
            self.close_connection = half

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def server(small: Path, tmp_path: Path) -> Iterator[RangeServer]:
    """A copy of the small model in several shards, which a test may change."""
    running = RangeServer(Path(shutil.copytree(small, tmp_path / "served")))
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache of its own, and no waiting between attempts."""
    monkeypatch.setattr(sources, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(sources, "BACKOFF", 0.001)


def same(ours: torch.nn.Module, theirs: torch.nn.Module) -> bool:
    a, b = ours.state_dict(), theirs.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def weights(server: RangeServer) -> int:
    return sum(length for file, length in server.served if file.endswith(".safetensors"))


def head_bytes(folder: Path) -> int:
    files = folder.glob("*.safetensors")
    return sum(16 + int.from_bytes(file.read_bytes()[:8], "little") for file in files)


@pytest.mark.parametrize("degree", [1, 4])
def test_a_url_is_the_same_model_and_only_its_share_travels(server: RangeServer, small: Path, degree: int) -> None:
    ours, theirs = (load_model(place, "fp32", degree - 1, degree) for place in (server.url, str(small)))
    assert same(ours, theirs) and ours.config.name_or_path == server.url
    owned = sum(param.nbytes for param in ours.parameters())
    assert owned <= weights(server) <= 1.02 * owned + head_bytes(small)
    assert ours.generation_config.to_dict() == theirs.generation_config.to_dict()


def test_the_processor_comes_from_the_url(server: RangeServer, small: Path) -> None:
    ours, theirs = load_processor(server.url), load_processor(str(small))
    text = "Which digit is this?"
    assert ours.tokenizer(text).input_ids == theirs.tokenizer(text).input_ids
    assert type(ours).__module__.startswith("transformers_modules.") and weights(server) == 0


def test_one_file_without_index(server: RangeServer, small: Path) -> None:
    theirs = load_model(str(small), "fp32")
    shutil.rmtree(server.folder)
    theirs.save_pretrained(server.folder, max_shard_size="10GB")
    assert not (server.folder / sources.INDEX).exists()
    assert same(load_model(server.url, "fp32"), theirs)


def test_other_protocols(small: Path) -> None:
    system = fsspec.filesystem("memory")
    system.put(str(small), "/bucket/model", recursive=True)
    try:
        assert same(load_model("memory://bucket/model/", "fp32", 1, 2), load_model(str(small), "fp32", 1, 2))
    finally:
        system.rm("/bucket", recursive=True)
    assert same(load_model(f"file://{small}", "fp32"), load_model(str(small), "fp32"))


# --- failures ---


@pytest.mark.parametrize("how", [500, 503, 429, "cut"])
def test_failures_are_retried(server: RangeServer, small: Path, how: int | str) -> None:
    """Every range fails on its first two requests: small files, headers and weights."""
    server.fail = lambda file, attempt: how if attempt <= 2 else None
    assert same(load_model(server.url, "bf16", 0, 2), load_model(str(small), "bf16", 0, 2))
    assert max(server.attempts.values()) >= 3


@pytest.mark.parametrize(("how", "cause"), [(503, "503"), ("cut", "ClientPayloadError")])
def test_a_lasting_failure_is_one_error(server: RangeServer, how: int | str, cause: str) -> None:
    """It names the file, the byte range and the last cause; other ranges are not begun any more."""
    shard = sorted(file.name for file in server.folder.glob("*.safetensors"))[1]
    after_header = 2
    asked: Counter[str] = Counter()

    def fail(file: str, attempt: int) -> int | str | None:
        asked[file] += 1
        return how if file == shard and asked[file] > after_header else None

    server.fail = fail
    with pytest.raises(OSError) as error:
        load_model(server.url, "fp32")
    message = str(error.value)
    assert re.search(rf"{re.escape(server.url)}/{shard}, bytes \d+ to \d+: failed 4 times, at last with", message)
    assert cause in message and "\n" not in message
    assert max(count for (file, _), count in server.attempts.items() if file == shard) == sources.ATTEMPTS


def test_a_server_without_ranges_is_found_out_on_a_small_file(server: RangeServer) -> None:
    server.ranges = False
    with pytest.raises(OSError, match=r"config\.json, bytes 0 to 1: .* does not support range requests"):
        load_model(server.url, "fp32")
    assert {file for file, _ in server.served} == {"config.json"}


def test_a_missing_shard_is_named(server: RangeServer) -> None:
    shard = sorted(server.folder.glob("*.safetensors"))[-1]
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{server.url}/{shard.name}: there is no such file")):
        load_model(server.url, "fp32")


def test_a_folder_without_config(server: RangeServer) -> None:
    (server.folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=re.escape(f"{server.url}/config.json")):
        load_model(server.url, "fp32")


def test_a_short_shard_is_found_by_its_header(server: RangeServer) -> None:
    """The same check as for a local folder; the message has the URL, not the folder that stands for it."""
    shard = sorted(server.folder.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:-16])
    with pytest.raises(ValueError, match="truncated") as error:
        load_model(server.url, "fp32")
    assert server.url in str(error.value) and shard.name in str(error.value)
    assert weights(server) <= head_bytes(server.folder)


def test_weights_outside_the_folder_are_refused(server: RangeServer) -> None:
    """An index must not make us write elsewhere."""
    index = json.loads((server.folder / sources.INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = "../evil.safetensors"
    (server.folder / sources.INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"\.\./evil\.safetensors is not the name of a file"):
        load_model(server.url, "fp32")


@pytest.mark.parametrize(("url", "said"), [("s4://bucket/model", "s4"), ("s3://bucket/model", "s3fs")])
def test_a_protocol_that_cannot_be_read(url: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(ValueError, match=f"--model {url}: .*{said}"):
        load_model(url, "fp32")


def test_local_files_are_retried_and_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"12345")
    files = sources.LocalFiles(str(tmp_path))
    with pytest.raises(OSError, match=r"short, bytes 2 to 8: failed 4 times, at last with EOFError"):
        files.read("short", 2, [memoryview(bytearray(3)), memoryview(bytearray(3))])
    views = [memoryview(bytearray(2)), memoryview(bytearray(1))]
    files.read("short", 2, views)
    assert [bytes(view) for view in views] == [b"34", b"5"]
    with pytest.raises(FileNotFoundError, match="absent, bytes 0 to 1: there is no such file"):
        files.read("absent", 0, [memoryview(bytearray(1))])


# --- the local copy of the small files ---


def test_small_files_are_kept_by_content(server: RangeServer) -> None:
    """The same content is one folder; changed content is another one, and the first stays as it was."""
    files = RemoteFiles(server.url)
    first = fetch_small_files(files)
    assert fetch_small_files(files) == first and not list(first.glob("*.safetensors"))
    before = {file.name: file.read_bytes() for file in first.iterdir()}
    assert {"config.json", "modeling_latentmoe.py", "mxfp4.py", "tokenizer.json", sources.INDEX} <= before.keys()
    config = json.loads((server.folder / "config.json").read_text())
    (server.folder / "config.json").write_text(json.dumps(config | {"note": 1}))
    second = fetch_small_files(RemoteFiles(server.url))
    assert second != first and json.loads((second / "config.json").read_text())["note"] == 1
    assert {file.name: file.read_bytes() for file in first.iterdir()} == before
    assert sorted(sources.CACHE.iterdir()) == sorted([first, second])


START_TOGETHER = """
import os, sys, traceback
import torch
from modeling_latentmoe.training import loading
torch.set_num_threads(1)
start, go = os.pipe()
children = []
for rank in range(4):
    if (pid := os.fork()) == 0:
        try:
            os.read(start, 1)
            model = loading.load_model(os.environ["MODEL"], "fp32", rank, 4)
            held = {m.owned for m in model.modules() if type(m).__name__ == "Experts"}
            assert held == {range(4 * rank, 4 * rank + 4)}, held
            loading.load_processor(os.environ["MODEL"])
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    children.append(pid)
os.write(go, b"x" * 4)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
assert codes == [0] * 4, codes
"""


@pytest.mark.slow
@pytest.mark.parametrize("local", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_four_ranks_start_together_with_empty_caches(
    server: RangeServer, tmp_path: Path, local: bool, fresh_process: Callable[..., str]
) -> None:
    env = {"MODEL": str(server.folder) if local else server.url, "HF_HOME": str(tmp_path / "home")}
    fresh_process(START_TOGETHER, env=env, package=True)
