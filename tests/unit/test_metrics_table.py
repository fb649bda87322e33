"""The tables of ``deploy/prometheus/metrics.md`` name what master, worker and mount show: no more, no less."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Final, NamedTuple, cast

from prometheus_client.parser import text_string_to_metric_families

from kvstore.fuse.circuit import Master
from kvstore.fuse.metrics import mount_metrics
from kvstore.fuse.ops import Operations, Parts
from kvstore.master.metrics import MasterMetrics
from kvstore.obs.metrics import Metrics
from kvstore.worker import metrics as worker_metrics
from kvstore.worker.blocks.counters import EVICTED, Reason
from tests.support import worker_kit as kit
from tests.unit.master.world import running

TABLE: Final = Path(__file__).parents[2] / "deploy" / "prometheus" / "metrics.md"
UNITS: Final = ("bytes", "seconds")


class Row(NamedTuple):
    kind: str
    labels: frozenset[str]
    unit: str


def documented(section: str) -> dict[str, Row]:
    """Name → row of one section of the file."""
    text = re.split(r"^## ", TABLE.read_text(), flags=re.MULTILINE)
    (part,) = [part for part in text if part.startswith(f"{section}\n")]
    found = re.findall(r"^\| `(kvstore_\w+)` \| (\w+) \| ([^|]+) \| ([^|]+) \| [^|]+ \|$", part, re.MULTILINE)
    names = [name for name, *_ in found]
    assert names == sorted(set(names)), "each once, in order"
    return {name: Row(kind, frozenset(re.findall(r"`(\w+)`", labels)), unit) for name, kind, labels, unit in found}


def shown(metrics: Metrics) -> dict[str, Row]:
    """Name → row as Prometheus reads it. Every metric has to show a sample."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        assert family.samples, f"{family.name}: the test does nothing that shows its labels"
        assert family.documentation
        labels = {frozenset(sample.labels) for sample in family.samples}
        assert len(labels) == 1, f"{family.name}: series with different labels"
        (name,) = {sample.name for sample in family.samples}
        unit = next((unit for unit in UNITS if unit in name.split("_")), "–")
        found[name] = Row(family.type, labels.pop(), "seconds" if name.endswith("_created") else unit)
    return found


async def test_the_table_is_what_a_master_shows() -> None:
    async with running() as world:
        await world.join(1)
        await world.policy("", quota_bytes=1 << 30)
        metrics = MasterMetrics(world.master)
        metrics.keys.labels("lookup").inc()
        assert shown(metrics.metrics) == documented("All three") | documented("Master")


async def test_the_table_is_what_a_worker_shows(tmp_path: Path) -> None:
    metrics = Metrics("worker", "1")
    async with kit.running(kit.settings(tmp_path)) as worker:
        worker_metrics.watch(metrics, worker)
        assert shown(metrics) == documented("All three") | documented("Worker")


def test_the_table_is_what_a_mount_shows() -> None:
    operations = SimpleNamespace(counts=Counter({("create", "ok"): 1}))
    parts = SimpleNamespace(files=SimpleNamespace(handles={}))
    master = SimpleNamespace(is_away=False)
    metrics = mount_metrics(cast("Operations", operations), cast("Parts", parts), cast("Master", master))
    assert shown(metrics) == documented("All three") | documented("Mount")


def test_counters_are_named_like_counters() -> None:
    for section in ("All three", "Master", "Worker", "Mount"):
        for name, row in documented(section).items():
            assert name.endswith("_total") == (row.kind == "counter"), name


def test_the_reasons_are_all_there_and_evictions_come_first() -> None:
    reasons = re.findall(r"^\| `([a-z]+)` \| [^|]+ \|$", TABLE.read_text(), re.MULTILINE)[1:]  # below the title
    assert reasons == list(Reason)
    assert reasons[: len(EVICTED)] == list(EVICTED)


async def test_a_worker_shows_by_tier_and_reason(tmp_path: Path) -> None:
    """Every series from the start, and what was counted."""
    metrics = Metrics("worker", "1")
    async with kit.running(kit.settings(tmp_path)) as worker:
        worker_metrics.watch(metrics, worker)
        block = await kit.put(worker, b"data")
        await kit.get(worker, block.address)
        await worker.evictor.evict([block], Reason.TTL)
        text = metrics.render().decode()
    for line in (
        'kvstore_worker_hits_total{tier="ssd"} 1.0',
        "kvstore_worker_read_bytes_total 0.0",
        "kvstore_worker_written_bytes_total 4.0",
        'kvstore_worker_unlinked_files_total{reason="ttl",tier="ssd"} 1.0',
        'kvstore_worker_unlinked_bytes_total{reason="ttl",tier="ssd"} 4096.0',
        'kvstore_worker_unlinked_files_total{reason="quota",tier="ssd"} 0.0',
        'kvstore_worker_moves_total{direction="demotion",tier="ssd"} 0.0',
    ):
        assert f"\n{line}\n" in text, line
    assert 'tier="mem"' not in text, "there is none"
