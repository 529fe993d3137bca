"""The command line: one module a command, imported only when it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module

#: Command -> (module, function or typer application). One line a command.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("kvpool.cli.run", "run"),
    "plan": ("kvpool.cli.plan", "plan"),
    "address": ("kvpool.cli.address", "address"),
    "bench": ("kvpool.cli.bench", "bench"),
    "inspect": ("kvpool.cli.inspect", "inspect"),
    "quality": ("kvpool.cli.quality", "quality"),
    "serve": ("kvpool.cli.serve", "serve"),
    "replay": ("kvpool.cli.replay", "replay_trace"),
    "cache": ("kvpool.cli.cache", "app"),
}


def main(arguments: list[str] | None = None) -> None:
    """Run `kvpool COMMAND ...`; a `KVError` becomes one line and exit code 2."""
    import typer

    from kvpool.errors import KVError

    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else "--help"
    if name in ("-h", "--help") or name not in COMMANDS:
        print(f"usage: kvpool {{{','.join(COMMANDS)}}} ... ; kvpool COMMAND --help tells its options")
        raise SystemExit(0 if name in ("-h", "--help") else 2)
    module, attribute = COMMANDS[name]
    command = getattr(import_module(module), attribute)
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(command)
    else:
        app = command
    try:
        app(args=given[1:], prog_name=f"kvpool {name}")
    except KVError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        raise SystemExit(2) from None
