"""Many writers of one name: every reader at every moment sees a whole version that somebody wrote, or none; no put
fails because another one renamed first; nothing is left behind (rules 24, 25).
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from kvstore.core.limits import MOUNT_METADATA_TIMEOUT_S, OVERDUE_S
from kvstore.fuse.circuit import LIFE_SIGN_S
from tests.fuse.calls import error_of
from tests.fuse.conftest import Store
from tests.support import fsconnector
from tests.support.child import Child, in_child
from tests.support.cluster import Cluster, Worker, wait_until
from tests.support.crew import Crew, shift
from tests.support.fsconnector import CHUNK_BYTES, Connector, Setting, with_connector
from tests.support.modes import MODES, mode_options
from tests.support.mounts import mounted
from tests.support.puts import Put, get, put
from tests.support.versions import Version, checked, content

LONG: Final = bool(os.environ.get("KVSTORE_LONG"))
TIMES: Final = 10 if LONG else 1
WAYS: Final = [
    Setting(header, direct, temporary_directory)
    for header, direct in ((True, False), (False, False), (False, True))
    for temporary_directory in (False, True)
]
TEMP_TTL_S: Final = 5
"""How long bytes that nobody renames stay; what is left behind is looked for after it."""
SETTINGS: Final = f'[mount]\ntemp_ttl = "{TEMP_TTL_S}s"\n'
MIB: Final = 1 << 20

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def store(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Two nodes, a mount on each. When all tests are through, nothing that they wrote may be left in staging."""
    root = tmp_path_factory.mktemp("store")
    with (
        Cluster(root, workers=2, capacity="1GiB") as cluster,
        mounted(cluster, root / "a", cluster.workers[0], *mode_options(mode), settings=SETTINGS) as a,
        mounted(cluster, root / "b", cluster.workers[1], *mode_options(mode), settings=SETTINGS) as b,
    ):
        yield Store(cluster, a, b)
        wait_until(lambda: not staged(*cluster.workers), "no staging file is left", TEMP_TTL_S + 15)


@pytest.fixture(scope="module")
def _lmcache() -> None:
    fsconnector.preload()


@pytest.fixture
def places(store: Store, tmp_path: Path) -> list[Path]:
    """The same new directory on both mounts."""
    in_child(os.mkdir, store.a / tmp_path.name)
    return [mount / tmp_path.name for mount in (store.a, store.b)]


def staged(*workers: Worker) -> list[Path]:
    return [p for worker in workers for p in (worker.volume / "staging").iterdir()]


def temporary(directory: Path) -> list[str]:
    """What a listing shows of puts that are not through."""
    names = [name for name in os.listdir(directory) if name.endswith(".tmp") and name != ".tmp"]
    return names + (os.listdir(directory / ".tmp") if (directory / ".tmp").is_dir() else [])


# ---- LMCache ----

KEYS: Final = 4
WRITERS: Final = 4
ROUNDS: Final = 3 * TIMES
GRAIN_BYTES: Final = 2 * fsconnector.TOKEN_BYTES
"""Chunks of writers differ in length by so much; O_DIRECT wants multiples of 4096."""


class Counts(NamedTuple):
    """What one process saw."""

    hits: int
    misses: int
    complaints: list[str]


def chunk(key: int, writer: int, turn: int) -> bytes:
    """Even keys: the same bytes from everybody. Odd ones: each writer's and turn's own, of its own length."""
    if key % 2 == 0:
        return content(key, 0, 0, CHUNK_BYTES)
    return content(key, writer, turn, CHUNK_BYTES - GRAIN_BYTES * (writer * ROUNDS + turn))


async def get_chunk(connector: Connector, key: int) -> bool:
    data = await connector.get(key)
    if data is not None:
        checked(data, key)
    return data is not None


def put_all(directory: Path, setting: Setting, writer: int) -> Counts:
    """All keys at once, in an order of this writer's own; each is read back right after."""

    async def use(connector: Connector) -> Counts:
        async def one(key: int, turn: int) -> bool:
            await connector.put(key, chunk(key, writer, turn))
            return await get_chunk(connector, key)

        order, found = random.Random(writer), list[bool]()
        for turn in range(ROUNDS):
            keys = order.sample(range(KEYS), KEYS)
            found += await asyncio.gather(*(one(key, turn) for key in keys))
        return Counts(found.count(True), found.count(False), connector.complaints)

    return with_connector(directory, setting, use)


def get_all(directory: Path, setting: Setting, stop: Path) -> Counts:
    """All keys at once, again and again."""

    async def use(connector: Connector) -> Counts:
        found: list[bool] = []
        for _ in shift(stop):
            found += await asyncio.gather(*(get_chunk(connector, key) for key in range(KEYS)))
        return Counts(found.count(True), found.count(False), connector.complaints)

    return with_connector(directory, setting, use)


@pytest.mark.lmcache
@pytest.mark.usefixtures("_lmcache")
@pytest.mark.parametrize("mounts", [1, 2], ids=["one-mount", "two-mounts"])
@pytest.mark.parametrize("setting", WAYS, ids=str)
def test_lmcache_processes_put_the_same_keys(places: list[Path], tmp_path: Path, setting: Setting, mounts: int) -> None:
    where = places[:mounts]
    with Crew(tmp_path) as crew:
        readers = [crew.start(get_all, place, setting, crew.stop) for place in where]
        writers = [crew.start(put_all, where[i % mounts], setting, i) for i in range(WRITERS)]
        wrote = crew.together(writers, 60 * TIMES)
        crew.call_off()
        read = crew.together(readers)
    assert [line for counts in (*wrote, *read) for line in counts.complaints] == []
    assert [counts.misses for counts in wrote] == [0] * WRITERS, "what had been put was not there"
    assert sum(counts.hits for counts in read) > 0
    for place in where:
        assert in_child(get_all, place, setting, crew.stop) == Counts(KEYS, 0, [])
        assert in_child(temporary, place) == []


# ---- system calls ----

STEPS: Final = 5
"""Of a put: open, write, write, close, rename."""
INTERLEAVINGS: Final = [
    tuple(0 if step in taken else 1 for step in range(2 * STEPS))
    for taken in itertools.combinations(range(2 * STEPS), STEPS)
]
"""All orders in which two writers can take their steps: whose step it is."""
TRUNCATING: Final = list(itertools.product((os.O_TRUNC, 0), repeat=2))


def interleave(directory: Path, flags: Sequence[int], orders: Sequence[tuple[int, ...]]) -> None:
    """After each rename the name shows a whole version, after both it has shown each once, and nothing is left."""
    for order in orders:
        puts = [Put(directory, writer, flags[writer]).steps() for writer in range(2)]
        shown = []
        for writer in order:
            if next(puts[writer]) == "renamed":
                version = get(directory, 0)
                assert version is not None, order
                shown.append(version.writer)
        assert sorted(shown) == [0, 1], order
        assert os.listdir(directory) == ["0.data"], order
        os.unlink(directory / "0.data")


@pytest.mark.parametrize("flags", TRUNCATING, ids=lambda f: "-".join("truncating" if flag else "keeping" for flag in f))
def test_every_order_of_two_writers_steps(places: list[Path], flags: tuple[int, int]) -> None:
    """All 252 in the long form; in the short one a fourth of them for each pair of flags."""
    orders = INTERLEAVINGS if LONG else INTERLEAVINGS[TRUNCATING.index(flags) :: len(TRUNCATING)]
    Child(interleave, places[0], flags, orders).join(60)


def write_in_threads(directory: Path, process: int, threads: int, turns: int) -> None:
    def write(writer: int) -> None:
        luck = random.Random(writer)
        for turn, key in itertools.product(range(turns), range(KEYS)):
            put(directory, key, content(key, writer, turn, luck.randrange(200_000, 800_000)), luck)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(write, range(process * threads, (process + 1) * threads)))


def read_all(directory: Path, stop: Path) -> int:
    """Reads every key again and again; how many versions were seen, all of them whole."""
    seen: set[Version | None] = set()
    for _ in shift(stop):
        seen |= {get(directory, key) for key in range(KEYS)}
    return len(seen - {None})


def test_threads_and_processes_share_temporary_names(places: list[Path], tmp_path: Path) -> None:
    with Crew(tmp_path) as crew:
        readers = [crew.start(read_all, place, crew.stop) for place in places]
        writers = [crew.start(write_in_threads, places[i % 2], i, 3, 4 * TIMES) for i in range(4)]
        crew.together(writers, 60 * TIMES)
        crew.call_off()
        assert min(crew.together(readers)) > 1
    for place in places:
        assert in_child(os.listdir, place) == [f"{key}.data" for key in range(KEYS)]


# ---- writers that die ----


def put_until(directory: Path, flags: int, point: str) -> None:
    """Ends this process with SIGKILL after the step."""
    for step in Put(directory, 1, flags).steps():
        if step == point:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("flags", [os.O_TRUNC, 0], ids=["truncating", "keeping"])
@pytest.mark.parametrize("point", ["open", "half", "written", "closed", "renamed"])
def test_a_writer_dies_and_tries_again(places: list[Path], point: str, flags: int) -> None:
    with pytest.raises(AssertionError, match="died without a word"):
        in_child(put_until, places[0], flags, point)
    before = in_child(get, places[0], 0)
    assert (before is not None) == (point == "renamed")
    retry = Put(places[0], 2, flags)
    assert in_child(lambda: list(retry.steps())[-1]) == "renamed"
    for place in places:
        version = in_child(get, place, 0)
        assert version is not None
        assert version.writer == 2


def die_beside_another(directory: Path, flags: int) -> Version | None:
    """One writer has written half of its bytes when a second one opens the name; then the first one dies."""
    ready, say = os.pipe()
    first = os.fork()
    if first == 0:
        for step in Put(directory, 1, flags).steps():
            if step == "half":
                os.write(say, b"x")
                signal.pause()
    os.read(ready, 1)
    second = Put(directory, 2, flags).steps()
    assert next(second) == "open"
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    assert list(second)[-1] == "renamed"
    return get(directory, 0)


@pytest.mark.parametrize("flags", [os.O_TRUNC, 0], ids=["truncating", "keeping"])
def test_a_writer_dies_while_another_one_writes(places: list[Path], flags: int) -> None:
    """What the dead one leaves looks closed, but must not be what the living one's rename publishes."""
    version = in_child(die_beside_another, places[0], flags)
    assert version is not None
    assert version.writer == 2


def die_at_random(directory: Path, writer: int, times: int) -> int:
    """Puts without end, killed after some milliseconds, again and again; how many puts were through before."""
    luck, turn = random.Random(writer), 0
    for _ in range(times):
        reader, say = os.pipe()
        child = os.fork()
        if child == 0:
            while True:
                put(directory, 0, content(0, writer, turn, luck.randrange(100_000, 400_000)), luck)
                os.write(say, b"x")
                turn += 1
        os.close(say)
        time.sleep(luck.uniform(0.01, 0.08))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        turn += len(os.read(reader, 1 << 16)) + 1
        os.close(reader)
        luck.random()
    return turn


def test_writers_that_die_all_the_time(places: list[Path], tmp_path: Path) -> None:
    """Each is alone with its name, as far as it knows: what it left half-written is never published by its next life.

    Two mounts: there a temporary name is each one's own.
    """
    with Crew(tmp_path) as crew:
        readers = [crew.start(read_all, place, crew.stop) for place in places]
        writers = [crew.start(die_at_random, place, i, 20 * TIMES) for i, place in enumerate(places)]
        assert sum(crew.together(writers, 60 * TIMES)) > 20 * TIMES
        crew.call_off()
        assert min(crew.together(readers)) > 1
    for place in places:
        assert in_child(get, place, 0) is not None


# ---- the master stops ----

IN_FLIGHT: Final = 32
ANSWER_S: Final = MOUNT_METADATA_TIMEOUT_S + LIFE_SIGN_S + 1.5
"""One deadline of a call to the master, and what a busy machine adds."""
PAUSE_S: Final = 0.5
"""Between a put that failed and the next try."""


class Answers(NamedTuple):
    """What one thread met: the errors of its puts ("ok" where there was none), and the longest of them."""

    errors: set[str]
    longest_s: float


def put_until_it_works(directory: Path, key: int, stop: Path) -> Answers:
    """Puts all the time; ends with one that began after the master went on, and worked."""
    luck, errors, longest_s = random.Random(key), set[str](), 0.0
    for turn in shift(stop):
        start_s = time.monotonic()
        error = error_of(put, directory, key, content(key, 0, turn, 100_000), luck)
        longest_s = max(longest_s, time.monotonic() - start_s)
        errors.add(error)
        time.sleep(0.0 if error == "ok" else PAUSE_S)
    wait_until(lambda: error_of(put, directory, key, content(key, 1, 0, 100_000), luck) == "ok", "puts work")
    return Answers(errors, longest_s)


def put_in_flight(directory: Path, stop: Path) -> list[Answers]:
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(lambda key: put_until_it_works(directory, key, stop), range(IN_FLIGHT)))


def ask_many(directory: Path) -> list[tuple[str, float]]:
    """What 16 look-ups of unknown names, one after the other, are answered, and how many seconds each of them took."""

    def ask(i: int) -> tuple[str, float]:
        start_s = time.monotonic()
        error = error_of(os.stat, directory / f"unknown{i}.data")
        return error, time.monotonic() - start_s

    return [ask(i) for i in range(16)]


def test_a_stopped_master_costs_one_deadline(mode: str, tmp_path: Path) -> None:
    """RENAME and CREATE hold the kernel's lock of the directory, and every look-up in it waits behind them."""
    with (
        Cluster(tmp_path, workers=1) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], *mode_options(mode)) as mount,
        Crew(tmp_path) as crew,
    ):
        in_child((mount / "d").mkdir)
        writers = crew.start(put_in_flight, mount / "d", crew.stop)
        wait_until(lambda: in_child(lambda: len(os.listdir(mount / "d"))) >= IN_FLIGHT, "all writers are at it")
        cluster.master.signal(signal.SIGSTOP)
        errors, took_s = zip(*in_child(ask_many, mount / "d"), strict=True)
        assert set(errors) == {"ENOENT"}
        assert max(took_s) < ANSWER_S
        slow = [s for s in took_s if s > 0.8 * MOUNT_METADATA_TIMEOUT_S]
        # Only where the machine was busy an answer comes so late: it proves nothing.
        overdue = [s for s in slow if s > MOUNT_METADATA_TIMEOUT_S + OVERDUE_S]
        assert len(slow) <= 1 + len(overdue), f"a second deadline: {took_s}"
        cluster.master.signal(signal.SIGCONT)
        crew.call_off()
        answers = writers.join(30)
        assert set().union(*(a.errors for a in answers)) <= {"ok", "EIO", "ETIMEDOUT"}
        assert max(a.longest_s for a in answers) < ANSWER_S
        in_child(check_all_there, mount / "d")


def check_all_there(directory: Path) -> None:
    """Nothing else, and no temporary name: each writer's last put was whole."""
    assert os.listdir(directory) == sorted(f"{key}.data" for key in range(IN_FLIGHT))
    for key in range(IN_FLIGHT):
        version = get(directory, key)
        assert version is not None
        assert version.writer == 1
