"""The loopback Hub against the real client: what it keeps and serves is what was pushed."""

import urllib.error
import urllib.request
from collections.abc import Callable

import pytest
from loopback_hub import LoopbackHub

ROUND_TRIP = """
from pathlib import Path
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

source = Path("source")
(source / "deep" / "er").mkdir(parents=True)
(source / "config.json").write_text('{"a": 1}')
(source / "deep" / "er" / "note.txt").write_text("first")
(source / "weights.safetensors").write_bytes(bytes(range(256)) * 40)

api = HfApi()
api.create_repo("user/files")
first = api.upload_folder(repo_id="user/files", folder_path=source).oid
(source / "deep" / "er" / "note.txt").write_text("second")
note = "deep/er/note.txt"
api.upload_file(path_or_fileobj=source / note, path_in_repo=note, repo_id="user/files")

assert sorted(api.list_repo_files("user/files")) == ["config.json", note, "weights.safetensors"]
top = sorted(item.path for item in api.list_repo_tree("user/files"))
assert top == ["config.json", "deep", "weights.safetensors"]
copy = Path(snapshot_download("user/files"))
assert (copy / "weights.safetensors").read_bytes() == (source / "weights.safetensors").read_bytes()
assert (copy / note).read_text() == "second"
assert Path(hf_hub_download("user/files", note, revision=first)).read_text() == "first"
info, = api.get_paths_info("user/files", ["weights.safetensors"])
assert info.size == 10240 and info.lfs.size == 10240

api.delete_file("config.json", repo_id="user/files")
assert not api.file_exists("user/files", "config.json")
for call, error in (
    (lambda: hf_hub_download("user/files", "absent.txt"), EntryNotFoundError),
    (lambda: snapshot_download("user/absent"), RepositoryNotFoundError),
):
    try:
        call()
    except error:
        continue
    raise AssertionError(error)
"""

DATASET = """
import numpy as np
from datasets import Dataset, Features, Image, List, Value
from PIL import Image as PILImage

from modeling_latentmoe.training.data import read_chat
from modeling_latentmoe.training.rows import open_dataset

message = {"role": Value("string"), "content": Value("string")}
features = Features({"images": List(Image()), "messages": List(message)})
rows = [
    {
        "images": [PILImage.fromarray(np.full((4, 4, 3), 20 * i, np.uint8))],
        "messages": [
            {"role": "user", "content": f"shade {i}?"}, {"role": "assistant", "content": str(20 * i)}
        ],
    }
    for i in range(8)
]
Dataset.from_list(rows, features=features).push_to_hub("user/shades", num_shards=2)
for streaming in (False, True):
    dataset, folder = open_dataset("user/shades", "train", streaming=streaming)
    chats = [read_chat(f"row {i}", row, folder) for i, row in enumerate(dataset)]
    assert len(chats) == 8
    for i, chat in enumerate(chats):
        question, answer = chat.messages
        parts = {part["type"]: part for part in question["content"]}
        assert np.array(parts["image"]["image"]).max() == 20 * i
        assert (parts["text"]["text"], answer["content"]) == (f"shade {i}?", str(20 * i))
"""


def test_files_round_trip(hub: LoopbackHub, hub_env: dict[str, str], fresh_process: Callable[..., str]) -> None:
    fresh_process(ROUND_TRIP, env=hub_env)
    assert hub.files("user/files")["weights.safetensors"].sha256, "large files travel through LFS"
    assert sorted(hub.files("user/files")) == ["deep/er/note.txt", "weights.safetensors"]


def test_ranges(hub: LoopbackHub, hub_env: dict[str, str], fresh_process: Callable[..., str]) -> None:
    fresh_process(
        "from huggingface_hub import HfApi; api = HfApi(); api.create_repo('user/bytes');"
        "api.upload_file(path_or_fileobj=bytes(range(100)), path_in_repo='a.bin', repo_id='user/bytes')",
        env=hub_env,
    )
    url = f"{hub.url}/user/bytes/resolve/main/a.bin"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=10-19"})) as reply:
        assert (reply.status, reply.read()) == (206, bytes(range(10, 20)))
        assert reply.headers["Content-Range"] == "bytes 10-19/100"
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=95-"})) as reply:
        assert reply.read() == bytes(range(95, 100))
    with pytest.raises(urllib.error.HTTPError, match="416"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=100-"}))


@pytest.mark.slow
def test_dataset_round_trip(hub_env: dict[str, str], fresh_process: Callable[..., str]) -> None:
    """Chats with images pushed by `datasets`, read back by the training data reader, whole and streamed."""
    fresh_process(DATASET, env=hub_env, package=True)
