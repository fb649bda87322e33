"""Who may do what on a mount: owners, groups, the creator's umask, and what --uid, --gid and --umask make of them; and
what --consistency strict shows of another mount.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, ParamSpec, TypeVar

import pytest

from tests.fuse.calls import error_of
from tests.support.child import in_child
from tests.support.cluster import Cluster
from tests.support.modes import MODES, mode_options
from tests.support.mounts import Mount, mounted

P = ParamSpec("P")
T = TypeVar("T")

NOBODY: Final = 65534
GROUP: Final = 2000
"""A pod's fsGroup: its process has it beside its own."""
PUBLISHED: Final = 15

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("store"), workers=2) as cluster:
        yield cluster


@contextmanager
def open_to_all(cluster: Cluster, mode: str, name: str, *options: str, worker: int = 0) -> Iterator[Mount]:
    """A mount where every user can go: directories for tests are root's alone."""
    home = Path(tempfile.mkdtemp(prefix="kvs-"))
    home.chmod(0o755)
    try:
        with mounted(cluster, home / name, cluster.workers[worker], *mode_options(mode), *options) as mount:
            yield mount
    finally:
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def mount(cluster: Cluster, mode: str) -> Iterator[Mount]:
    """As root mounts by default."""
    with open_to_all(cluster, mode, "default") as mount:
        yield mount


@pytest.fixture
def place(mount: Mount, mode: str, tmp_path: Path) -> Path:
    """A directory that belongs to root."""
    path = mount / f"{mode}-{tmp_path.name}"
    in_child(path.mkdir, 0o755)
    return path


def as_user(uid: int, groups: Sequence[int], function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it in a child that is this user, in a group of its own number and in `groups`, with umask 027."""

    def become_and_call() -> T:
        os.setgroups(list(groups))
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.umask(0o027)
        return function(*args, **kwargs)

    return in_child(become_and_call)


class Facts(NamedTuple):
    mode: int
    uid: int
    gid: int


def facts(path: Path) -> Facts:
    found = path.stat()
    return Facts(stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid)


def put(directory: Path, name: str = "k") -> None:
    (directory / f"{name}.tmp").write_bytes(b"whole")
    os.rename(directory / f"{name}.tmp", directory / f"{name}.data")


def directory_of(path: Path, mode: int, gid: int = 0) -> Path:
    path.mkdir()
    os.chown(path, -1, gid)
    path.chmod(mode)
    return path


def test_whoever_makes_it_owns_it_as_his_umask_says(place: Path) -> None:
    open_place = in_child(directory_of, place / "open", 0o777)

    def work() -> list[Facts]:
        put(open_place)
        (open_place / "ordinary").write_bytes(b"")
        (open_place / "script").touch(0o777)
        (open_place / "directory").mkdir(0o777)
        return [facts(open_place / name) for name in ("k.data", "ordinary", "script", "directory")]

    expected = [Facts(mode, NOBODY, NOBODY) for mode in (0o640, 0o640, 0o750, 0o750)]
    assert as_user(NOBODY, [], work) == expected


def test_what_is_published_keeps_owner_and_permissions_on_other_mounts(
    cluster: Cluster, mode: str, place: Path
) -> None:
    open_place = in_child(directory_of, place / "open", 0o777)
    as_user(NOBODY, [], put, open_place)
    with open_to_all(cluster, mode, "other", worker=1) as other:
        there = other.path / place.name / "open" / "k.data"
        assert in_child(facts, there) == Facts(0o640, NOBODY, NOBODY)
        assert as_user(NOBODY, [], there.read_bytes) == b"whole"
        assert as_user(1000, [], error_of, there.read_bytes) == "EACCES"


def refusals(place: Path) -> dict[str, str]:
    """What a user is answered in a directory that is not his, and at a file that is not."""
    calls: dict[str, tuple[Callable[..., object], *tuple[object, ...]]] = {
        "create": ((place / "new").touch,),
        "create temporary": ((place / "new.tmp").touch,),
        "mkdir": (os.mkdir, place / "new"),
        "read": ((place / "secret").read_bytes,),
        "write": ((place / "secret").write_bytes, b"mine"),
        "truncate": (os.truncate, place / "secret", 0),
        "rename": (os.rename, place / "secret", place / "public"),
        "unlink": (os.unlink, place / "secret"),
        "rmdir": (os.rmdir, place / "directory"),
        "chmod": (os.chmod, place / "secret", 0o777),
        "chown": (os.chown, place / "secret", NOBODY, NOBODY),
    }
    return {name: error_of(*call) for name, call in calls.items()}


def test_others_are_refused(place: Path) -> None:
    in_child((place / "secret").touch, 0o600)
    in_child((place / "directory").mkdir, 0o700)
    in_child((place / "secret").write_bytes, b"root's")
    refused = as_user(NOBODY, [GROUP], refusals, place)
    assert refused == dict.fromkeys(refused, "EACCES") | {"chmod": "EPERM", "chown": "EPERM"}
    assert as_user(NOBODY, [], error_of, os.listdir, place / "directory") == "EACCES"
    assert in_child((place / "secret").read_bytes) == b"root's"


def test_a_supplementary_group_opens_a_directory(place: Path) -> None:
    """As Kubernetes prepares a volume for fsGroup: the group's, writable, and set-group-id."""
    shared = in_child(directory_of, place / "shared", 0o2770, GROUP)

    def work() -> list[object]:
        put(shared)
        with (shared / "k.data").open("r+b") as file:
            file.write(b"WHO")
        os.rename(shared / "k.data", shared / "moved.data")
        return [(shared / "moved.data").read_bytes(), facts(shared / "moved.data"), os.listdir(shared)]

    assert as_user(NOBODY, [GROUP], work) == [b"WHOle", Facts(0o640, NOBODY, GROUP), ["moved.data"]]
    assert as_user(1000, [GROUP], (shared / "moved.data").read_bytes) == b"WHOle"
    assert as_user(1000, [GROUP], error_of, (shared / "moved.data").write_bytes, b"x") == "EACCES"
    for call in (os.listdir, lambda path: put(path, "other")):
        assert as_user(NOBODY, [], error_of, call, shared) == "EACCES"


def test_a_sticky_directory_keeps_others_names(place: Path) -> None:
    sticky = in_child(directory_of, place / "sticky", 0o1777)
    as_user(NOBODY, [], put, sticky)
    assert as_user(1000, [], error_of, os.unlink, sticky / "k.data") in ("EPERM", "EACCES")
    assert as_user(NOBODY, [], error_of, os.unlink, sticky / "k.data") == "ok"


def test_everything_belongs_to_whom_the_options_name(cluster: Cluster, mode: str, place: Path, mount: Mount) -> None:
    in_child((place / "before").touch, 0o600)
    options = ("--uid", "1234", "--gid", str(GROUP), "--umask", "027")
    with open_to_all(cluster, mode, "named", *options, "--path", f"/{place.name}", worker=1) as named:
        shown = Facts(0o750, 1234, GROUP)
        assert in_child(facts, named.path) == in_child(facts, named / "before") == shown
        as_user(1234, [], put, named.path)
        as_user(1234, [], (named / "directory").mkdir)
        assert in_child(facts, named / "k.data") == in_child(facts, named / "directory") == shown
        assert as_user(NOBODY, [GROUP], (named / "k.data").read_bytes) == b"whole"
        assert as_user(NOBODY, [GROUP], error_of, put, named.path) == "EACCES"
        assert as_user(NOBODY, [], error_of, os.listdir, named.path) == "EACCES"
    # Others see the same owner, and the permissions that its maker gave it.
    assert in_child(facts, place / "k.data") == Facts(0o640, 1234, GROUP)


def test_with_an_empty_umask_everybody_may_do_everything(cluster: Cluster, mode: str, place: Path) -> None:
    with open_to_all(cluster, mode, "anybody", "--umask", "000", "--path", f"/{place.name}", worker=1) as anybody:
        as_user(NOBODY, [], put, anybody.path)
        as_user(1000, [], put, anybody.path)
        assert as_user(NOBODY, [], (anybody / "k.data").read_bytes) == b"whole"
        assert in_child(facts, anybody / "k.data").mode == 0o777


def test_others_can_be_kept_out(cluster: Cluster, mode: str) -> None:
    with open_to_all(cluster, mode, "alone", "--no-allow-other") as alone:
        in_child(alone.path.chmod, 0o777)
        assert as_user(NOBODY, [], error_of, os.listdir, alone.path) == "EACCES"
        assert in_child(error_of, os.listdir, alone.path) == "ok"


def test_strict_shows_other_mounts_changes_at_once(cluster: Cluster, mode: str, place: Path) -> None:
    with open_to_all(cluster, mode, "strict", "--consistency", "strict", worker=1) as strict:
        in_child(follow, place, strict.path / place.name)


def follow(here: Path, there: Path) -> None:
    """Names made, replaced, renamed and removed here are so there, by every kind of look."""
    file, seen = here / "f", there / "f"
    for turn in range(PUBLISHED):
        assert not seen.exists()
        assert os.listdir(there) == []
        file.write_bytes(b"%d" % turn)
        assert seen.read_bytes() == b"%d" % turn
        put(here, "f")
        os.rename(here / "f.data", file)
        assert seen.stat().st_size == len(b"whole")
        assert seen.read_bytes() == b"whole"
        file.chmod(0o600)
        assert facts(seen).mode == 0o600
        assert os.listdir(there) == ["f"]
        file.unlink()


def test_strict_remembers_nothing_for_a_master_that_is_away(tmp_path: Path) -> None:
    options = (*mode_options("passthrough"), "--consistency", "strict")
    with (
        Cluster(tmp_path, workers=1) as cluster,
        mounted(cluster, tmp_path / "m", cluster.workers[0], *options) as mount,
    ):
        in_child(put, mount.path)
        assert in_child((mount / "k.data").read_bytes) == b"whole"
        cluster.master.kill()
        assert in_child(error_of, (mount / "k.data").read_bytes) == "ENOENT"
