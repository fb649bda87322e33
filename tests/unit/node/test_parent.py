"""A child that ends with its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kvstore.node import parent
from tests.support.cluster import wait_until
from tests.support.kept import has_ended

CHILD = """
import os, time
from kvstore.node import parent
parent.obey()
print(dict(os.environ), flush=True)
time.sleep(60)
"""
PARENT = f"""
import os, signal, subprocess, sys, time
from kvstore.node import parent
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], env=parent.tied(os.environ, signal.SIGTERM), stdout=-1)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert not has_ended(child)
        process.send_signal(number)
        process.wait()
        wait_until(lambda: has_ended(child), "it has ended")


def test_a_parent_that_is_gone_already() -> None:
    environ = {**parent.tied(os.environ, signal.SIGTERM)}
    environ = {name: value.replace(str(os.getpid()), "1") for name, value in environ.items()}
    assert subprocess.run([sys.executable, "-c", CHILD], env=environ, check=False).returncode == -signal.SIGTERM


def test_it_is_not_for_the_childs_own_children() -> None:
    environ = parent.tied({**os.environ, "KEPT": "yes"}, signal.SIGTERM)
    with subprocess.Popen([sys.executable, "-c", CHILD], env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        seen = process.stdout.readline()
        process.kill()
    assert "'KEPT': 'yes'" in seen
    assert "KVSTORE_ENDS_WITH" not in seen
