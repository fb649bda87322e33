"""Every limit and deadline in one place, checked against each other at import.

Sizes in bytes, times in seconds. A deadline is for one call as its caller sees it, retries included.
"""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# Names and blocks
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
MAX_PATH_PARTS = 256
MAX_BLOCK_BYTES = 1 * GIB
"""Default of `max_block_size`; LMCache's largest chunk is 80 to 128 MiB."""

# Messages
FRAME_BYTES = 1 * MIB
"""Raw data frames over gRPC. Larger ones are slower (field notes: 8 MiB unary 1,250 MB/s, 1 MiB frames 1,540)."""
MAX_MESSAGE_BYTES = 16 * MIB
"""gRPC messages either way."""
MAX_BATCH = 4096
"""Paths in one request, ids in one piece of a report, names in one page of a list."""
MAX_SOCKET_MESSAGE_BYTES = 64 * KIB
"""One message on the worker's Unix socket (SEQPACKET; the default send buffer is 208 KiB)."""
MAX_FDS_PER_MESSAGE = 64
"""The kernel takes at most 253."""

# Bounds on work that waits
MAX_INFLIGHT_RPCS = 2048
"""Calls of clients that a server has under way; the next one is Overloaded."""
RESERVED_RPCS = 1024
"""Beyond these, for what keeps the cluster alive: registrations, heartbeats, reports, whether a worker lives."""
MAX_STREAMS_PER_CONNECTION = 512
"""Calls under way on one gRPC connection; its client keeps the others back."""
MAX_BULK_STREAMS = 256
"""Blocks that a worker sends or receives at a time: each has up to three frames in memory."""
MAX_FETCHES = 1024
"""Blocks that a worker fetches at a time."""
RETRY_AFTER_S = 0.1
"""Said to whoever is refused; they spread over twice that."""
MAX_RETRY_AFTER_S = 5.0
"""What is believed of it."""
MAX_SOCKET_CLIENTS = 1024
MAX_QUEUED_FDS = 4096
"""In answers on the worker's socket that their clients do not read."""
MAX_SESSIONS = 65_536
"""That a worker remembers, those that ended less than a grace ago included."""
MAX_OPEN_STAGING_PER_SESSION = 4096

# Deadlines
METADATA_TIMEOUT_S = 1.0
"""One master call of the SDK, retries included. Who gives more than this waits for a master that restarts."""
MOUNT_METADATA_TIMEOUT_S = 1.0
"""One master call inside a FUSE operation."""
MOUNT_OPERATION_TIMEOUT_S = 30.0
"""The guard around a FUSE operation: nothing hangs longer. Reading and sealing big blocks fit into it."""
START_TIMEOUT_S = 5.0
"""For a client that is started by name: nobody waits for its values yet, and names are resolved, channels made."""
CONNECT_TIMEOUT_S = 2.0
"""To a peer, beside the time that it needs to open the block."""
MAX_TIMEOUT_S = 86_400.0
"""A caller's longer timeout (infinity, too) is cut to this: sockets and gRPC overflow far below the largest float."""
HEARTBEAT_TIMEOUT_S = 2.0
REPORT_TIMEOUT_S = 5.0
HELLO_TIMEOUT_S = 5.0
"""Who connects to a Unix socket and says nothing is hung up on."""
HANDSHAKE_TIMEOUT_S = 20.0
"""The same of gRPC. Much longer: a server, or a machine, on which thousands connect at once must not hang up on those
whose turn has not come, or they all begin anew.
"""
STALL_TIMEOUT_S = 10.0
"""So long a peer may keep a server waiting in the middle of a stream, or not read its answers."""
LEASE_WAIT_S = 0.05
"""How long seal waits for the last writer's fd to go (rule 5); then it seals a copy."""
ROOM_WAIT_S = 5.0
"""How long a put waits for eviction to make room before NoSpace."""

SILENCE_S = 0.4
"""So long the local worker may say nothing to those who wait before it is asked whether it lives: waiting for room,
hashing and fetching take longer, and are no silence.
"""
PING_TIMEOUT_S = 0.5
"""For that question; any answer will do."""
PROBE_TIMEOUT_S = 1.0
"""One question, in the background, to whom did not answer."""
PROBE_PAUSE_S = (0.1, 0.25)
"""Between two of them, at random: many clients lose a server at the same moment. Up to four times that later."""
EVIDENCE_S = 0.9 * METADATA_TIMEOUT_S
"""A caller who waited less in vain has only his own impatience to tell of."""
OVERDUE_S = 0.5
"""A timeout that comes so much too late tells of a process without a processor, not of whoever was called."""

RECONNECT_BACKOFF_MS = (50, 200, 500)
"""gRPC's initial, minimum and maximum reconnect back-off (its default is back 18 s after a 25 s outage)."""

HAND_OVER_TIMEOUT_S = 10.0
"""The one exception to the deadlines: a mount's restart (mount step)."""
SESSION_GRACE_S = 60.0
"""How long unpublished blocks and staging of a session that ended are kept (rule 11)."""


def open_timeout_s(length_bytes: int) -> float:
    """Open of a local block, which may have to be read and verified: 1 s + size at 200 MB/s (rule 6)."""
    return 1.0 + length_bytes / 200e6


def fetch_timeout_s(length_bytes: int) -> float:
    """Fetch of a block from a peer: 5 s + size at 50 MB/s."""
    return 5.0 + length_bytes / 50e6


def store_timeout_s(length_bytes: int) -> float:
    """Seal (hash) of a block, or sending it to a worker: like a fetch, plus the wait for room."""
    return fetch_timeout_s(length_bytes) + ROOM_WAIT_S


assert FRAME_BYTES < MAX_MESSAGE_BYTES
assert SESSION_GRACE_S >= 3 * HAND_OVER_TIMEOUT_S
assert MOUNT_METADATA_TIMEOUT_S < MOUNT_OPERATION_TIMEOUT_S
assert MAX_FDS_PER_MESSAGE <= 253
assert MAX_FDS_PER_MESSAGE * 640 <= MAX_SOCKET_MESSAGE_BYTES
assert LEASE_WAIT_S < ROOM_WAIT_S
assert 2 * RETRY_AFTER_S < METADATA_TIMEOUT_S
assert SILENCE_S + PING_TIMEOUT_S < METADATA_TIMEOUT_S
