"""Files and folders that appear in one step: a crash at any moment leaves the old ones or the new ones."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".partial"


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: under a temporary name, then renamed."""
    partial = path.with_name(path.name + TEMPORARY)
    partial.write_text(text)
    os.replace(partial, path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which gets this name once it is complete, in one step.

    After an error nothing of it is left, and after a kill only the temporary folder, which the next attempt removes.
    ValueError for a folder that is in use.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: choose another name, or delete it")
    partial = folder.with_name(folder.name + TEMPORARY)
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise
