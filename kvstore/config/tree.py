"""The tree of configuration: every key, its default and its kind. `check` knows what each kind allows.

A field is what stands in the file (text with a unit); the property beside it is the number, with its unit in the name.
The properties parse on each use and raise `InvalidRequest` on a tree that was never checked: read them once, at start.
"""

from __future__ import annotations

import enum
import socket
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from kvstore.config.units import HostPort, parse_address, parse_duration_s, parse_mode, parse_size


class Kind(enum.Enum):
    """What a text stands for."""

    SIZE = enum.auto()
    POSITIVE_SIZE = enum.auto()
    DURATION = enum.auto()
    POSITIVE_DURATION = enum.auto()
    ADDRESS = enum.auto()
    OPTIONAL_ADDRESS = enum.auto()
    OPTIONAL_HOST = enum.auto()
    URL = enum.auto()
    MODE = enum.auto()
    OPTIONAL_MODE = enum.auto()
    NAME = enum.auto()
    PATH = enum.auto()
    REQUIRED_PATH = enum.auto()
    SOCKET = enum.auto()
    STORE_PATH = enum.auto()


Size = Annotated[str, Kind.SIZE]
PositiveSize = Annotated[str, Kind.POSITIVE_SIZE]
Duration = Annotated[str, Kind.DURATION]
PositiveDuration = Annotated[str, Kind.POSITIVE_DURATION]
ListenAddress = Annotated[str, Kind.ADDRESS]
OptionalAddress = Annotated[str, Kind.OPTIONAL_ADDRESS]
OptionalHost = Annotated[str, Kind.OPTIONAL_HOST]
Url = Annotated[str, Kind.URL]
Mode = Annotated[str, Kind.MODE]
OptionalMode = Annotated[str, Kind.OPTIONAL_MODE]
Name = Annotated[str, Kind.NAME]
Path = Annotated[str, Kind.PATH]
RequiredPath = Annotated[str, Kind.REQUIRED_PATH]
SocketPath = Annotated[str, Kind.SOCKET]
StorePath = Annotated[str, Kind.STORE_PATH]
Share = Annotated[float, Meta(gt=0, le=1)]
ShareOrNone = Annotated[float, Meta(ge=0, le=1)]
AtLeastOne = Annotated[int, Meta(ge=1)]
OwnerId = Annotated[int, Meta(ge=0, le=(1 << 32) - 2)]
"""A user's or group's number; 2³² − 1 is (uid_t) −1, "leave it alone" in chown(2)."""

DEFAULT_URL = "kvstore://127.0.0.1:7070"


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


class MasterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    listen: ListenAddress = "127.0.0.1:7070"
    http: OptionalAddress = "127.0.0.1:7071"
    data: RequiredPath = "/var/lib/kvstore/master"
    tick: PositiveDuration = "1s"
    dead_ticks: AtLeastOne = 5
    forget_after: PositiveDuration = "24h"
    journal_records: AtLeastOne = 1_000_000
    journal_size: PositiveSize = "1GiB"
    free_reserve: Size = "256MiB"
    scan_interval: PositiveDuration = "6h"

    @property
    def listen_address(self) -> HostPort:
        return parse_address(self.listen)

    @property
    def http_address(self) -> HostPort | None:
        return _optional_address(self.http)

    @property
    def tick_s(self) -> float:
        return parse_duration_s(self.tick)

    @property
    def forget_after_s(self) -> float:
        return parse_duration_s(self.forget_after)

    @property
    def journal_size_bytes(self) -> int:
        return parse_size(self.journal_size)

    @property
    def free_reserve_bytes(self) -> int:
        return parse_size(self.free_reserve)

    @property
    def scan_interval_s(self) -> float:
        """The whole database is read at start and then this often, to find damaged tables."""
        return parse_duration_s(self.scan_interval)


class VolumeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One directory of one tier. ``capacity`` is the hard cap, ``free_floor`` what the disk's other users keep. Filled
    above ``high_watermark`` (of the capacity), it gives its coldest blocks away until it is down to ``low_watermark``.
    """

    tier: Literal["mem", "ssd", "hdd"]
    path: RequiredPath
    capacity: PositiveSize
    free_floor: Size = "1GiB"
    high_watermark: Share = 0.95
    low_watermark: Share = 0.90

    @property
    def capacity_bytes(self) -> int:
        return parse_size(self.capacity)

    @property
    def free_floor_bytes(self) -> int:
        return parse_size(self.free_floor)


class WorkerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    node_id: Name = ""
    master: Url = DEFAULT_URL
    listen: ListenAddress = "127.0.0.1:7080"
    http: OptionalAddress = "127.0.0.1:7081"
    advertise: OptionalHost = ""
    socket: SocketPath = "/run/kvstore/worker.sock"
    socket_mode: Mode = "0666"
    session_grace: PositiveDuration = "60s"
    full_report: PositiveDuration = "10m"
    move_rate: PositiveSize = "512MiB"
    moves_at_a_time: AtLeastOne = 2
    pin_share: ShareOrNone = 0.5
    scrub_rate: Size = "20MiB"
    scrub_interval: Duration = "24h"
    volumes: list[VolumeConfig] = field(default_factory=list)

    @property
    def move_bytes_per_s(self) -> int:
        return parse_size(self.move_rate)

    @property
    def scrub_bytes_per_s(self) -> int:
        """How fast blocks are read again to find damage; 0: not at all."""
        return parse_size(self.scrub_rate)

    @property
    def scrub_interval_s(self) -> float:
        """At least, between two rounds of that."""
        return parse_duration_s(self.scrub_interval)

    @property
    def effective_node_id(self) -> str:
        """The configured node id, else the host's name."""
        return self.node_id or socket.gethostname()

    @property
    def listen_address(self) -> HostPort:
        return parse_address(self.listen)

    @property
    def http_address(self) -> HostPort | None:
        return _optional_address(self.http)

    @property
    def socket_mode_bits(self) -> int:
        return parse_mode(self.socket_mode)

    @property
    def session_grace_s(self) -> float:
        return parse_duration_s(self.session_grace)

    @property
    def full_report_s(self) -> float:
        return parse_duration_s(self.full_report)


class ClientConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What the command line uses unless told otherwise in the call.

    ``master``, while it is not set, is ``worker.master``, else ``mount.master``; `kvstore config show --origin` says
    which.

    ``timeout``: how long the master may take for an answer before it counts as away; bytes have time by their number
    beside it. With more than the default 1 s a command also waits so long for a master that is being started again.
    """

    master: Url = DEFAULT_URL
    metadata_ttl: Duration = "1s"
    timeout: PositiveDuration = "1s"

    @property
    def metadata_ttl_s(self) -> float:
        return parse_duration_s(self.metadata_ttl)

    @property
    def timeout_s(self) -> float:
        return parse_duration_s(self.timeout)


class MountConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One mount: where, what it shows, how bytes pass, and what becomes of it when its process dies.

    ``master``, while it is not set, is ``worker.master``, else ``client.master``.

    ``passthrough``: ``auto`` uses it where the kernel (6.9 or later), CAP_SYS_ADMIN and the volumes' file system allow
    it; ``on`` refuses to mount without it; ``off`` is the plain mode, without a keeper. ``direct_io`` and
    ``read_ahead`` are about what does not pass through.

    ``consistency``: ``cached`` serves entries of files for ``client.metadata_ttl`` (``stale_max`` more while the master
    is away); ``strict`` asks the master each time, and fails when it is away.

    ``uid``, ``gid`` and ``umask``, where they are set, are the owner and the permissions that every file and directory
    shows, whoever made it; where they are not, the store says. An empty variable or flag means "not set".

    ``deadline``: how long a call waits for a file system process that died or stopped until it gets EIO.
    ``busy_wait``: how long SIGTERM waits for open files before it detaches the mount lazily; ``0`` does not wait.
    """

    dir: Path = ""
    master: Url = DEFAULT_URL
    path: StorePath = "/"
    worker_socket: SocketPath = ""
    http: OptionalAddress = ""
    temp_patterns: list[str] = field(default_factory=lambda: ["*.tmp", ".tmp/*"])
    temp_ttl: PositiveDuration = "10m"
    stale_max: Duration = "60s"
    direct_io: bool = False
    read_ahead: Size = "1MiB"
    allow_other: bool = True
    staging_dir: Path = ""
    passthrough: Literal["auto", "on", "off"] = "auto"
    consistency: Literal["cached", "strict"] = "cached"
    uid: OwnerId | None = None
    gid: OwnerId | None = None
    umask: OptionalMode = ""
    deadline: PositiveDuration = "10s"
    busy_wait: Duration = "5s"

    @property
    def http_address(self) -> HostPort | None:
        return _optional_address(self.http)

    @property
    def temp_ttl_s(self) -> float:
        return parse_duration_s(self.temp_ttl)

    @property
    def stale_max_s(self) -> float:
        """How long past its time to live an entry of a file may serve while the master is away (rule 27)."""
        return parse_duration_s(self.stale_max)

    @property
    def read_ahead_bytes(self) -> int:
        return parse_size(self.read_ahead)

    @property
    def umask_bits(self) -> int | None:
        """The permissions that nobody gets; None where the store says."""
        return parse_mode(self.umask) if self.umask else None

    @property
    def deadline_s(self) -> float:
        return parse_duration_s(self.deadline)

    @property
    def busy_wait_s(self) -> float:
        return parse_duration_s(self.busy_wait)


class MountPoint(Struct, frozen=True, forbid_unknown_fields=True):
    """One mount that the node daemon keeps: where, and which directory of the store it shows."""

    dir: RequiredPath
    path: StorePath = "/"


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    mounts: list[MountPoint] = field(default_factory=list)
    backoff_max: PositiveDuration = "30s"

    @property
    def backoff_max_s(self) -> float:
        return parse_duration_s(self.backoff_max)


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    log: LogConfig = field(default_factory=LogConfig)
    master: MasterConfig = field(default_factory=MasterConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    client: ClientConfig = field(default_factory=ClientConfig)
    mount: MountConfig = field(default_factory=MountConfig)
    node: NodeConfig = field(default_factory=NodeConfig)


def _optional_address(text: str) -> HostPort | None:
    """None where the text is empty: that port is off."""
    return parse_address(text) if text else None
