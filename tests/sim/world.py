"""One seed: a master, three workers, four clients, whoever breaks them, and what must hold all the while.

The code is the product's, from the client's calls to the system calls of the worker and the batches of the master's
log. What is not: the loop and its clock (`loop`, `clock`), what lies between a channel and a server (`net`, `serving`),
the faults of drives (`drive`, `disk`) and the database below its four verbs (`db`).
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Final

from tests.sim.faults import Violation
from tests.sim.ledger import Ledger
from tests.sim.loop import Process, SimLoop
from tests.sim.net import Net
from tests.sim.operator import Operator
from tests.sim.oracle import Oracle
from tests.sim.programs import ClientHost, Host, MasterHost, WorkerHost
from tests.sim.trace import Trace
from tests.sim.workload import NAMES, User, Watch, check_durable

LOOK_S: Final = 0.25
"""Between two looks at what takes too long, or went wrong unseen."""
MEM_BYTES: Final = 64 << 10
SSD_BYTES: Final = 256 << 10
CLIENTS: Final = 4


class World:
    def __init__(self, loop: SimLoop, root: Path, trace: Trace) -> None:
        self.loop, self.root, self.trace = loop, root, trace
        self.random = random.Random(loop.random.getrandbits(64))
        self.net = Net(loop, trace)
        self.oracle, self.watch = Oracle(), Watch()
        self.orderly: set[asyncio.Task[None]] = set()
        self.master = MasterHost(loop, self.net, trace)
        self.workers = [self._worker(i) for i in range(3)]
        self.ledger = Ledger(self.master.log, self.is_live)
        self.clients = [self._client(i) for i in range(CLIENTS)]
        self.operator = Operator(self.master, self.workers, self.oracle, self.ledger, self.random)
        self.servers: list[Host] = [self.master, *self.workers]
        self.host_names = sorted({*(host.name for host in self.servers), *(c.home for c in self.clients)})
        self.users = [self._user(client) for client in self.clients for _ in range(2)]
        self.net.watch = self._watch_reply

    @property
    def hosts(self) -> list[Host]:
        return [*self.servers, *self.clients]

    def new_clients(self) -> list[User]:
        """As many again, which know nothing."""
        new = [self._client(len(self.clients) + i) for i in range(CLIENTS)]
        self.clients = [*self.clients, *new]
        return [self._user(client) for client in new]

    def check(self) -> None:
        """What can be asked at every moment."""
        if self.watch.violation is not None:
            raise self.watch.violation
        for user in self.users:
            user.check_in_time(grace_s=1.0)
        if self.loop.troubles:
            raise Violation("unseen: " + "; ".join(self.loop.troubles))

    def check_durable(self) -> None:
        """After a power cut: nothing that was over is there again."""
        try:
            check_durable(self.ledger, self.oracle, NAMES, self.loop.time())
        except Violation as error:
            self.watch.fail(error)

    async def look(self, delay_s: float) -> None:
        """Let time pass, and look."""
        end_s = self.loop.time() + delay_s
        while self.loop.time() < end_s:
            await asyncio.sleep(LOOK_S)
            self.check()

    def _worker(self, number: int) -> WorkerHost:
        name = f"n{number + 1}"
        sizes = [("mem", MEM_BYTES), ("ssd", SSD_BYTES * (1 + self.random.randrange(3)))]
        return WorkerHost(self.loop, self.net, self.trace, name, number, self.root / name, sizes)

    def _client(self, number: int) -> ClientHost:
        """Two beside workers, two without one, and so on."""
        name, place = f"c{number + 1}", number % CLIENTS
        worker = self.workers[place] if place < 2 else None
        host, socket = (worker.name, worker.socket) if worker else (name, "")
        return ClientHost(self.loop, self.net, self.trace, name, host, socket, self.root, ttl_s=float(number % 2))

    def _user(self, client: ClientHost) -> User:
        return User(client, self.oracle, self.ledger, self.trace, self.watch)

    def is_live(self, volume: int) -> bool:
        master = self.master.master
        return master is not None and volume in master.nodes.cluster.live

    def _watch_reply(self, path: str, server: Process, caller: Process, reply: bytes) -> None:
        if server.host == "master":
            try:
                self.ledger.check_reply(path, caller.host, reply)
            except Violation as error:
                self.watch.fail(error)
