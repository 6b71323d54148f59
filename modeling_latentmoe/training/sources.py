"""Where a checkpoint's bytes are: a folder of this machine or of a shared file system, or any fsspec URL.

Both kinds read byte ranges straight into given memory, from several threads at once. The small files of a URL
(config, code, tokenizer) are copied to a local folder, so that everything but the weights is read from there.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import fsspec
from huggingface_hub import hf_hub_download
from huggingface_hub.constants import HF_HOME
from huggingface_hub.errors import EntryNotFoundError, HFValidationError

from modeling_latentmoe.headers import HEADER_LIMIT, read_index

T = TypeVar("T")

CACHE = Path(HF_HOME) / "latentmoe"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PROCESSOR_CONFIGS = ("processor_config.json", "preprocessor_config.json")
OPTIONAL_FILES = (
    INDEX,
    "generation_config.json",
    *PROCESSOR_CONFIGS,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tiktoken.model",
    "chat_template.jinja",
)

READERS = 8
ATTEMPTS = 4
# seconds before the second attempt, doubled before each further one
BACKOFF = 0.5


def is_url(model: str) -> bool:
    """Whether `model` is read through fsspec: https://host/folder, s3://bucket/folder, ..."""
    return "://" in model


def hub_config(model: str) -> Path:
    """The config.json of a model of the Hub, cached or downloaded. ValueError where it cannot be the name of one,
    OSError where it is not to be had."""
    try:
        return Path(hf_hub_download(model, CONFIG))
    except HFValidationError as error:
        raise ValueError(f"model {model}: there is no such folder, and it is not a Hub id") from error
    except (OSError, EntryNotFoundError) as error:
        cause = " ".join(str(error).split())
        raise OSError(f"model {model}: neither a folder here nor at hand from the Hub: {cause}") from error


def retried(action: Callable[[], T], what: str) -> T:
    """The result of `action`, tried again after growing pauses when it fails.

    The last failure is an OSError that starts with `what` and names the cause. A missing file is a
    FileNotFoundError at once.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{what}: there is no such file") from error
        # Which exceptions a lost connection raises depends on the fsspec implementation.
        except Exception as error:
            if attempt == ATTEMPTS:
                cause = f"{type(error).__name__}: {error}"
                raise OSError(f"{what}: failed {ATTEMPTS} times, at last with {cause}") from error
        time.sleep(BACKOFF * 2 ** (attempt - 1))
    raise AssertionError


class Files(ABC):
    """The files of a checkpoint; `place` is their folder or URL."""

    def __init__(self, place: str) -> None:
        self.place = place

    def read(self, file: str, start: int, views: Sequence[memoryview]) -> None:
        """Fill `views`, one after the other, with the bytes of `file` from `start` on; OSError as `retried`."""
        stop = start + sum(map(len, views))
        retried(lambda: self.read_once(file, start, stop, views), f"{self.place}/{file}, bytes {start} to {stop}")

    @abstractmethod
    def read_once(self, file: str, start: int, stop: int, views: Sequence[memoryview]) -> None:
        """One attempt to fill `views` with the bytes from `start` to `stop`."""


class LocalFiles(Files):
    def read_once(self, file: str, start: int, stop: int, views: Sequence[memoryview]) -> None:
        # Unbuffered: these bytes and no others are read, straight to their place.
        with open(f"{self.place}/{file}", "rb", buffering=0) as raw:
            raw.seek(start)
            for view in views:
                if raw.readinto(view) != len(view):
                    raise EOFError("the file ends too early")


class RemoteFiles(Files):
    """Files under an fsspec URL. ValueError if its protocol is unknown or needs a package that is missing."""

    def __init__(self, url: str) -> None:
        super().__init__(url.rstrip("/"))
        try:
            self.system, root = fsspec.core.url_to_fs(self.place)
        except (ImportError, ValueError) as error:
            raise ValueError(f"--model {url}: {error}") from error
        self.root = root.rstrip("/")

    def read_once(self, file: str, start: int, stop: int, views: Sequence[memoryview]) -> None:
        data = memoryview(self.system.cat_file(f"{self.root}/{file}", start=start, end=stop))
        if len(data) > stop - start:
            raise ValueError("the server does not support range requests")
        if len(data) < stop - start:
            raise EOFError(f"only {len(data)} bytes came")
        for view in views:
            view[:] = data[: len(view)]
            data = data[len(view) :]

    def size(self, file: str) -> int:
        """Length of `file` in bytes; FileNotFoundError if there is none."""
        size = retried(lambda: self.system.size(f"{self.root}/{file}"), f"{self.place}/{file}")
        if size is None:
            raise OSError(f"{self.place}/{file}: the server does not say how long it is")
        return size

    def start_of(self, file: str, length: int) -> bytes:
        """The first `length` bytes of `file`."""
        content = bytearray(length)
        self.read(file, 0, [memoryview(content)])
        return bytes(content)


def fetch_small_files(files: RemoteFiles) -> Path:
    """A local folder with everything of `files` but the weights.

    Its name is the digest of its content: it is written once, never changed, and shared by all processes.
    FileNotFoundError without config.json; OSError or ValueError when the server fails or cannot serve ranges.
    """
    # A server that ignores ranges sends the whole file: better found out on this one than on a shard.
    files.start_of(CONFIG, 1)
    contents = {CONFIG: files.start_of(CONFIG, files.size(CONFIG))}

    def fetch(name: str) -> None:
        try:
            content = files.start_of(name, files.size(name))
        except FileNotFoundError:
            if name not in OPTIONAL_FILES:
                raise
            return
        # Some servers answer every address with a page.
        if content.lstrip()[:9].lower().startswith((b"<!doctype", b"<html")):
            raise OSError(f"{files.place}/{name}: the server sent a web page instead of the file")
        contents[name] = content

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(fetch, OPTIONAL_FILES))
        missing = code_files(contents)
        while missing:
            list(pool.map(fetch, missing))
            missing = code_files(contents)

    digest = hashlib.sha256()
    for name in sorted(contents):
        digest.update(f"{name} {len(contents[name])}\n".encode() + contents[name])
    folder = CACHE / f"checkpoint_{digest.hexdigest()[:16]}"
    if not folder.is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=CACHE, prefix="partial_"))
        for name, content in contents.items():
            (partial / name).write_bytes(content)
        try:
            os.rename(partial, folder)
        except OSError:
            # another machine that shares the cache was faster
            shutil.rmtree(partial)
            if not folder.is_dir():
                raise
    return folder


def code_files(contents: dict[str, bytes]) -> list[str]:
    """Modules that configs in `contents` (name -> bytes) name, or modules in it import, but that it lacks.

    A tokenizer names its processor's class too, which is not needed where there is no processor.
    """
    modules = set()
    unused = () if contents.keys() & {*PROCESSOR_CONFIGS} else ("AutoProcessor",)
    for name, content in contents.items():
        if name.endswith(".py"):
            code = content.decode(errors="replace")
            modules.update(re.findall(r"^\s*from\s+\.(\w+)\s+import", code, flags=re.MULTILINE))
        elif name.endswith("config.json"):
            classes = json.loads(content).get("auto_map") or {}
            if not isinstance(classes, dict):
                raise ValueError(f"{name} is damaged: auto_map must be an object")
            for kind, value in classes.items():
                references = () if kind in unused else value if isinstance(value, list) else [value]
                found = (re.fullmatch(r"(\w+)\.\w+", r) for r in references if isinstance(r, str))
                modules.update(match[1] for match in found if match)
    return sorted(f"{module}.py" for module in modules if f"{module}.py" not in contents)


@contextmanager
def header_files(files: RemoteFiles, small_files: Path) -> Iterator[Path]:
    """A temporary folder that looks like the whole checkpoint, but whose shards are holes behind their headers.

    What can be checked without the weights is checked there like in any local folder.
    """
    shards = set(read_index(small_files / INDEX).shards.values()) or {SINGLE_FILE}
    with tempfile.TemporaryDirectory(prefix="latentmoe_") as name:
        folder = Path(name)
        for file in small_files.iterdir():
            (folder / file.name).symlink_to(file)

        def fetch(shard: str) -> None:
            size = files.size(shard)
            length = int.from_bytes(files.start_of(shard, min(8, size)), "little")
            header = files.start_of(shard, min(8 + min(length, HEADER_LIMIT), size))
            with (folder / shard).open("wb") as file:
                file.write(header)
                file.truncate(size)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(fetch, sorted(shards)))
        yield folder
