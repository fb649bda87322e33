"""The frame of the command line: lazy commands, exit codes, one line per error, output for people and machines."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import kvstore
from kvstore.cli import app as cli_app
from kvstore.cli import output
from kvstore.cli.app import Command, new_app
from kvstore.cli.main import EXIT_CODES, run
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

    def test_a_wrong_key(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVSTORE_LOG__LEVL", "info")
        assert run(["config", "show"]) == 2
        assert "did you mean 'KVSTORE_LOG__LEVEL'?" in capsys.readouterr().err
