"""What the small commands share: a wrong command line and any other mistake is one line and exit code 2."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn

import torch


class Parser(argparse.ArgumentParser):
    """Shows the script's own text in --help, and raises ValueError for a wrong command line."""

    def __init__(self, description: str | None = None, **kwargs) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def run_command(run: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Call `run` with the command line; the exit code of the script: 0, or 2 after one line about a mistake."""
    try:
        run(argv)
    except (ValueError, OSError, ImportError, FloatingPointError, KeyboardInterrupt) as error:
        report_error(error)
        return 2
    return 0


def report_error(error: BaseException) -> None:
    """Print one line to stderr; where several processes fail with the same mistake, only the first one speaks."""
    if first_to_speak(os.environ):
        text = " ".join(str(error).split()) or "interrupted, nothing was saved since the last checkpoint"
        print(f"error: {text}", file=sys.stderr, flush=True)


def first_to_speak(environment: Mapping[str, str]) -> bool:
    """Whether this process is the first of its launch to ask, by a counter in the launcher's own store."""
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or environment.get("WORLD_SIZE", "1") == "1":
        return True
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    try:
        store = torch.distributed.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=20))
        return store.add("latentmoe/errors", 1) == 1
    except torch.distributed.DistError:
        # the machine of the store is gone
        return True
