"""Every letter in the suffix of a name, as in `x_BTD`, stands in the legend at the top of its file."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "modeling_latentmoe"
FILES = sorted([*PACKAGE.glob("*.py"), *PACKAGE.glob("training/*.py")])
# one capital at least, sizes such as the 1 of `valid_T1` between them
SUFFIX = re.compile(r"[A-Za-z]\w*?_((?=[a-z0-9]*[A-Z])[A-Za-z0-9]{1,6})")
# of PEFT
FOREIGN = {"lora_A", "lora_B"}


def undefined(source: str) -> dict[str, str]:
    """Letter without a meaning -> a name that has it."""
    tree = ast.parse(source)
    _, _, legend = (ast.get_docstring(tree) or "").partition("Legend:")
    known = set(re.findall(r"\b[A-Za-z]\b", legend))
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    suffixes = {name: found[1] for name in sorted(names - FOREIGN) if (found := SUFFIX.fullmatch(name))}
    used = {
        letter: name for name, suffix in suffixes.items() if not name.isupper() for letter in re.sub(r"\d", "", suffix)
    }
    return {letter: name for letter, name in used.items() if letter not in known}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_legend_has_every_letter(file: Path):
    assert undefined(file.read_text()) == {}


def test_letters_without_a_meaning_are_found():
    text = '"""Words.\n\nLegend: B batch, T tokens.\n"""\nx_BTD, y_B1T, SOME_NAME, lora_A = 0, 1, 2, 3\n'
    assert undefined(text) == {"D": "x_BTD"}
    assert undefined("def f(ids_TS): ...") == {"T": "ids_TS", "S": "ids_TS"}
