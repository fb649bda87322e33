"""What a run says while it goes on."""

from __future__ import annotations

import json
from pathlib import Path

from tests.chaos.live import Live, Tally
from tests.chaos.record import MISS, OK, Call, Recorder
from tests.support.cluster import wait_until


def call(outcome: str, verb: str = "get") -> Call:
    return Call("a.1", "a", verb, "w1/1", 1, 0.0, 0.1, outcome)


def test_calls_are_counted_as_their_files_grow(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    tally, recorder = Tally(lambda: [path]), Recorder(path)
    for made in (call(OK), call(MISS), call("EIO"), call(OK, "write")):
        recorder.add(made)
    tally.update()
    tally.update()
    assert tally.calls == {OK: 1, MISS: 1, "error": 1}, "each once, and a step of a put not at all"
    line = json.dumps(call(OK)) + "\n"
    with path.open("a") as file:
        for part in (line[:10], line[10:]):
            assert tally.calls[OK] == 1, "not a torn line"
            file.write(part)
            file.flush()
            tally.update()
    assert tally.calls[OK] == 2
    recorder.close()


def test_a_line_says_what_is_broken_and_how_the_load_fares(tmp_path: Path) -> None:
    path = tmp_path / "calls"
    recorder, said = Recorder(path), list[str]()
    recorder.add(call(OK))
    recorder.add(call(MISS))
    broken = ["stop master", "loss node-1"]
    with Live(Tally(lambda: [path]), lambda: broken, said.append, every_s=0.02):
        wait_until(lambda: len(said) > 1, "it says something, and again")
    recorder.close()
    assert "2 calls, 1 ok, 1 misses, 0 errors; broken now: stop master, loss node-1" in said[0]
