"""Configuration: layers and origins, units, refusals that say what was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.config import (
    Config,
    HostPort,
    Loaded,
    format_size,
    load,
    parse_address,
    parse_duration_s,
    parse_mode,
    parse_size,
    require_grace,
    require_mount_dir,
    require_volumes,
    schema,
)
from kvstore.config.check import CHECKS, check
from kvstore.config.tree import Kind
from kvstore.core.errors import Denied, InvalidRequest, NotFound

VOLUME = '{tier="ssd", path="/data", capacity="200GiB"}'


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvstore.toml"
    path.write_text(text)
    return str(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load(write(tmp_path, text), environ={})
    return caught.value.message


def origin(loaded: Loaded, key: str) -> str:
    return {row[0]: row[2] for row in loaded.rows()}[key]


class TestUnits:
    @pytest.mark.parametrize(
        ("text", "size_bytes"),
        [
            ("0", 0),
            ("1B", 1),
            ("1KiB", 1024),
            ("1.5 MiB", 1_572_864),
            ("200GiB", 214_748_364_800),
            ("1TiB", 1 << 40),
            ("10GB", 10**10),
            ("9007199254740993B", 9007199254740993),
        ],
    )
    def test_sizes(self, text: str, size_bytes: int) -> None:
        assert parse_size(text) == size_bytes

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("200", "unit is missing"),
            ("200gib", "'gib' is written 'GiB'"),
            ("200Mi", "unknown unit 'Mi'"),
            ("-1GiB", "not a size"),
            ("1e9B", "not a size"),
            ("", "not a size"),
            ("inf", "not a size"),
            ("٣GiB", "not a size"),
        ],
    )
    def test_wrong_sizes_say_why(self, text: str, problem: str) -> None:
        with pytest.raises(InvalidRequest, match=problem):
            parse_size(text)

    @pytest.mark.parametrize(
        ("text", "duration_s"),
        [("0", 0), ("250ms", 0.25), ("10s", 10), ("1.5m", 90), ("24h", 86_400), ("7d", 604_800)],
    )
    def test_durations(self, text: str, duration_s: float) -> None:
        assert parse_duration_s(text) == duration_s

    @pytest.mark.parametrize("text", ["10", "10 S", "10min", "s", "1h30m"])
    def test_wrong_durations(self, text: str) -> None:
        with pytest.raises(InvalidRequest, match="10s, 250ms or 24h"):
            parse_duration_s(text)

    @given(st.integers(min_value=0, max_value=1 << 62))
    def test_format_size_is_read_back_within_its_rounding(self, size_bytes: int) -> None:
        assert parse_size(format_size(size_bytes)) == pytest.approx(size_bytes, rel=0.006)

    @pytest.mark.parametrize(
        ("size_bytes", "text"),
        [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (14_680_064, "14.0 MiB"), (200 << 30, "200 GiB")],
    )
    def test_format_size(self, size_bytes: int, text: str) -> None:
        assert format_size(size_bytes) == text

    def test_addresses(self) -> None:
        assert parse_address("127.0.0.1:0") == HostPort("127.0.0.1", 0)
        assert parse_address("node-1.kv:7070") == ("node-1.kv", 7070)
        assert parse_address("[::1]:7070") == HostPort("::1", 7070)
        assert str(parse_address("[::1]:7070")) == "[::1]:7070"
        assert str(parse_address("a:1")) == "a:1"

    @pytest.mark.parametrize(
        "text", ["", "7070", ":7070", "a:", "a:x", "a:65536", "a:-1", "::1:70", "[a]:1", "a b:1", "a:²"]
    )
    def test_wrong_addresses(self, text: str) -> None:
        with pytest.raises(InvalidRequest):
            parse_address(text)

    def test_modes(self) -> None:
        assert parse_mode("0660") == parse_mode("660") == 0o660
        for text in ("0888", "77777", "rw-rw-rw-", ""):
            with pytest.raises(InvalidRequest, match="octal"):
                parse_mode(text)


class TestLayers:
    def test_defaults_alone(self) -> None:
        loaded = load(environ={})
        assert loaded.config == Config()
        assert {row[2] for row in loaded.rows()} == {"default"}

    def test_defaults_are_what_the_documents_say(self) -> None:
        config = load(environ={}).config
        assert config.master.listen_address == ("127.0.0.1", 7070)
        assert config.master.http_address == ("127.0.0.1", 7071)
        assert config.worker.listen_address == ("127.0.0.1", 7080)
        assert config.worker.http_address == ("127.0.0.1", 7081)
        assert config.worker.socket_mode_bits == 0o666
        assert config.mount.http_address is None
        assert (config.master.tick_s, config.master.dead_ticks, config.master.forget_after_s) == (1, 5, 86_400)
        assert (config.master.journal_records, config.master.journal_size_bytes) == (1_000_000, 1 << 30)
        assert config.client.metadata_ttl_s == 1
        assert config.mount.temp_patterns == ["*.tmp", ".tmp/*"]
        assert (config.mount.passthrough, config.mount.consistency) == ("auto", "cached")
        assert (config.mount.uid, config.mount.gid, config.mount.umask_bits) == (None, None, None)
        assert (config.mount.deadline_s, config.mount.busy_wait_s) == (10, 5)

    def test_each_layer_beats_the_one_below(self, tmp_path: Path) -> None:
        path = write(tmp_path, '[master]\ntick="2s"\nlisten="a:1"\ndata="/file"\n')
        environ = {"KVSTORE_MASTER__LISTEN": "b:2", "KVSTORE_MASTER__DATA": "/env"}
        loaded = load(path, {"master.data": "/flag", "master.http": None}, environ)
        master = loaded.config.master
        assert (master.tick_s, master.listen, master.data, master.http) == (2, "b:2", "/flag", "127.0.0.1:7071")
        assert origin(loaded, "master.tick") == f"file {path}"
        assert origin(loaded, "master.listen") == "environment KVSTORE_MASTER__LISTEN"
        assert origin(loaded, "master.data") == "flag master.data"
        assert origin(loaded, "master.http") == "default"

    def test_the_environment_names_the_file_and_the_flag_beats_it(self, tmp_path: Path) -> None:
        path = write(tmp_path, '[log]\nlevel="debug"\n')
        assert load(environ={"KVSTORE_CONFIG": path}).config.log.level == "debug"
        assert load(path, environ={"KVSTORE_CONFIG": "/does/not/exist"}).config.log.level == "debug"

    def test_the_default_file_is_read_when_it_is_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvstore.config.layers.DEFAULT_PATH", write(tmp_path, '[log]\nlevel="error"\n'))
        assert load(environ={}).config.log.level == "error"

    def test_volumes_with_their_origins(self, tmp_path: Path) -> None:
        text = f'[[worker.volumes]]\ntier="mem"\npath="/m"\ncapacity="1GiB"\n\n[[worker.volumes]]\n{VOLUME[1:-1]}'
        path = write(tmp_path, text.replace(", ", "\n"))
        loaded = load(path, environ={})
        mem, ssd = loaded.config.worker.volumes
        assert (mem.tier, mem.capacity_bytes, ssd.path, ssd.free_floor_bytes) == ("mem", 1 << 30, "/data", 1 << 30)
        assert origin(loaded, "worker.volumes[1].capacity") == f"file {path}"
        assert origin(loaded, "worker.volumes[1].free_floor") == "default"

    def test_a_list_is_replaced_as_a_whole(self, tmp_path: Path) -> None:
        path = write(
            tmp_path, f'[worker]\nvolumes=[{VOLUME}, {{tier="hdd", path="/b", capacity="1GB", free_floor="0"}}]'
        )
        loaded = load(path, environ={"KVSTORE_WORKER__VOLUMES": f"[{VOLUME}]"})
        assert len(loaded.config.worker.volumes) == 1
        assert origin(loaded, "worker.volumes[0].tier") == "environment KVSTORE_WORKER__VOLUMES"
        assert not [key for key in loaded.origins if key.startswith("worker.volumes[1]")]

    def test_text_becomes_the_type_of_its_key(self) -> None:
        environ = {
            "KVSTORE_MASTER__DEAD_TICKS": "7",
            "KVSTORE_MOUNT__DIRECT_IO": "Yes",
            "KVSTORE_MOUNT__ALLOW_OTHER": "0",
            "KVSTORE_MOUNT__TEMP_PATTERNS": "*.part, x/*",
            "KVSTORE_NODE__MOUNTS": '[{dir="/mnt/a", path="/a"}]',
        }
        config = load(environ=environ, flags={"master.journal_records": "12"}).config
        assert (config.master.dead_ticks, config.master.journal_records) == (7, 12)
        assert (config.mount.direct_io, config.mount.allow_other) == (True, False)
        assert config.mount.temp_patterns == ["*.part", "x/*"]
        assert config.node.mounts[0].path == "/a"

    def test_how_a_mount_serves(self, tmp_path: Path) -> None:
        path = write(
            tmp_path,
            '[mount]\npassthrough="on"\nconsistency="strict"\nuid=0\ngid=4294967294\n'
            'umask="0027"\ndeadline="2s"\nbusy_wait="0"\n',
        )
        loaded = load(path, environ={})
        mount = loaded.config.mount
        assert (mount.passthrough, mount.consistency) == ("on", "strict")
        assert (mount.uid, mount.gid, mount.umask_bits) == (0, 4294967294, 0o027)
        assert (mount.deadline_s, mount.busy_wait_s) == (2, 0)
        assert origin(loaded, "mount.uid") == f"file {path}"

    def test_what_may_be_unset(self, tmp_path: Path) -> None:
        """TOML has no word for "not set": a variable or a flag that is empty takes back what a layer below says."""
        path = write(tmp_path, '[mount]\nuid=7\ngid=8\numask="022"\n')
        environ = {"KVSTORE_MOUNT__UID": "", "KVSTORE_MOUNT__UMASK": ""}
        mount = load(path, {"mount.gid": 9}, environ).config.mount
        assert (mount.uid, mount.gid, mount.umask_bits) == (None, 9, None)
        mount = load(path, {"mount.uid": "1000", "mount.gid": ""}, environ={}).config.mount
        assert (mount.uid, mount.gid, mount.umask_bits) == (1000, None, 0o022)

    def test_the_number_of_one_s_own_user(self) -> None:
        environ = {"KVSTORE_MOUNT__UID": "65534", "KVSTORE_MOUNT__GID": "0", "KVSTORE_MOUNT__PASSTHROUGH": "off"}
        loaded = load(environ=environ)
        assert (loaded.config.mount.uid, loaded.config.mount.gid) == (65534, 0)
        assert loaded.config.mount.passthrough == "off"
        assert origin(loaded, "mount.gid") == "environment KVSTORE_MOUNT__GID"

    @pytest.mark.parametrize("name", ["CLIENT", "WORKER", "MOUNT"])
    def test_the_scheme_of_a_store_may_be_left_out(self, name: str) -> None:
        config = load(environ={f"KVSTORE_{name}__MASTER": "a:1,b:2"}).config
        assert getattr(config, name.lower()).master == "kvstore://a:1,b:2"
        config = load(environ={}, flags={f"{name.lower()}.master": "a:1/root"}).config
        assert getattr(config, name.lower()).master == "kvstore://a:1/root"

    @pytest.mark.parametrize(
        ("text", "client", "mount", "origins"),
        [
            ('[worker]\nmaster="a:1"', "a:1", "a:1", ("worker.master", "worker.master")),
            ('[mount]\nmaster="a:1"', "a:1", "a:1", ("mount.master", "file")),
            ('[client]\nmaster="a:1"', "a:1", "a:1", ("file", "client.master")),
            (
                '[worker]\nmaster="a:1"\n[client]\nmaster="b:2"\n[mount]\nmaster="c:3"',
                "b:2",
                "c:3",
                ("file", "file"),
            ),
            ('[mount]\nmaster="kvstore://a:1/models"', "a:1", "a:1/models", ("mount.master", "file")),
        ],
    )
    def test_one_master_named_is_the_master_of_all(
        self, tmp_path: Path, text: str, client: str, mount: str, origins: tuple[str, str]
    ) -> None:
        loaded = load(write(tmp_path, text), environ={})
        assert loaded.config.client.master == f"kvstore://{client}"
        assert loaded.config.mount.master == f"kvstore://{mount}"
        assert origin(loaded, "client.master").startswith(origins[0])
        assert origin(loaded, "mount.master").startswith(origins[1])

    def test_a_flag_beats_the_fallback(self, tmp_path: Path) -> None:
        path = write(tmp_path, '[worker]\nmaster="a:1"')
        config = load(path, {"client.master": "b:2"}, environ={}).config
        assert (config.client.master, config.worker.master) == ("kvstore://b:2", "kvstore://a:1")

    def test_names_that_kubernetes_injects_are_not_ours(self) -> None:
        environ = {"KVSTORE_MASTER_PORT": "tcp://10.0.0.1:7070", "KVSTORE_MASTER_SERVICE_HOST": "10.0.0.1"}
        assert load(environ=environ).config == Config()

    def test_node_id_is_the_host_name_unless_configured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("socket.gethostname", lambda: "gpu-7")
        assert load(environ={}).config.worker.effective_node_id == "gpu-7"
        assert load(environ={}, flags={"worker.node_id": "n1"}).config.worker.effective_node_id == "n1"


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("text", "key", "meant"),
        [
            ('[master]\nlisen="a:1"', "master.lisen", "'master.listen'"),
            ('[mastr]\nlisten="a:1"', "mastr", "'master'"),
            ('[worker]\ncapacity="1GiB"', "worker.capacity", "'worker.volumes[0].capacity'"),
            ('[worker]\nlevel="debug"', "worker.level", "'log.level'"),
            ("[client]\nzzz=1", "client.zzz", "[client] has master, metadata_ttl, timeout"),
            ('[[worker.volumes]]\ntire="ssd"', "worker.volumes[0].tire", "'worker.volumes[0].tier'"),
        ],
    )
    def test_in_a_file(self, tmp_path: Path, text: str, key: str, meant: str) -> None:
        message = refusal(tmp_path, text)
        assert repr(key) in message
        assert meant in message
        assert str(tmp_path) in message

    @pytest.mark.parametrize(
        ("variable", "meant"),
        [
            ("KVSTORE_MASTER__LISEN", "'KVSTORE_MASTER__LISTEN'"),
            ("KVSTORE_MASTR__LISTEN", "'KVSTORE_MASTER__LISTEN'"),
            ("KVSTORE_master__listen", "'KVSTORE_MASTER__LISTEN'"),
            ("KVSTORE_MASTER__PORT", "[master] has listen"),
            ("KVSTORE__MASTER__LISTEN", "'KVSTORE_MASTER__LISTEN'"),
            ("KVSTORE_FOO__BAR", "config show"),
            ("KVSTORE_MASTER__", "[master] has listen"),
        ],
    )
    def test_in_the_environment(self, variable: str, meant: str) -> None:
        with pytest.raises(InvalidRequest) as caught:
            load(environ={variable: "x"})
        assert repr(variable) in caught.value.message
        assert meant in caught.value.message

    def test_in_flags(self) -> None:
        with pytest.raises(InvalidRequest, match=r"did you mean 'worker\.socket_mode'"):
            load(environ={}, flags={"worker.socketmode": None})


class TestWrongValues:
    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("[master]\ntick=1", "master.tick: expected str, got int"),
            ('[master]\ndead_ticks="5"', "master.dead_ticks: expected int, got str"),
            ("[master]\ndead_ticks=0", "master.dead_ticks: expected int >= 1"),
            ('[master]\ntick="0s"', "master.tick: '0s' must be more than 0"),
            ('[master]\nlisten="7070"', "master.listen: '7070' is not an address"),
            ('[master]\nlisten="h:1"\nhttp="h:1"', "master.http: h:1 is taken by master.listen"),
            ('[master]\ndata=""', "master.data: must not be empty"),
            ('[log]\nlevel="loud"', "log.level: invalid value 'loud'; write one of debug, info, warning, error"),
            ('[worker]\nsocket="/%s"' % ("x" * 107), "worker.socket: '/x"),
            ('[worker]\nsocket_mode="rw"', "worker.socket_mode: 'rw' is not a file mode"),
            ('[worker]\nadvertise="h:1"', "worker.advertise: 'h:1' is not a host"),
            ('[worker]\nnode_id="a b"', "worker.node_id: 'a b' must be"),
            ('[worker]\nmaster="http://a:1"', "worker.master: 'http://a:1' is not a URL"),
            ('[worker]\nmaster=""', "worker.master: '' is not a URL"),
            ('[worker]\nmaster="7070"', "worker.master: '7070' is not an address"),
            ('[mount]\nmaster="a:0"', "mount.master"),
            ("[client]\nmaster=1", "client.master: expected str, got int"),
            ('[client]\nmaster="kvstore://a:1,b"', "client.master: 'b' is not an address"),
            ('[client]\nmaster="kvstore://a:0"', "client.master: 'kvstore://a:0': port 0"),
            ('[mount]\npath="models"', "mount.path: 'models' must be an absolute path"),
            ('[mount]\ntemp_patterns=["/x"]', "mount.temp_patterns[0]: '/x' must be a relative pattern"),
            ('[mount]\ndir="a\\u0000b"', "mount.dir: 'a\\x00b' must not contain a zero byte"),
            ('[mount]\npassthrough="yes"', "mount.passthrough: invalid value 'yes'; write one of auto, on, off"),
            ('[mount]\nconsistency="weak"', "mount.consistency: invalid value 'weak'; write one of cached, strict"),
            ("[mount]\nuid=-1", "mount.uid: expected int >= 0"),
            ("[mount]\ngid=4294967295", "mount.gid: expected int <= 4294967294"),
            ('[mount]\nuid="root"', "mount.uid: expected int | null, got str"),
            ('[mount]\numask="rwx"', "mount.umask: 'rwx' is not a file mode"),
            ('[mount]\ndeadline="0s"', "mount.deadline: '0s' must be more than 0"),
            ('[mount]\nbusy_wait="-1s"', "mount.busy_wait: '-1s' is not a duration"),
            ("[worker]\nvolumes=[1]", "worker.volumes[0]: expected object, got int"),
            ("[worker]\nvolumes=1", "worker.volumes: expected array, got int"),
            (f"[worker]\nvolumes=[{VOLUME.replace('ssd', 'sdd')}]", "invalid value 'sdd'; write one of mem, ssd, hdd"),
            (
                f"[worker]\nvolumes=[{VOLUME.replace('200GiB', '0GiB')}]",
                "worker.volumes[0].capacity: '0GiB' must be more",
            ),
            ('[worker]\nvolumes=[{tier="ssd", path="/d"}]', "worker.volumes[0]: missing required field capacity"),
            (
                f"[worker]\nvolumes=[{VOLUME}, {VOLUME.replace('/data', '/data/')}]",
                "worker.volumes[1].path: /data stands",
            ),
            ('[node]\nmounts=[{dir="/a"}, {dir="/a"}]', "node.mounts[1].dir: /a stands in node.mounts[0] too"),
            ("master=1", "master must be a table; write [master]"),
            ("[master", "not valid TOML"),
        ],
    )
    def test_in_a_file(self, tmp_path: Path, text: str, problem: str) -> None:
        assert problem in refusal(tmp_path, text)

    @pytest.mark.parametrize(
        ("variable", "text", "problem"),
        [
            ("KVSTORE_MASTER__DEAD_TICKS", "many", "not a whole number"),
            ("KVSTORE_MOUNT__DIRECT_IO", "maybe", "neither true nor false"),
            ("KVSTORE_MOUNT__UID", "root", "not a whole number"),
            ("KVSTORE_WORKER__VOLUMES", "/data", "not a TOML array such as"),
            ("KVSTORE_WORKER__VOLUMES", "[{]", "not a TOML array such as"),
            ("KVSTORE_WORKER__VOLUMES", '[]\nx=1\ny="', "not a TOML array such as"),
        ],
    )
    def test_in_the_environment(self, variable: str, text: str, problem: str) -> None:
        with pytest.raises(InvalidRequest, match=problem) as caught:
            load(environ={variable: text})
        assert variable in caught.value.message

    def test_the_message_names_the_origin(self) -> None:
        with pytest.raises(InvalidRequest, match=r"\(environment KVSTORE_MASTER__TICK\)$"):
            load(environ={"KVSTORE_MASTER__TICK": "soon"})

    def test_port_zero_may_stand_twice(self) -> None:
        load(environ={}, flags={"master.listen": "h:0", "master.http": "h:0"})

    def test_a_port_is_off_when_empty(self) -> None:
        assert load(environ={}, flags={"worker.http": ""}).config.worker.http_address is None


class TestFiles:
    def test_a_named_file_must_exist(self) -> None:
        with pytest.raises(NotFound, match="/does/not/exist: No such file"):
            load("/does/not/exist", environ={})

    def test_a_directory_is_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(Denied, match="Is a directory"):
            load(str(tmp_path), environ={})

    def test_bytes_that_are_not_text(self, tmp_path: Path) -> None:
        (tmp_path / "x").write_bytes(b"\xff\xfe")
        with pytest.raises(InvalidRequest, match="not valid TOML"):
            load(str(tmp_path / "x"), environ={})

    def test_a_device_that_never_ends(self) -> None:
        with pytest.raises(InvalidRequest, match="no configuration file"):
            load("/dev/zero", environ={})


class TestRequired:
    def test_volumes(self) -> None:
        with pytest.raises(InvalidRequest, match=r"add \[\[worker\.volumes\]\]"):
            require_volumes(Config())
        require_volumes(load(environ={"KVSTORE_WORKER__VOLUMES": f"[{VOLUME}]"}).config)

    def test_mount_dir(self) -> None:
        with pytest.raises(InvalidRequest, match=r"mount\.dir"):
            require_mount_dir(Config())
        require_mount_dir(load(environ={}, flags={"mount.dir": "/mnt"}).config)

    def test_a_mount_that_is_more_patient_than_the_workers(self) -> None:
        require_grace(Config())
        patient = {"mount.deadline": "21s"}
        with pytest.raises(InvalidRequest, match=r"mount.deadline: 21s .* worker.session_grace \(60s\)"):
            require_grace(load(environ={}, flags=patient).config)
        require_grace(load(environ={}, flags={**patient, "worker.session_grace": "63s"}).config)


def test_every_kind_has_a_check() -> None:
    assert set(CHECKS) == set(Kind)


def test_the_defaults_pass_their_own_check() -> None:
    check(Config(), {})


def test_every_text_has_a_kind() -> None:
    """A new key of text that nobody checks would be accepted whatever it says."""
    plain = [key for key, hint in schema.keys().items() if hint is str]
    assert plain == []
