"""Entry of the `kvstore` command: runs the app and turns every way out into one line and a stable exit code.

==== =====================================================================
0    done
1    failed in a way that has no code of its own
2    wrong usage: command line, configuration, invalid request
3    not found
4    already exists
5    unavailable, overloaded, stale or timed out: the same call may work later
6    no space
7    denied, or read-only
8    the path is of another kind: not a directory, a directory, not empty
9    corrupt data
10   not supported
130  interrupted (Ctrl-C)
==== =====================================================================

With ``KVSTORE_DEBUG`` set, the traceback follows the line.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Final

import typer

from kvstore.cli.app import app
from kvstore.core import errors
from kvstore.node import parent

FAILURE: Final = 1
USAGE: Final = 2
UNAVAILABLE: Final = 5
INTERRUPTED: Final = 130

EXIT_CODES: Final[Mapping[type[errors.KvError], int]] = {
    errors.InvalidRequest: USAGE,
    errors.NotFound: 3,
    errors.AlreadyExists: 4,
    errors.Unavailable: UNAVAILABLE,
    errors.Overloaded: UNAVAILABLE,
    errors.Stale: UNAVAILABLE,
    errors.Timeout: UNAVAILABLE,
    errors.NoSpace: 6,
    errors.Denied: 7,
    errors.ReadOnly: 7,
    errors.NotDirectory: 8,
    errors.IsDirectory: 8,
    errors.NotEmpty: 8,
    errors.Corrupt: 9,
    errors.Unsupported: 10,
}
_OS_EXIT_CODES: Final[Mapping[int, int]] = {
    errno.ENOENT: 3,
    errno.EEXIST: 4,
    errno.ENOSPC: 6,
    errno.EDQUOT: 6,
    errno.EACCES: 7,
    errno.EPERM: 7,
    errno.EROFS: 7,
    errno.ENOTDIR: 8,
    errno.EISDIR: 8,
    errno.ENOTEMPTY: 8,
    errno.ENOTSUP: 10,
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and leave the process with its exit code."""
    parent.obey()
    # Before a command imports grpc: what its C core has to say on standard error is in our errors already.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    sys.exit(run(sys.argv[1:] if args is None else args))


def run(args: Sequence[str]) -> int:
    """Run one command line; returns its exit code. A command may return a code of its own."""
    try:
        result = typer.main.get_command(app).main(list(args), prog_name="kvstore", standalone_mode=False)
        # Here, where a closed pipe can still be told from success (kvstore fs ls | head).
        sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _closed_pipe()
    except typer.Abort:
        return _fail("aborted", FAILURE)
    except Exception as error:  # noqa: BLE001 - the last line of defence: everything becomes one line
        return _explain(error)
    return result if isinstance(result, int) else 0


def _explain(error: Exception) -> int:
    if os.environ.get("KVSTORE_DEBUG"):
        traceback.print_exception(error)
    if isinstance(error, typer.TyperException):
        return _fail(_usage_line(error), error.exit_code)
    if isinstance(error, errors.KvError):
        return _fail(error.message, exit_code(error))
    if isinstance(error, OSError):
        return _fail(_os_line(error), _os_exit_code(error))
    return _fail(f"internal error: {type(error).__name__}: {error} (KVSTORE_DEBUG=1 shows where)", FAILURE)


def exit_code(error: errors.KvError) -> int:
    """The code of the nearest class in `EXIT_CODES`."""
    return next((EXIT_CODES[cls] for cls in type(error).__mro__ if cls in EXIT_CODES), FAILURE)


def _os_exit_code(error: OSError) -> int:
    # asyncio raises these without an errno.
    lost = isinstance(error, TimeoutError | ConnectionError)
    return UNAVAILABLE if lost else _OS_EXIT_CODES.get(error.errno or 0, FAILURE)


def _usage_line(error: typer.TyperException) -> str:
    """The message with the command whose help says more; empty when the help was the answer."""
    message = error.format_message().strip()
    ctx = getattr(error, "ctx", None)
    if not message or not ctx:
        return message
    stop = "" if message.endswith((".", "?", "!")) else "."
    return f"{message}{stop} See: {ctx.command_path} --help"


def _os_line(error: OSError) -> str:
    what = error.strerror or str(error) or type(error).__name__
    return f"{error.filename}: {what}" if error.filename is not None else what


def _fail(message: str, code: int) -> int:
    if message:
        print(f"kvstore: {' '.join(message.split())}", file=sys.stderr)
    return code


def _closed_pipe() -> int:
    # Python flushes stdout once more at exit; without this it would complain there.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILURE


if __name__ == "__main__":
    main()
