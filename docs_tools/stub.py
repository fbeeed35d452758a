"""Types of the names that `vllm_rollout` and `vllm_rollout.answers` offer: `vllm_rollout/__init__.pyi` and
`answers.pyi`, made from the list of parts.

The package finds its names when they are asked for, and assembles its clients from the parts that are there. Type
checkers and editors read the stub instead. After a change of parts, of their client methods or of request fields:
python -m docs_tools.stub --write
"""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

import vllm_rollout
import vllm_rollout.answers
from vllm_rollout.kernel.client.connection import Connection
from vllm_rollout.kernel.http.protocol import RolloutRequest
from vllm_rollout.kernel.parts import faces

PLACE = Path(vllm_rollout.__file__).with_suffix(".pyi")
ANSWERS = PLACE.with_name("answers.pyi")
CLIENTS = ("AsyncRolloutClient", "RolloutClient")
ASSEMBLED = {
    "FeedMethods": ("feed_methods", "Methods of feeds that need another part."),
    "RunMethods": ("run_methods", "Methods of runs that need another part."),
    "LLMMethods": ("llm", "Methods of `LLM` that need another part."),
    "AsyncLLMMethods": ("async_llm", "Methods of `AsyncLLM` that need another part."),
}
"""Classes that other classes are made of: the face of parts with their methods, and their words."""
GROUP, ROLLOUT = (list(each.__annotations__) for each in (vllm_rollout.GroupOptions, vllm_rollout.RolloutOptions))


def stub() -> str:
    """The text of the stub."""
    places = {name: place.split(":") for name, place in vllm_rollout._places().items()}
    offered = [
        f"from {module} import {there}{'' if there == name else f' as {name}'}"
        for name, (module, there) in places.items()
    ]
    clients = [getattr(vllm_rollout, name) for name in CLIENTS]
    bases = [base for client in clients for base in client.__bases__]
    more = {name: [methods for _, methods in faces(face)] for name, (face, _) in ASSEMBLED.items()}
    text = f'''\
"""Types of the package's names. Written by `python -m docs_tools.stub --write`, which reads the list of parts."""
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict
{_lines(line for line in offered if not line.endswith((*CLIENTS, "pOptions", "tOptions")))}
{_lines(f"from {each.__module__} import {each.__qualname__}" for each in [*bases, *chain(*more.values()), *_models()])}

class GroupOptions(TypedDict, total=False):
    """Options for the groups of a rollout or a round. None leaves an option out."""
{_fields(GROUP)}

class RolloutOptions(GroupOptions, total=False):
    """Options of `rollout` and `stream` of both clients. `help` shows their meaning, in the server's words."""
{_fields(name for name in ROLLOUT if name not in GROUP)}

{_lines(_class(name, its, ASSEMBLED[name][1]) for name, its in more.items())}
{_lines(map(_client, clients))}
__all__ = {vllm_rollout.__all__}
__version__: str
'''
    return _formatted(text)


def answers() -> str:
    """The text of the stub of `vllm_rollout.answers`."""
    source = Path(vllm_rollout.answers.__file__).read_text()
    ours, _, _ = source.partition("from vllm_rollout.kernel.parts")
    of_parts = (f"from {each.__module__} import {each.__name__}" for each in vllm_rollout.answers.OF_PARTS.values())
    return _formatted(f"{ours}{_lines(of_parts)}\n__all__ = {vllm_rollout.answers.__all__}\n")


def _formatted(text: str) -> str:
    for command in (["check", "--fix", "--select=I,RUF022", "--quiet"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, f"--stdin-filename={PLACE}", "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _class(name: str, bases: Iterable[type], words: str | None) -> str:
    return f'''
class {name}({", ".join(base.__qualname__ for base in bases)}):
    """{words}"""
'''


def _client(client: type) -> str:
    """An assembled client: the classes that have its methods, and what it is made from."""
    _, url, *settings = inspect.signature(Connection.__init__).parameters.values()
    url = url.replace(annotation="str | Sequence[str]")
    said = ", ".join(f"{each.name}: {each.annotation} = {each.default!r}" for each in settings)
    return f"""{_class(client.__name__, client.__bases__, client.__doc__)}
    def __init__(self, {url.name}: {url.annotation} = {url.default!r}, *, {said}) -> None: ...
"""


def _fields(names: Iterable[str]) -> str:
    """Options with the types that a client may give for the body's field. None leaves an option out."""
    return _lines(f"    {name}: {_written(RolloutRequest.model_fields[name].annotation, NoneType)}" for name in names)


def _written(*annotations: Any) -> str:
    return " | ".join(dict.fromkeys(word for each in annotations for form in _forms(each) for word in _words(form)))


def _words(form: Any) -> Sequence[str]:
    origin, args = get_origin(form), get_args(form)
    if origin is Literal:
        return [type(arg).__name__ for arg in args]
    if origin is list:
        return [f"Sequence[{_written(*args)}]"]
    if origin is dict:
        return [f"Mapping[{', '.join(map(_written, args))}]"]
    if form is NoneType:
        return ["None"]
    if isinstance(form, type) and issubclass(form, BaseModel):
        return ["Mapping[str, Any]", form.__name__]
    return ["Any" if form is Any else form.__name__]


def _forms(annotation: Any) -> Iterable[Any]:
    """Members of a union, without what pydantic knows of them."""
    if get_origin(annotation) is Annotated:
        return _forms(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [form for each in get_args(annotation) for form in _forms(each)]
    return [annotation]


def _models() -> list[type[BaseModel]]:
    """Classes of the body that an option may be an object of."""
    forms = [form for name in ROLLOUT for form in _forms(RolloutRequest.model_fields[name].annotation)]
    return [form for form in forms if isinstance(form, type) and issubclass(form, BaseModel)]


if __name__ == "__main__":
    if "--write" in sys.argv:
        PLACE.write_text(stub())
        ANSWERS.write_text(answers())
    elif (PLACE.read_text(), ANSWERS.read_text()) != (stub(), answers()):
        sys.exit(f"{PLACE} or {ANSWERS} is of other parts. Run: python -m docs_tools.stub --write")
