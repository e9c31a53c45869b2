"""`--config FILE.toml`: flags of a command, written down.

Decides which keys a file may have and how a value is read: as if it had been typed as a flag, so
the checks and messages are the flags' own. Refuses to know any particular flag.
"""

import difflib
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def _load(context: typer.Context, path: Path | None) -> Path | None:
    """Read the command's table and make its values the defaults of the command's flags."""
    if path is None or context.resilient_parsing:
        return path
    try:
        with path.open("rb") as file:
            content = tomllib.load(file)
    except OSError as error:
        raise typer.BadParameter(f"cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} is not TOML: {error}") from error

    commands = _command_names(context)
    for name, table in _tables(content, commands):
        if name not in commands or not isinstance(table, dict):
            raise typer.BadParameter(
                f"{path}: expected only tables named after commands "
                f"({', '.join(f'[{command}]' for command in commands)}), found {name!r}"
            )

    own = _own_name(context)
    parameters = {_key(parameter): parameter for parameter in _settable(context)}
    defaults: dict[str, Any] = {}
    for key, value in dict(_tables(content, commands)).get(own, {}).items():
        parameter = parameters.get(key.replace("_", "-"))
        where = f"{path}: [{own}] {key}"
        if parameter is None:
            raise typer.BadParameter(f"{where} is no setting; {_suggest(key, sorted(parameters))}")
        defaults[parameter.name] = _as_typed(context, parameter, value, where)
    context.default_map = defaults
    return path


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE.toml",
        help="Settings from a table named after the command; flags win.",
        is_eager=True,
        callback=_load,
    ),
]


def _own_name(context: typer.Context) -> str:
    """The command as a table is named after it: `serve`, `bench.sweep`."""
    names: list[str] = []
    at: Any = context
    # The outermost context is the program itself, if there is a group at all.
    while at is not None and (at.parent is not None or at is context):
        names.insert(0, str(at.info_name))
        at = at.parent
    return ".".join(names)


def _command_names(context: typer.Context) -> Sequence[str]:
    group: Any = context.find_root().command
    if not hasattr(group, "commands"):
        return [_own_name(context)]
    names = []
    for name, command in group.commands.items():
        own = getattr(command, "commands", None)
        names += [name] if own is None else [f"{name}.{each}" for each in own]
    return sorted(names)


def _tables(content: dict[str, Any], commands: Sequence[str]) -> list[tuple[str, Any]]:
    """Each table with its name; those of a group of commands by the names of its commands."""
    groups = {command.partition(".")[0] for command in commands if "." in command}
    found: list[tuple[str, Any]] = []
    for name, table in content.items():
        if name in groups and isinstance(table, dict):
            found += [(f"{name}.{each}", value) for each, value in table.items()]
        else:
            found.append((name, table))
    return found


def _settable(context: typer.Context) -> list[Any]:
    return [
        parameter
        for parameter in context.command.params
        if parameter.param_type_name == "option" and parameter.name not in ("config", "help")
    ]


def _key(parameter: Any) -> str:
    longest: str = max(parameter.opts, key=len)
    return longest.lstrip("-")


def _suggest(key: str, allowed: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, allowed, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"expected one of {', '.join(allowed)}"


def _as_typed(context: typer.Context, parameter: Any, value: object, where: str) -> Any:
    """The value as the flag's text, after checking that the flag takes it."""
    if isinstance(value, dict):
        raise typer.BadParameter(f"{where}: expected a value, found a table")
    given: Any
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise typer.BadParameter(f"{where}: expected true or false, found {value!r}")
        given = value
    elif parameter.multiple:
        given = [str(item) for item in (value if isinstance(value, list) else [value])]
    elif isinstance(value, list):
        given = ",".join(str(item) for item in value)
    else:
        # TOML's `true` for a number, or 1.5 for a whole one, would be converted silently; as text
        # it is refused like on the command line.
        given = str(value)
    try:
        parameter.process_value(context, given)
    except typer.BadParameter as error:
        raise typer.BadParameter(f"{where}: {error.message}") from error
    return given
