"""The verbs of the Unix socket: a request in, an answer with its fds out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from kvstore.core import sockproto as sp
from kvstore.core.errors import Denied, InvalidRequest, KvError, Unsupported
from kvstore.core.limits import MAX_FDS_PER_MESSAGE
from kvstore.core.types import U63_MAX, U64_MAX, Address, Replica
from kvstore.worker.background import Background
from kvstore.worker.blocks.block import Block
from kvstore.worker.blocks.store import Store
from kvstore.worker.reports.membership import Membership
from kvstore.worker.serving.fdsocket import Answer, close_all
from kvstore.worker.serving.opener import OpenBlock, Opener
from kvstore.worker.volumes.volume import Volume
from kvstore.worker.writes.seal import Claim, Sealer
from kvstore.worker.writes.seals import Seals
from kvstore.worker.writes.sessions import Sessions
from kvstore.worker.writes.staging import Staging

log = logging.getLogger(__name__)
MAX_OPEN_TIMEOUT_S = 600.0


class Introduction(NamedTuple):
    node: str
    endpoint: str


class Verbs:
    """Implements `fdsocket.Handler`."""

    def __init__(
        self, me: Introduction, membership: Membership, store: Store, sessions: Sessions, staging: Staging,
        sealer: Sealer, seals: Seals, opener: Opener, background: Background,
    ) -> None:  # fmt: skip
        self._me, self._membership, self._store, self._sessions = me, membership, store, sessions
        self._staging, self._sealer, self._seals = staging, sealer, seals
        self._opener, self._background = opener, background

    def hello(self, hello: sp.Hello) -> sp.HelloReply:
        if hello.version != sp.PROTOCOL_VERSION:
            raise Unsupported(
                f"protocol version {hello.version} is not spoken here (this worker speaks {sp.PROTOCOL_VERSION})"
            )
        if not 0 < hello.session <= U64_MAX:
            raise InvalidRequest("a session is 64 random bits, and not 0")
        mine = self._membership.cluster
        if hello.cluster and mine and hello.cluster != mine:
            raise Denied(f"this worker belongs to cluster {mine}, you to {hello.cluster}: use your own node's socket")
        node, endpoint = self._me
        return sp.HelloReply(sp.PROTOCOL_VERSION, mine, node, endpoint, self._staging.max_block_bytes)

    def enter(self, session: int) -> None:
        self._sessions.enter(session)

    def leave(self, session: int) -> None:
        self._sessions.leave(session, self._store.runtime.monotonic_s())

    def serve_now(self, session: int, request: sp.Request) -> Answer | None:
        match request:
            case sp.Open():
                return self._open_now(session, request)
            case sp.Touch():
                return self._touch(session, request)
            case sp.GiveUp():
                self._seals.give_up(session, [_address(each) for each in request.addresses])
                return Answer(sp.Ok())
            case sp.Stat():
                return Answer(self._stat())
            case sp.Unfinished():
                return Answer(sp.Handles(self._staging.handles(session)))
            case _:
                return None

    async def serve(self, session: int, request: sp.Request) -> Answer:
        match request:
            case sp.Open():
                return await self._open(session, request)
            case sp.Stage():
                return await self._stage(session, request)
            case sp.Reserve():
                staged = self._staging.find(session, request.staging)
                await self._staging.reserve(staged, request.size_bytes, evict=request.evict)
                return Answer(sp.Ok())
            case sp.Seal():
                return _sealed(await self._seals.seal(session, request.staging, _claim(request)))
            case sp.SealCopy():
                return _sealed(await self._seals.seal_copy(session, request.staging))
            case sp.Abort():
                await self._seals.abort(session, request.staging)
                return Answer(sp.Ok())
            case sp.Probe():
                return await self._background.run(self._probe())
            case _:
                raise InvalidRequest(f"{type(request).__name__} is not served here")

    async def _stage(self, session: int, request: sp.Stage) -> Answer:
        staged, fd = await self._background.run(self._staging.create(session, request.size_bytes))
        return Answer(sp.Staged(staged.handle, staged.volume.id), [fd])

    async def _probe(self) -> Answer:
        """A volume that cannot have a file now is left out."""
        found: list[tuple[Volume, int]] = []
        for volume in self._store.in_service[:MAX_FDS_PER_MESSAGE]:
            trial = partial(volume.trial_file, self._store.runtime.random_u64())
            try:
                found.append((volume, await self._store.runtime.in_thread(trial)))
            except OSError as error:
                log.warning("%s", self._store.explain(volume, error, "making a trial file"))
        return Answer(sp.Probed([v.id for v, _ in found], [v.tier for v, _ in found]), [fd for _, fd in found])

    def _open_now(self, session: int, request: sp.Open) -> Answer | None:
        """Only when all of them are here and good; else `_open` does it over (an fd costs a few µs)."""
        blocks: list[OpenBlock] = []
        _check(request)
        try:
            for address in map(sp.from_wire_address, request.addresses):
                block = self._opener.open_now(address, session)
                if block is None:
                    close_all(b.fd for b in blocks)
                    return None
                blocks.append(block)
        except KvError:
            close_all(b.fd for b in blocks)
            return None  # `_open` gives each block its own answer
        return self._opened(request, blocks)

    async def _open(self, session: int, request: sp.Open) -> Answer:
        timeout_s = min(request.timeout_s, MAX_OPEN_TIMEOUT_S)
        wanted = [
            (sp.from_wire_address(address), sp.from_wire_replicas(replicas))
            for address, replicas in zip(request.addresses, request.replicas, strict=True)
        ]
        return self._opened(
            request, await asyncio.gather(*(self._open_one(session, a, r, timeout_s) for a, r in wanted))
        )

    async def _open_one(
        self, session: int, address: Address, replicas: Sequence[Replica], timeout_s: float
    ) -> OpenBlock | KvError:
        try:
            return await self._opener.open(address, replicas, timeout_s, session)
        except KvError as error:
            return error

    def _opened(self, request: sp.Open, blocks: Sequence[OpenBlock | KvError]) -> Answer:
        """`codes` and `local` have a value per block; `errors`, `faults` and `reasons` one per block that failed."""
        errors = [b for b in blocks if isinstance(b, KvError)]
        body = sp.Opened(
            codes=[b.code if isinstance(b, KvError) else 0 for b in blocks],
            errors=[error.message for error in errors],
            faults=[error.fault or "" for error in errors],
            reasons=[error.reason for error in errors],
            local=[isinstance(b, OpenBlock) and b.local for b in blocks],
        )
        lengths = (address[2] for address, code in zip(request.addresses, body.codes, strict=True) if code == 0)
        self._store.counters.read_bytes += sum(lengths)
        return Answer(body, [b.fd for b in blocks if isinstance(b, OpenBlock)])

    def _touch(self, session: int, request: sp.Touch) -> Answer:
        for wire in request.addresses:
            address = _address(wire)
            block = self._store.get(address.block)
            if block is not None and block.address == address:
                self._store.touch(block, session)
                self._store.counters.hit(block.volume.tier)
        return Answer(sp.Ok())

    def _stat(self) -> sp.StatReply:
        books = [volume.books for volume in self._store.in_service]
        return sp.StatReply(
            self._me.node,
            sum(b.capacity for b in books),
            sum(b.used for b in books),
            sum(b.free for b in books),
            len(self._store),
        )


def _check(request: sp.Open) -> None:
    if len(request.addresses) != len(request.replicas):
        raise InvalidRequest(f"{len(request.addresses)} addresses but {len(request.replicas)} lists of replicas")
    if len(request.addresses) > MAX_FDS_PER_MESSAGE:
        raise InvalidRequest(
            f"{len(request.addresses)} blocks are too many for one message; at most {MAX_FDS_PER_MESSAGE}"
        )
    if not request.timeout_s > 0:  # NaN too
        raise InvalidRequest(f"a timeout of {request.timeout_s} s leaves no time")
    for address in request.addresses:
        _address(address)


def _address(wire: sp.WireAddress) -> Address:
    """Msgpack's integers may be negative: such an id could be neither a file's name nor a key at the master."""
    if min(wire) < 0 or wire[2] > U63_MAX:
        raise InvalidRequest(f"{wire} is not an address of a block")
    return sp.from_wire_address(wire)


def _claim(request: sp.Seal) -> Claim | None:
    if request.hash is None or request.mtime_ns is None:
        return None
    if not 0 <= request.hash <= U64_MAX:
        raise InvalidRequest(f"{request.hash} is not a 64-bit hash")
    return Claim(request.hash, request.size_bytes, request.mtime_ns)


def _sealed(block: Block) -> Answer:
    return Answer(sp.Sealed(sp.to_wire(block.address), block.volume.id))
