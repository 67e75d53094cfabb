"""Write docs/reference/, every command's help and every public name's docstring: `python -m bench.reference`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import click

import shardwright
from shardwright.cli.main import cli
from shardwright.lowering.module import ParallelModule
from shardwright.pcg import errors

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
WIDTH = 96
_METHODS = {
    shardwright.Cluster: ("local", "preset", "mixed", "detect", "load", "join", "part", "save", "summary"),
    shardwright.Plan: ("save", "load"),
    shardwright.WeightFiles: (),
    ParallelModule: ("forward", "forward_backward", "evaluate", "clip_grad_norm_", "input_layouts", "source", "program",
                     "state_dict", "load_state_dict", "compile", "mark"),
}  # fmt: skip
_NONE = inspect.Parameter.empty
_WRITTEN = "Written by `python -m bench.reference`; a test compares."


def command_line() -> str:
    """Every command's help."""
    parts = [f"# The command line\n\nWhat `--help` prints, of every command. {_WRITTEN}\n"]
    parts += [f"## `{path}`\n\n```text\n{text}\n```\n" for path, text in _helps(cli, "shardwright", None)]
    return "\n".join(parts)


def _helps(command: click.Command, path: str, parent: click.Context | None) -> Iterable[tuple[str, str]]:
    context = click.Context(command, parent, path.rpartition(" ")[2], terminal_width=WIDTH, **command.context_settings)
    yield path, "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    for name, inner in (command.commands if isinstance(command, click.Group) else {}).items():
        yield from _helps(inner, f"{path} {name}", context)


def interface() -> str:
    """Every public name."""
    functions = [name for name in shardwright.__all__ if name[0].islower()]
    parts = [f"# The Python interface\n\n{_WRITTEN}\n\n```python\nimport shardwright as sw\n```\n"]
    parts += [f"## `sw.{name}`\n\n{_member(shardwright, name)}" for name in functions]
    for kind, names in _METHODS.items():
        title = f"sw.{kind.__name__}" if kind.__name__ in shardwright.__all__ else kind.__name__
        parts.append(f"## `{title}`\n\n{_text(kind)}")
        parts += [f"### `{kind.__name__}.{name}`\n\n{_member(kind, name)}" for name in names]
    own = [kind for kind in vars(errors).values() if inspect.isclass(kind) and kind.__module__ == errors.__name__]
    rows = [f"| `{kind.__name__}` | `{kind.__mro__[1].__name__}` | {_text(kind).strip()} |" for kind in own]
    head = "Every error that is raised on purpose is one of these. They are in `shardwright.pcg.errors`; the first is\n"
    head += "`sw.ShardwrightError` too.\n\n| error | is a kind of | when |\n|---|---|---|\n"
    return "\n".join([*parts, "## Errors\n\n" + head + "\n".join(rows) + "\n"])


def _member(owner: object, name: str) -> str:
    value = getattr(owner, name)
    return f"A property. {_text(value)}" if isinstance(value, property) else _call(name, value) + _text(value)


def _call(name: str, function: Callable[..., object]) -> str:
    """`name(arguments)`, a line each where they do not fit in one."""
    given = [
        parameter.replace(
            annotation=_NONE, default=... if isinstance(parameter.default, Mapping) else parameter.default
        )
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name != "self"
    ]
    shown = f"{name}{inspect.Signature(given)}".replace("Ellipsis", "...")
    if len(shown) > WIDTH:
        own = shown.removeprefix(f"{name}(").removesuffix(")").split(", ")
        shown = f"{name}(\n" + "".join(f"    {argument},\n" for argument in own) + ")"
    return f"```text\n{shown}\n```\n\n"


def _text(value: object) -> str:
    """A docstring as Markdown: sections are lists, what is indented is code, what is said alike is said once."""
    told, section = list[str](), ""
    for line in (inspect.getdoc(value) or "").splitlines():
        if line in ("Args:", "Raises:", "Returns:", "Attributes:"):
            section = line
            told.append(f"**{line.removesuffix(':')}**\n")
        elif section and (entry := re.fullmatch(r" {4}(\w+): (.*)", line)):
            alike = told[-1].startswith("- ") and told[-1].endswith(f": {entry[2]}")
            told[-1:] = (
                [told[-1].replace(":", f", `{entry[1]}`:", 1)] if alike else [told[-1], f"- `{entry[1]}`: {entry[2]}"]
            )
        elif section and line.startswith("    "):
            told.append("  " + line.strip())
        elif re.match(r"\w+ {2,}\S", line):  # a field and what it holds, in columns
            told.append("- `{}`: {}".format(*line.split(maxsplit=1)))
        else:
            told.append("  " + line.strip() if line.startswith("  ") else line)
    return re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", "\n".join(told)) + "\n"


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "cli.md").write_text(command_line(), encoding="utf-8")
    (FOLDER / "api.md").write_text(interface(), encoding="utf-8")


if __name__ == "__main__":
    main()
