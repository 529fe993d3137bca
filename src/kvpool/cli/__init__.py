"""The command line: one module a command, imported only when it is asked for."""

from __future__ import annotations

import sys
from importlib import import_module

#: Command -> (module, function or typer application, what it is for). One line a command.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("kvpool.cli.run", "run", "answer prompts with a model whose cache and attention are kvpool's"),
    "plan": ("kvpool.cli.plan", "plan", "size a model's cache and explain every byte"),
    "address": ("kvpool.cli.address", "address", "the byte of any element"),
    "bench": ("kvpool.cli.bench", "bench", "kernels against the memory's own speed"),
    "inspect": ("kvpool.cli.inspect", "inspect", "draw where everything lies in memory"),
    "quality": ("kvpool.cli.quality", "quality", "what a stored format costs on a model and text"),
    "serve": ("kvpool.cli.serve", "serve", "an OpenAI-compatible server"),
    "replay": ("kvpool.cli.replay", "replay_trace", "hit rates of recorded traffic by size and policy"),
    "cache": ("kvpool.cli.cache", "app", "look into a directory of stored prefixes, verify, cap and carry it"),
}


def usage() -> str:
    """Return the list of commands."""
    rows = [f"  {name:<8} {text}" for name, (_, _, text) in COMMANDS.items()]
    return "\n".join(["usage: kvpool COMMAND ...", "", *rows, "", "kvpool COMMAND --help tells its options."])


def main(arguments: list[str] | None = None) -> None:
    """Run `kvpool COMMAND ...`; a `KVError` becomes one line and exit code 2."""
    import os

    import typer

    import kvpool
    from kvpool import log
    from kvpool.errors import KVError

    given = sys.argv[1:] if arguments is None else arguments
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        print(usage())
        raise SystemExit(0)
    if name == "--version":
        print(f"kvpool {kvpool.__version__}")
        raise SystemExit(0)
    if name not in COMMANDS:
        print(f"kvpool: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        raise SystemExit(2)
    module, attribute, _ = COMMANDS[name]
    command = getattr(import_module(module), attribute)
    if not isinstance(command, typer.Typer):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name)(command)
    else:
        app = command
    try:
        log.configure(os.environ.get("KVPOOL_LOG"), default="info" if name == "serve" else "warning")
        app(args=given[1:], prog_name=f"kvpool {name}")
    except KVError as error:
        print(f"kvpool: {error}", file=sys.stderr)
        raise SystemExit(2) from None
