"""Files and folders that appear in one step: a crash at any moment leaves the old ones or the new ones."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".partial"
# of a run: rows that every expert got in every step
LOAD_FOLDER = "expert_load"


def write_text(path: Path, text: str) -> None:
    """Write a file in one step: under a temporary name, then renamed."""
    partial = path.with_name(path.name + TEMPORARY)
    partial.write_text(text)
    os.replace(partial, path)


def check_new(folder: Path) -> None:
    """ValueError for a folder that `new_folder` cannot make: one in use, a link, or one below a file."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists: choose another name, or delete it")
    if folder.is_symlink():
        raise ValueError(f"{folder} is a link: give the folder that it points to")
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{folder} cannot be made: {parent} is a file")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which gets this name once it is complete, in one step.

    After an error nothing of it is left; a kill leaves it behind, as `.name.….partial`, and never half of `folder`.
    ValueError as in `check_new`.
    """
    check_new(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=TEMPORARY, dir=folder.parent))
    try:
        # made for this user alone
        umask = os.umask(0)
        os.umask(umask)
        partial.chmod(0o777 & ~umask)
        yield partial
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
