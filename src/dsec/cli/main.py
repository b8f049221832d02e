"""The entry point: finds the command, loads its module, and turns errors into messages and exit codes.

Only the module of the command that is named is loaded; the others stand in with one line of help.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Final

import typer

import dsec
from dsec.cli.codes import BROKEN_PIPE, DENIED, OTHER, exit_code
from dsec.cli.output import complain, complain_of, put
from dsec.errors import DsecError

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "run": ("run", "Run one command in a sandbox of its own."),
    "create": ("sandboxes", "Create a sandbox that lasts, and print its id."),
    "ls": ("sandboxes", "List sandboxes, oldest first."),
    "exec": ("execs", "Run a command in a sandbox that was created before."),
    "shell": ("execs", "A shell in a sandbox."),
    "cp": ("copying", "Copy files and directories into and out of a sandbox."),
    "pause": ("sandboxes", "Stop all processes of sandboxes."),
    "resume": ("sandboxes", "Let paused sandboxes go on, and wake dormant ones."),
    "hibernate": ("sandboxes", "Keep the files of sandboxes, and nothing else of them."),
    "snapshot": ("snapshots", "Keep the files of a sandbox as they are now."),
    "snapshots": ("snapshots", "List snapshots, oldest first."),
    "snapshot-export": ("snapshots", "Write a snapshot, with all that its files lie over, to one file."),
    "snapshot-import": ("snapshots", "Take in a snapshot that `dsec snapshot-export` wrote."),
    "fork": ("snapshots", "Make sandboxes whose files begin as those of another are now."),
    "rollback": ("snapshots", "Make the files of a sandbox those of a snapshot again."),
    "rm": ("sandboxes", "End sandboxes and remove everything of them, or remove snapshots."),
    "template": ("templates", "Build templates, and see what they are."),
    "key": ("keys", "Keys: who may use a server, and as what."),
    "project": ("keys", "Projects, and what they may have."),
    "volume": ("volumes", "Files that sandboxes use one after the other."),
    "image": ("images", "See, get, verify and remove what sandboxes stand on."),
    "inspect": ("sandboxes", "Show what is known of a sandbox."),
    "events": ("records", "Show the records of a sandbox in the journal."),
    "ps": ("execs", "List commands, failed clean-ups, or ready sandboxes."),
    "serve": ("serve", "Serve lasting sandboxes over HTTP and a socket."),
    "doctor": ("machine", "Tell what this machine can isolate, and try it."),
    "gc": ("machine", "Remove what dead engines left and nothing needs any more."),
    "bench": ("machine", "Measure creating, executing and destroying here."),
    "audit": ("records", "Verify, read and export the journal."),
    "backup": ("records", "Copy what is recorded, and keys and projects, to a directory."),
}
"""Name to module and summary, in the order of the help."""

_EPILOG: Final = (
    "Exit codes: 0 done · 1 other error · 2 usage · 4 not found · 5 conflict · 69 unsupported · 75 busy · "
    "77 denied · 124 time-out · 128+n ended by signal n. `run`, `exec` and `shell` leave with the command's own."
)


class Switches:
    """What the options before the command say."""

    debug = False


def build(names: Sequence[str], switches: Switches) -> typer.Typer:
    """The application; of the commands, those in ``names`` are loaded, with whatever else is in their module."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if sys.stdout.isatty() else None,  # plain text for pipes and programs
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(epilog=_EPILOG)
    def options(
        debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and what goes on.")] = False,
        verbose: Annotated[
            bool,
            typer.Option("--verbose", "-v", help="Tell each step of a build, where no terminal shows it."),
        ] = False,
        show_version: Annotated[
            bool,
            typer.Option("--version", help="Print the version and leave.", is_eager=True, callback=_version),
        ] = False,
    ) -> None:
        """Isolated, limited, recorded sandboxes.

        State is kept in $DSEC_HOME, by default /var/lib/dsec for root and ~/.local/share/dsec for others.
        """
        del show_version
        switches.debug = debug
        quiet = logging.INFO if verbose else logging.WARNING
        logging.getLogger("dsec").setLevel(logging.DEBUG if debug else quiet)

    loaded = {COMMANDS[name][0] for name in names if name in COMMANDS}
    for name, (module, summary) in COMMANDS.items():
        if module in loaded:
            _add(app, import_module(f"dsec.cli.{module}").app, name)
        else:
            app.command(name, help=summary)(_stand_in)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        put(f"dsec {dsec.__version__}\n")
        raise typer.Exit


def _add(app: typer.Typer, part: typer.Typer, name: str) -> None:
    """The one command (or group) of that name of a module."""
    app.registered_commands += [one for one in part.registered_commands if _name(one) == name]
    app.registered_groups += [one for one in part.registered_groups if one.name == name]


def _name(command: typer.models.CommandInfo) -> str:
    return command.name or (command.callback.__name__ if command.callback else "")


def _stand_in() -> None:
    raise RuntimeError("a command that is run is loaded first")


def _have_streams() -> None:
    """Where a standard stream is closed, the next file that is opened would take its place: put nothing there."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(
                os.open(os.devnull, os.O_RDWR), True
            )  # it takes the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - ours until the end
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _complain_of_file(error: OSError) -> None:
    where = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
    if isinstance(error, PermissionError):
        hint = "run as root, or as the user whose file it is"
    elif error.errno == errno.ENOSPC:
        hint = "make room there; what was written is incomplete"
    else:
        hint = "`dsec --debug ...` shows where it came from"
    complain(f"{error.strerror or error}{where}", hint)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave."""
    _have_streams()
    words = list(sys.argv[1:] if arguments is None else arguments)
    switches = Switches()
    command = next((word for word in words if word in COMMANDS), "")
    ours = sys.stdout
    logging.basicConfig(format="dsec: %(message)s", level=logging.WARNING)
    try:
        build(words, switches)(words, prog_name="dsec")
    except DsecError as error:
        if switches.debug:
            traceback.print_exc()
        complain_of(error, command)
        sys.exit(exit_code(error.code))
    except OSError as error:  # of our own streams, or of a local file
        if switches.debug:
            raise
        _complain_of_file(error)
        sys.stdout = None  # Python 3.11.2 would try what is left in it again at the end
        sys.exit(DENIED if isinstance(error, PermissionError) else OTHER)
    except SystemExit:
        if sys.stdout is not ours:  # typer put another in its place: who read the help has gone
            sys.exit(BROKEN_PIPE)
        raise
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if switches.debug:
            raise
        complain(
            f"internal error: {type(error).__name__}: {error}",
            "run again with `dsec --debug ...` and report it",
        )
        sys.exit(OTHER)
