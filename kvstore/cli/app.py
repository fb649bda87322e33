"""The root of the command line, and the table of its commands.

To add a command, write a module in ``kvstore/cli/`` with ``app = new_app()``, and add one line to `COMMANDS`. With one
``@app.command()`` and no ``@app.callback()`` it is a plain command (``kvstore master``), else a group
(``kvstore fs ls``). The module is imported only when its command runs: ``kvstore --help`` stays fast, and the master
never imports pyfuse3.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Annotated, Any, Final, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from kvstore import __version__


class Command(NamedTuple):
    """Where a command lives, and its line in ``kvstore --help``."""

    module: str
    help: str


COMMANDS: Final[Mapping[str, Command]] = {
    "up": Command("kvstore.cli.up_cmd", "Run a whole store on this box: master, workers, mount."),
    "master": Command("kvstore.cli.master_cmd", "Run the master of a cluster."),
    "worker": Command("kvstore.cli.worker_cmd", "Run the worker of a node: its blocks, its socket, its peers."),
    "mount": Command("kvstore.cli.mount_cmd", "Show the store as a directory."),
    "node": Command("kvstore.cli.node_cmd", "Run a node's worker and mounts, and restart what dies."),
    "nodes": Command("kvstore.cli.nodes_cmd", "Look at the workers of a cluster."),
    "fs": Command("kvstore.cli.fs_cmd", "Look at and change what is in a store."),
    "report": Command("kvstore.cli.report_cmd", "Show a cluster's capacity, nodes, entries and hit ratio."),
    "top": Command("kvstore.cli.top_cmd", "Watch hits, moves and evictions of a cluster, per node and tier."),
    "config": Command("kvstore.cli.config_cmd", "Show the configuration and where each value comes from."),
}

EXIT_CODES_HELP: Final = (
    "0 done, 1 failed, 2 wrong usage or configuration, 3 not found, 4 exists already, 5 unavailable or too late (try "
    "again), 6 no space, 7 denied, 8 path of another kind, 9 corrupt, 10 not supported, 130 interrupted"
)
"""`kvstore.cli.main` has the table behind it."""

ConfigOption = Annotated[
    str | None,
    typer.Option(
        "--config", metavar="FILE", help="Configuration file; else $KVSTORE_CONFIG, else the one in /etc/kvstore."
    ),
]
"""For every command that reads the configuration: hand it to `kvstore.config.load`."""


def new_app() -> typer.Typer:
    """The app of a command's module; a group without a subcommand prints its help."""
    return typer.Typer(add_completion=False, no_args_is_help=True)


class LazyGroup(TyperGroup):
    """Lists commands from `COMMANDS` alone, and imports a command's module when it is the one to run.

    typer's types for contexts and commands are private, hence the `Any`.
    """

    def __init__(self, **attrs: Any) -> None:
        super().__init__(**attrs)
        for name, command in COMMANDS.items():
            self.add_command(TyperCommand(name, help=command.help))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name and name in COMMANDS else command, rest


def load_command(name: str) -> Any:
    """The real command behind a line of `COMMANDS`."""
    module = importlib.import_module(COMMANDS[name].module)
    command = typer.main.get_command(module.app)
    command.name = name
    return command


app = typer.Typer(
    name="kvstore",
    help="kvstore: an L2 KV-cache pool for LLM serving.",
    epilog=f"Exit codes: {EXIT_CODES_HELP}.",
    cls=LazyGroup,
    invoke_without_command=True,
    # main() prints one line per error; typer's own tracebacks would hide the exit codes.
    pretty_exceptions_enable=False,
)


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        typer.echo(f"kvstore {__version__}")
        raise typer.Exit
    if ctx.invoked_subcommand is None:
        # Rich prints the help itself and returns nothing; without rich the text is returned.
        if text := ctx.get_help():
            typer.echo(text)
        raise typer.Exit
