"""Configuration: one tree of structs, filled from defaults < TOML file < ``KVSTORE_A__B`` environment < flags.

``load()`` returns the checked tree together with the origin of every value. Unknown keys are refused, with the nearest
right name. Sizes and durations are text with a unit (``200GiB``, ``10s``); the properties that read them carry the unit
in their names (``capacity_bytes``, ``tick_s``).
"""

from kvstore.config.check import require_grace, require_mount_dir, require_volumes
from kvstore.config.layers import DEFAULT_PATH, Loaded, load
from kvstore.config.tree import (
    ClientConfig,
    Config,
    LogConfig,
    MasterConfig,
    MountConfig,
    MountPoint,
    NodeConfig,
    VolumeConfig,
    WorkerConfig,
)
from kvstore.config.units import HostPort, format_size, parse_address, parse_duration_s, parse_mode, parse_size

__all__ = [
    "DEFAULT_PATH",
    "ClientConfig",
    "Config",
    "HostPort",
    "Loaded",
    "LogConfig",
    "MasterConfig",
    "MountConfig",
    "MountPoint",
    "NodeConfig",
    "VolumeConfig",
    "WorkerConfig",
    "format_size",
    "load",
    "parse_address",
    "parse_duration_s",
    "parse_mode",
    "parse_size",
    "require_grace",
    "require_mount_dir",
    "require_volumes",
]
