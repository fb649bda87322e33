"""The frame of the command line: lazy commands, exit codes, one line per error, output for people and machines."""

from __future__ import annotations

import errno
import json
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rich.text
import typer

import kvstore
from kvstore.cli import app as cli_app
from kvstore.cli import fs_cmd, fs_rows, main, output
from kvstore.cli.app import Command, new_app
from kvstore.cli.main import EXIT_CODES, INTERRUPTED, run
from kvstore.cli.output import Column, number_column, print_object, print_rows, size_column
from kvstore.core import errors

Register = Callable[[Callable[[], object]], None]


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_CONFIG", raising=False)
    monkeypatch.delenv("KVSTORE_DEBUG", raising=False)


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Register:
    """Registers a function as the command ``kvstore probe``."""

    def register(function: Callable[[], object]) -> None:
        module = types.ModuleType("kvstore_probe")
        module.app = new_app()  # type: ignore[attr-defined]
        module.app.command()(function)
        monkeypatch.setitem(sys.modules, "kvstore_probe", module)
        monkeypatch.setattr(cli_app, "COMMANDS", {"probe": Command("kvstore_probe", "Probe.")})

    return register


def raising(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


class TestExitCodes:
    @pytest.mark.parametrize(
        ("error", "code"),
        [
            (errors.KvError("e"), 1),
            (errors.InvalidRequest("e"), 2),
            (errors.TooLarge("e"), 2),
            (errors.NotFound("e"), 3),
            (errors.AlreadyExists("e"), 4),
            (errors.Unavailable("e"), 5),
            (errors.Timeout("e"), 5),
            (errors.NoSpace("e"), 6),
            (errors.Denied("e"), 7),
            (errors.NotEmpty("e"), 8),
            (errors.Corrupt("e"), 9),
            (errors.Unsupported("e"), 10),
        ],
    )
    def test_of_our_errors(
        self, probe: Register, capsys: pytest.CaptureFixture[str], error: errors.KvError, code: int
    ) -> None:
        probe(raising(error))
        assert run(["probe"]) == code
        assert capsys.readouterr() == ("", "kvstore: e\n")

    def test_every_error_has_a_code(self) -> None:
        direct = set(errors.KvError.__subclasses__())
        assert direct <= set(EXIT_CODES)

    @pytest.mark.parametrize(
        ("error", "code", "line"),
        [
            (FileNotFoundError(errno.ENOENT, "No such file", "/x"), 3, "kvstore: /x: No such file\n"),
            (OSError(errno.ENOSPC, "No space"), 6, "kvstore: No space\n"),
            (PermissionError(errno.EACCES, "Denied", "/y"), 7, "kvstore: /y: Denied\n"),
            (TimeoutError(), 5, "kvstore: TimeoutError\n"),
            (ConnectionRefusedError(errno.ECONNREFUSED, "Refused"), 5, "kvstore: Refused\n"),
            (ValueError("a\nb"), 1, "kvstore: internal error: ValueError: a b (KVSTORE_DEBUG=1 shows where)\n"),
            (typer.Abort(), 1, "kvstore: aborted\n"),
            (KeyboardInterrupt(), 130, ""),
        ],
    )
    def test_of_foreign_errors(
        self, probe: Register, capsys: pytest.CaptureFixture[str], error: BaseException, code: int, line: str
    ) -> None:
        probe(raising(error))
        assert run(["probe"]) == code
        assert capsys.readouterr().err == line

    def test_a_command_may_choose_its_code(self, probe: Register) -> None:
        probe(lambda: 42)
        assert run(["probe"]) == 42
        probe(raising(typer.Exit(9)))
        assert run(["probe"]) == 9
        probe(lambda: None)
        assert run(["probe"]) == 0

    def test_debug_shows_where(
        self, probe: Register, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVSTORE_DEBUG", "1")
        probe(raising(errors.NotFound("gone")))
        run(["probe"])
        assert "Traceback" in capsys.readouterr().err


class TestUsage:
    @pytest.mark.parametrize(
        ("args", "parts"),
        [
            (["cofig"], ["No such command 'cofig'", "'config'", "See: kvstore --help"]),
            (["config", "shwo"], ["Did you mean 'show'", "See: kvstore config --help"]),
            (["config", "show", "--jsn"], ["--jsn", "See: kvstore config show --help"]),
            (["config", "show", "extra"], ["extra"]),
        ],
    )
    def test_one_line_that_helps(self, capsys: pytest.CaptureFixture[str], args: list[str], parts: list[str]) -> None:
        assert run(args) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("kvstore: ")
        assert err.count("\n") == 1
        assert [part for part in parts if part not in err] == []

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--version"]) == 0
        assert capsys.readouterr().out == f"kvstore {kvstore.__version__}\n"

    @pytest.mark.parametrize("args", [[], ["--help"]])
    def test_help_lists_all_commands(self, capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
        assert run(args) == 0
        out = capsys.readouterr().out
        assert [name for name in cli_app.COMMANDS if f" {name} " not in out] == []

    def test_every_command_loads_and_has_help(self, capsys: pytest.CaptureFixture[str]) -> None:
        for name in cli_app.COMMANDS:
            assert run([name, "--help"]) == 0
            assert f"kvstore {name}" in capsys.readouterr().out

    def test_no_help_has_holes(self) -> None:
        """In help texts [so] is markup of rich and is not printed: `Reads [worker] and` came out as `Reads  and`."""
        texts = list(help_texts("kvstore", typer.main.get_command(cli_app.app)))
        assert len(texts) > 80
        assert [(path, text) for path, text in texts if rich.text.Text.from_markup(text).plain != text] == []

    @pytest.mark.parametrize(
        ("command", "names"),
        [("node", ["worker", "worker.volumes", "node.mounts"]), ("worker", ["worker.volumes"])],
    )
    def test_help_names_the_sections(self, capsys: pytest.CaptureFixture[str], command: str, names: list[str]) -> None:
        assert run([command, "--help"]) == 0
        words = capsys.readouterr().out.replace(",", " ").split()
        assert [name for name in names if name not in words] == []

    def test_help_lists_the_exit_codes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["--help"]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert "Exit codes: 0 done" in out
        assert [code for code in {*EXIT_CODES.values(), INTERRUPTED} if f" {code} " not in out] == []

    def test_a_sentence_ends_before_the_next(self, capsys: pytest.CaptureFixture[str]) -> None:
        run(["fs", "ls", "a", "b"])
        assert re.search(r"[.?!)] See: kvstore fs ls --help$", capsys.readouterr().err.strip())
        assert main._usage_line(usage_error("no full stop")) == "no full stop. See: kvstore x --help"
        assert main._usage_line(usage_error("one?")) == "one? See: kvstore x --help"


def usage_error(message: str) -> Any:
    return types.SimpleNamespace(format_message=lambda: message, ctx=types.SimpleNamespace(command_path="kvstore x"))


def help_texts(path: str, command: Any) -> Iterator[tuple[str, str]]:
    """(where, text) of every command, argument and option."""
    for text in (command.help, getattr(command, "epilog", None)):
        if text:
            yield path, text
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            yield f"{path} {parameter.name}", text
    for name, child in getattr(command, "commands", {}).items():
        real = cli_app.load_command(name) if path == "kvstore" else child
        yield from help_texts(f"{path} {name}", real)


class TestNames:
    """Errors of ``kvstore fs`` say which name they are of."""

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (errors.NotFound("'b' does not exist"), "/a/b: does not exist"),
            (errors.NotFound("block 1-2: its bytes differ", reason="corrupt"), "/a/b: block 1-2: its bytes differ"),
            (errors.Corrupt("the block ends after 3 of 5 bytes"), "/a/b: the block ends after 3 of 5 bytes"),
            (errors.AlreadyExists("/a/b: exists already"), "/a/b: exists already"),
            (errors.IsDirectory("/a/b is a directory"), "/a/b: is a directory"),
            (errors.NotFound("/data/v: Input/output error", reason="corrupt"), "/a/b: /data/v: Input/output error"),
            (errors.Unavailable("h:1: connection refused"), "h:1: connection refused"),
        ],
    )
    def test_one_wording(self, error: errors.KvError, line: str) -> None:
        with pytest.raises(type(error)) as caught, fs_rows.named("/a/b"):
            raise error
        assert (caught.value.message, caught.value.reason) == (line, error.reason)

    def test_paths_have_one_spelling(self) -> None:
        assert [fs_cmd.from_root(p) for p in ("", "/", "a", "/a//b/")] == ["/", "/", "/a", "/a/b"]
        assert [fs_cmd.target_from_root(p) for p in ("/", "a", "a/")] == ["/", "/a", "/a/"]


def test_the_transport_says_nothing_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """grpc's C core writes to standard error unless it is told not to before it is imported."""
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    code = (
        "import os, sys; from kvstore.cli.main import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: print(os.environ['GRPC_VERBOSITY'], 'grpc' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "NONE False"


def imported_by(*args: str) -> set[str]:
    """The modules that a command line leaves imported, in a process of its own."""
    code = "import sys; from kvstore.cli.main import run; run(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stderr.split())


class TestLaziness:
    def test_help_imports_no_command(self) -> None:
        modules = imported_by("--help")
        assert "kvstore.cli.app" in modules
        assert modules.isdisjoint({"grpc", "pyfuse3", "rocksdict", "msgspec", "uvloop", "prometheus_client"})
        assert modules.isdisjoint(command.module for command in cli_app.COMMANDS.values())

    def test_one_command_imports_no_other(self) -> None:
        modules = imported_by("config", "show")
        assert "kvstore.cli.config_cmd" in modules
        assert modules.isdisjoint({"grpc", "pyfuse3", "rocksdict", "prometheus_client"})

    def test_the_package_imports_no_grpc(self) -> None:
        code = "import sys, kvstore; kvstore.NotFound; print('grpc' in sys.modules, 'asyncio' in sys.modules)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == ["False", "False"]

    def test_unknown_names_are_attribute_errors(self) -> None:
        with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
            kvstore.Clinet  # noqa: B018

    def test_all_exports_exist(self) -> None:
        assert [name for name in kvstore.__all__ if getattr(kvstore, name, None) is None] == []
        assert set(kvstore.__all__) <= set(dir(kvstore))

    def test_every_error_is_exported(self) -> None:
        assert {cls.__name__ for cls in errors.BY_CODE.values()} <= set(kvstore.__all__)


class TestOutput:
    COLUMNS = (Column("name", "NAME"), size_column("size_bytes", "SIZE"), number_column("count", "COUNT"))
    ROWS = (
        {"name": "[red]a\x1b[0m\nb", "size_bytes": 1536, "count": 1234567, "hidden": 1},
        {"name": "é" * 200, "size_bytes": None},
    )

    def test_rows_for_people(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_rows(self.ROWS, self.COLUMNS, with_json=False)
        head, first, second = capsys.readouterr().out.splitlines()
        assert head.split() == ["NAME", "SIZE", "COUNT"]
        assert first.split() == [r"[red]a\x1b[0m\nb", "1.50", "KiB", "1,234,567"]
        assert second.strip() == "é" * 200

    def test_rows_for_machines(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_rows(self.ROWS, self.COLUMNS, with_json=True)
        assert tuple(json.loads(line) for line in capsys.readouterr().out.splitlines()) == self.ROWS

    def test_no_cell_is_cut_at_the_width_of_the_terminal(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "20")
        print_rows(self.ROWS, self.COLUMNS, with_json=False)
        print_object(self.ROWS[1], self.COLUMNS, with_json=False)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 3 + 3
        assert [line for line in lines if line != line.rstrip()] == [], "blanks at the end would wrap"
        assert lines[3].split() == ["NAME", "é" * 200]

    def test_numbers_stand_below_each_other(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_rows([{"name": "日本", "count": 7}, {"name": "abc", "count": 1000}], self.COLUMNS, with_json=False)
        assert capsys.readouterr().out.splitlines() == [
            "NAME  SIZE  COUNT",
            "日本            7",
            "abc         1,000",
        ]

    def test_objects(self, capsys: pytest.CaptureFixture[str]) -> None:
        print_object(self.ROWS[0], self.COLUMNS, with_json=True)
        assert json.loads(capsys.readouterr().out) == self.ROWS[0]
        print_object(self.ROWS[0], self.COLUMNS, with_json=False)
        assert capsys.readouterr().out.splitlines()[1].split() == ["SIZE", "1.50", "KiB"]

    def test_a_reader_that_leaves_ends_it_quietly(self) -> None:
        code = "from kvstore.cli.main import main; main(['config', 'show', '--json'] )"
        line = f'{sys.executable} -c "{code}" | true; echo "${{PIPESTATUS[0]}}"'
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        assert done.stdout.strip() in {"0", "1"}

    def test_printable(self) -> None:
        assert output.printable("a\tb\u202e") == r"a\tb\u202e"


class TestConfigShow:
    def test_for_people(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        path = tmp_path / "c.toml"
        path.write_text('[mount]\ntemp_patterns=["*.x"]\n')
        assert run(["config", "show", "--origin", "--config", str(path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        (line,) = [line for line in lines if line.startswith("mount.temp_patterns ")]
        assert line.split(maxsplit=2) == ["mount.temp_patterns", '["*.x"]', f"file {path}"]
        assert lines[0].split() == ["KEY", "VALUE", "ORIGIN"]

    def test_for_machines(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_MASTER__DEAD_TICKS", "9")
        assert run(["config", "show", "--json"]) == 0
        rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        (row,) = [row for row in rows if row["key"] == "master.dead_ticks"]
        assert row == {"key": "master.dead_ticks", "value": 9, "origin": "environment KVSTORE_MASTER__DEAD_TICKS"}

    def test_what_is_not_set(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_MOUNT__GID", "1000")
        assert run(["config", "show", "--json"]) == 0
        rows = {(row := json.loads(line))["key"]: row["value"] for line in capsys.readouterr().out.splitlines()}
        assert (rows["mount.uid"], rows["mount.gid"], rows["mount.umask"]) == (None, 1000, "")
        assert (rows["mount.passthrough"], rows["mount.deadline"]) == ("auto", "10s")

    def test_a_wrong_key(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_LOG__LEVL", "info")
        assert run(["config", "show"]) == 2
        assert "did you mean 'KVSTORE_LOG__LEVEL'?" in capsys.readouterr().err
