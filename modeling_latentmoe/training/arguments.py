"""Settings of a script: one frozen dataclass, read from the command line or from a YAML file."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import yaml
from transformers import HfArgumentParser

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """A field of a settings class: its default, and its line in --help."""
    return dataclasses.field(default=default, metadata={"help": help})


class Parser(HfArgumentParser):
    """Raises ValueError for a wrong command line, in one line without the usage text."""

    def __init__(self, settings: type, description: str) -> None:
        super().__init__(
            settings,
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            usage="%(prog)s [file.yaml] [--switch value ...]",
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """One line a switch, with its default if it has one; other spellings and negations are not listed."""

    KINDS: ClassVar = {int: "N", float: "X"}

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=110)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        switch = action.option_strings[-1] if "-h" in action.option_strings else action.option_strings[0]
        if action.nargs in (0, "?"):
            return switch
        return f"{switch} {'|'.join(action.choices) if action.choices else self.KINDS.get(action.type, 'NAME')}"

    def _get_help_string(self, action: argparse.Action) -> str:
        help = action.help or ""
        without = action.default is None or action.default is False or action.default is argparse.SUPPRESS
        return help if without else f"{help} ({action.default})"


def parse(settings: type[T], description: str, argv: Sequence[str]) -> T:
    """An instance of the frozen dataclass `settings`, whose fields carry their help in `metadata`.

    `argv` are switches, or a YAML file of the same names followed by switches that win over it. Raises
    ValueError that names the file and the field.
    """
    argv = list(argv)
    if argv and argv[0].endswith((".yaml", ".yml")):
        known = {field.name for field in dataclasses.fields(settings)}
        argv = [*switches_of(Path(argv[0]), known), *argv[1:]]
    return Parser(settings, description).parse_args_into_dataclasses(argv)[0]


def switches_of(file: Path, known: set[str]) -> list[str]:
    """The lines `name: value` of a YAML file as command-line switches."""
    try:
        values: Any = yaml.safe_load(file.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold lines `name: value`")
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ValueError(f"{file}: unknown setting {', '.join(unknown)}")
    given = {name: value for name, value in values.items() if value is not None}
    return [
        word
        for name, value in given.items()
        for word in (f"--{name}", *map(str, value if isinstance(value, list) else [value]))
    ]
