"""Measurements that the README shows: records in a JSON file, and tables between markers that are made from them."""

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from modeling_latentmoe.training.files import write_text


def record(file: Path, command: str, device: str, rows: list[dict[str, Any]]) -> None:
    """Put the rows into the results `file`, in place of those that the same command left there earlier."""
    file.parent.mkdir(exist_ok=True)
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=file.parent, capture_output=True, text=True)
    entry = {
        "device": f"CPU, {os.cpu_count()} cores"
        if device == "cpu"
        else torch.get_device_module(device).get_device_name(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "command": command,
        "commit": commit.stdout.strip(),
        "rows": rows,
    }
    records = json.loads(file.read_text()) if file.is_file() else []
    places = [old["command"] for old in records]
    place = places.index(command) if command in places else len(records)
    records[place : place + 1] = [entry]
    write_text(file, json.dumps(records, indent=1) + "\n")


def with_tables(text: str, tables: dict[str, str]) -> str:
    """`text` with what stands between every pair of markers `<!-- bench NAME -->`, `<!-- end -->` written anew."""
    for name, table in tables.items():
        head, found, tail = text.partition(f"<!-- bench {name} -->\n")
        _, end, tail = tail.partition("<!-- end -->")
        if not found or not end:
            raise ValueError(f"README.md has no table markers for {name}")
        text = f"{head}{found}{table}\n{end}{tail}"
    return text
