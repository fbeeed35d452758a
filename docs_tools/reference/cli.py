"""The command line: flags that `vllm-rollout serve` adds to those of `vllm serve`, and the other commands."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from enum import Enum
from inspect import cleandoc
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from docs_tools.reference.markdown import prose, sections, table


def part() -> str:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    return sections([*_serve(), *_others()])


def our_groups() -> list[tuple[str, str, list[argparse.Action]]]:
    """Title, description and flags of each argument group that we add to `vllm serve`."""
    from vllm_rollout.kernel.api import serve

    parser = serve.FlexibleArgumentParser()
    theirs = list(parser._action_groups)
    serve.add_all_flags(parser)
    return [
        (group.title or "", group.description or "", shown)
        for group in parser._action_groups
        if group not in theirs
        and (shown := [action for action in group._group_actions if action.help != argparse.SUPPRESS])
    ]


def _serve() -> Iterator[str]:
    yield "## vllm-rollout serve"
    yield (
        "`vllm-rollout serve [MODEL]` takes every flag of `vllm serve`, and the flags below. "
        "`vllm-rollout serve --help=Rollout` prints one group of them."
    )
    for title, description, actions in our_groups():
        yield f"### {title}"
        yield f"{prose(description).rstrip('.')}."
        yield table(("flag", "takes", "default", "what it does"), map(_flag, actions))


def _flag(action: argparse.Action) -> tuple[str, str, str, str]:
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    says = (action.help or "") % {**vars(action), "prog": "vllm-rollout serve"}
    default = action.default
    is_default = default not in (None, [], False, argparse.SUPPRESS, "")
    says = says.replace(f" Default: {default}.", "") if is_default else says
    return names, _takes(action), f"`{_shown(default)}`" if is_default else "", prose(says)


def _shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    return default if isinstance(default, str) else json.dumps(default, default=str)


def _takes(action: argparse.Action) -> str:
    if action.choices is not None:
        takes = ", ".join(f"`{choice}`" for choice in action.choices)
    elif action.nargs == 0:
        takes = ""
    elif isinstance(action.metavar, str):
        takes = f"`{action.metavar}`"
    elif action.type is int:
        takes = "an integer"
    else:
        takes = f"`{action.dest.upper()}`"
    several = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
    return f"{takes}, several" if several else takes


def _others() -> Iterator[str]:
    from typer.main import get_command

    from vllm_rollout.cli import app

    yield from _commands("vllm-rollout", get_command(app))


def _commands(above: str, group: Any) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        if (above, name) == ("vllm-rollout", "serve"):
            continue
        if hasattr(command, "commands"):
            yield from _commands(f"{above} {name}", command)
        else:
            yield from _command(f"{above} {name}", command)


def _command(name: str, command: Any) -> Iterator[str]:
    yield f"## {name}"
    arguments = [_argument(each) for each in command.params if each.param_type_name == "argument"]
    yield f"```text\n{' '.join([name, '[OPTIONS]', *arguments])}\n```"
    yield _help(command.help or "")
    yield table(("parameter", "takes", "default", "what it does"), map(_parameter, command.params))


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _help(text: str) -> str:
    """A docstring as Markdown. Lines of a block that are all commands become a code block."""
    blocks = cleandoc(text.replace("\b\n", "\n")).split("\n\n")
    return "\n\n".join(map(_block, filter(str.strip, blocks)))


def _block(block: str) -> str:
    lines = [line.strip() for line in block.strip("\n").splitlines()]
    if all(line.startswith("vllm-rollout ") for line in lines):
        return "```sh\n" + "\n".join(lines) + "\n```"
    return block.strip("\n")


def _parameter(parameter: Any) -> tuple[str, str, str, str]:
    is_option = parameter.param_type_name == "option"
    names = [*parameter.opts, *parameter.secondary_opts] if is_option else [_argument(parameter)]
    default, is_switch = parameter.default, is_option and parameter.is_flag
    says = parameter.help or ""
    if parameter.envvar:
        says += f" Environment variable: `{parameter.envvar}`."
    has_default = not callable(default) and default not in (None, "", False, ()) and not is_switch
    shown = f"`{default}`" if has_default else "required" if parameter.required else ""
    return ", ".join(f"`{name}`" for name in names), "" if is_switch else _kind(parameter), shown, prose(says)


KINDS = {int: "an integer", float: "a number", str: "text", Path: "a path"}


def _kind(parameter: Any) -> str:
    kind = parameter.type_descriptor.annotation
    if is_list := get_origin(kind) in (list, tuple):
        kind = get_args(kind)[0]
    kind = next((each for each in get_args(kind) if each is not type(None)), kind) if is_union(kind) else kind
    if get_origin(kind) is Literal:
        name = ", ".join(f"`{choice}`" for choice in get_args(kind))
    elif issubclass(kind, Enum):
        name = ", ".join(f"`{choice.value}`" for choice in kind)
    else:
        name = KINDS[kind]
    least, most = parameter.min, parameter.max
    if least is not None and most is not None:
        name += f" from {least} to {most}"
    elif least is not None:
        name += f", at least {least}"
    return f"{name}, several" if is_list or getattr(parameter, "multiple", False) else name


def is_union(kind: object) -> bool:
    return get_origin(kind) in (Union, UnionType)
