"""/metrics: the names that dashboards depend on, parsed by two independent parsers of the format."""

from __future__ import annotations

import gzip
import math
import re
import subprocess
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.tools import DEADLINE_SECONDS, require_tool
from tests.watcher.web import sample_snapshots as samples
from tests.watcher.web.served_app import make_app, served
from wattwatch.watcher.detection.model import JobState
from wattwatch.watcher.engine.snapshot import DeliveryStats, LatestSnapshot, Snapshot
from wattwatch.watcher.web.metrics import CONTENT_TYPE, METRICS, MetricFamily, MetricsExporter, SnapshotMetrics

FROZEN = Path(__file__).parents[2] / "data" / "serve" / "metrics.txt"
README = Path(__file__).parents[3] / "watcher" / "web" / "README.md"

Labels = frozenset[tuple[str, str]]


def series(text: str) -> dict[str, dict[Labels, float]]:
    found: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = frozenset(sample.labels.items())
            assert labels not in found[sample.name], f"{sample.name} is there twice with {sample.labels}"
            found[sample.name][labels] = float(sample.value)
    return found


def snapshot_series(snapshot: Snapshot) -> dict[str, dict[Labels, float]]:
    return series(SnapshotMetrics(stale_after_seconds=5.0).render(snapshot).decode())


def value(found: dict[str, dict[Labels, float]], name: str, /, **labels: str) -> float:
    return found[name][frozenset(labels.items())]


def whole_body() -> str:
    back = replace(samples.episodes()[4], absent_since_wall_seconds=samples.NOW - 90.0)
    app = make_app(replace(samples.cluster(), episodes=(*samples.episodes(), back)))
    app.own.engine_failures.labels("ValueError in tick").inc()
    app.own.slow_task_runs.labels("prune").inc()
    app.own.slow_task_failures.labels("prune", "missed").inc()
    return MetricsExporter(app.latest, app.own).render(compressed=False).decode()


def test_names_types_and_labels_are_as_frozen() -> None:
    """Users' dashboards and rules name these. Add lines to the file; change or remove none without a new version."""
    table = [f"{m.name} {m.type} {','.join(m.labels)}".rstrip() for m in METRICS.values()]
    assert table == FROZEN.read_text("utf-8").splitlines()


def test_every_metric_of_the_table_is_served_with_its_labels_and_nothing_else_is() -> None:
    served_labels: dict[str, set[str]] = {}
    for name, rows in series(whole_body()).items():
        served_labels[re.sub("_(bucket|sum|count)$", "", name)] = {key for labels in rows for key, _ in labels} - {"le"}
    ours = {name: labels for name, labels in served_labels.items() if name.startswith("wattwatch_")}
    assert ours == {name: set(metric.labels) for name, metric in METRICS.items()}


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: MetricFamily) -> None:
    """Including those that promtool does not check: base units, no label that Prometheus would rename."""
    assert re.fullmatch("wattwatch_[a-z_]+", metric.name)
    assert not re.search("percent|milli|_mib|_mhz|_ms$", metric.name)
    assert (metric.type == "counter") == metric.name.endswith("_total")
    assert not {"job", "instance"} & set(metric.labels)
    if metric.unit in ("watts", "bytes", "joules", "seconds", "celsius", "ratio"):
        assert f"_{metric.unit}" in metric.name


def test_promtool_reports_no_problem() -> None:
    promtool = require_tool("promtool")
    result = subprocess.run(
        [promtool, "check", "metrics"], input=whole_body(), text=True, capture_output=True, timeout=DEADLINE_SECONDS
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_gpu_readings_are_in_base_units() -> None:
    found = snapshot_series(samples.cluster())
    gpu_labels = {"train_job": "finetune-evenfix", "node": "gpu-03", "gpu": "3", "rank": "3"}
    assert value(found, "wattwatch_gpu_power_watts", **gpu_labels) == 184.0
    assert value(found, "wattwatch_gpu_utilization_ratio", **gpu_labels) == 0.0
    assert value(found, "wattwatch_gpu_memory_used_bytes", **gpu_labels) == 82 * samples.GIB
    assert value(found, "wattwatch_gpu_info", **gpu_labels, uuid="GPU-gpu-03-3", name="NVIDIA B300") == 1.0


def test_a_missing_reading_has_no_series() -> None:
    found = snapshot_series(samples.cluster())
    lost = {"train_job": samples.HOSTILE, "node": "gpu-06", "gpu": "5", "rank": "5"}
    assert frozenset(lost.items()) not in found["wattwatch_gpu_power_watts"]
    assert frozenset({**lost, "gpu": "4", "rank": "4"}.items()) in found["wattwatch_gpu_power_watts"]
    assert frozenset({("train_job", "eval-nightly")}) not in found["wattwatch_job_step"]


def test_a_hostile_job_name_survives_the_round_trip() -> None:
    found = snapshot_series(samples.cluster())
    assert value(found, "wattwatch_job_state", train_job=samples.HOSTILE, state="crashed") == 1.0
    assert math.isnan(value(found, "wattwatch_job_loss", train_job=samples.HOSTILE))


def test_a_job_is_in_exactly_one_state() -> None:
    found = snapshot_series(samples.cluster())["wattwatch_job_state"]
    mine = {dict(labels)["state"]: v for labels, v in found.items() if dict(labels)["train_job"] == "pretrain-32b"}
    assert mine == {state.value: float(state is JobState.COMPUTING) for state in JobState}


def test_a_series_disappears_with_its_job_its_node_and_its_gpu() -> None:
    text = SnapshotMetrics(5.0)
    everything = samples.cluster()
    hung = everything.jobs["finetune-evenfix"]
    text.render(everything)
    fewer = replace(
        everything,
        jobs={"finetune-evenfix": replace(hung, sample=replace(hung.sample, gpus=hung.sample.gpus[:4]))},
        nodes={"gpu-03": everything.nodes["gpu-03"]},
        episodes=(),
    )
    found = series(text.render(fewer).decode())
    assert len(found["wattwatch_gpu_power_watts"]) == 4
    assert {dict(labels)["node"] for labels in found["wattwatch_node_up"]} == {"gpu-03"}
    assert {dict(labels)["train_job"] for labels in found["wattwatch_job_step"]} == {"finetune-evenfix"}
    assert "wattwatch_alerts_firing" not in found


def test_gpus_of_a_job_that_is_no_longer_evaluated_have_no_series() -> None:
    blind = replace(samples.cluster(), seconds=samples.MONOTONIC_NOW + 60.0, blind=True)
    found = snapshot_series(blind)
    assert "wattwatch_gpu_power_watts" not in found
    assert value(found, "wattwatch_blind") == 1.0
    assert value(found, "wattwatch_job_sample_age_seconds", train_job="pretrain-32b") == pytest.approx(60.4)


def test_two_indistinguishable_gpus_are_one_series() -> None:
    picture = samples.healthy()
    nameless = replace(
        picture.sample.gpus[0], rank=None, gpu=replace(picture.sample.gpus[0].gpu, index=None, uuid=None)
    )
    twice = replace(picture, sample=replace(picture.sample, gpus=(nameless, nameless)))
    found = snapshot_series(replace(samples.cluster(), jobs={"a": replace(twice, name="a")}))
    assert len(found["wattwatch_gpu_power_watts"]) == 1


def test_inhibited_alerts_are_counted_separately() -> None:
    found = snapshot_series(samples.cluster())
    crashed = {"alert": "JobCrashed", "severity": "critical", "train_job": samples.HOSTILE}
    assert frozenset(crashed.items()) not in found["wattwatch_alerts_firing"]
    assert value(found, "wattwatch_alerts_suppressed", **crashed) == 1.0
    assert (
        value(found, "wattwatch_alerts_firing", alert="JobHung", severity="critical", train_job="finetune-evenfix") == 1
    )


def test_nodes_have_their_status() -> None:
    found = snapshot_series(samples.cluster())
    assert value(found, "wattwatch_node_up", node="gpu-07") == 0.0
    assert value(found, "wattwatch_node_up", node="gpu-06") == 1.0
    assert value(found, "wattwatch_node_status", node="gpu-06", status="sampler_timeout") == 1.0
    assert value(found, "wattwatch_node_hung_call_seconds", node="gpu-06") == 48.0
    assert frozenset({("node", "gpu-08")}) not in found["wattwatch_probe_age_seconds"]


def test_delays_and_ticks_are_counted_once_a_snapshot() -> None:
    found = series(whole_body())
    assert value(found, "wattwatch_detection_delay_seconds_count") == 2.0
    assert value(found, "wattwatch_detection_delay_seconds_sum") == pytest.approx(3.1)
    assert value(found, "wattwatch_tick_duration_seconds_count") == 1.0


def test_the_snapshot_age_grows_while_the_engine_is_stopped() -> None:
    app = make_app(samples.cluster())
    body = MetricsExporter(app.latest, app.own)
    assert value(series(body.render(False).decode()), "wattwatch_snapshot_age_seconds") == 0.0
    app.time.seconds = 77.0
    assert value(series(body.render(False).decode()), "wattwatch_snapshot_age_seconds") == 77.0


def test_compressed_and_plain_are_the_same_in_one_gzip_stream() -> None:
    app = make_app(samples.cluster())
    with served(app.app) as address:
        plain = httpx.get(f"{address}/metrics", headers={"accept-encoding": "identity"})
        compressed = httpx.get(f"{address}/metrics", headers={"accept-encoding": "gzip"})
        again = httpx.get(f"{address}/metrics", headers={"accept-encoding": "gzip"})
    assert plain.headers["content-type"] == CONTENT_TYPE
    assert "content-encoding" not in plain.headers
    assert compressed.headers["content-encoding"] == "gzip"
    names = set(series(plain.text))
    assert set(series(compressed.text)) == set(series(again.text)) == names
    assert gzip.decompress(MetricsExporter(app.latest, app.own).render(True)).startswith(b"# HELP wattwatch_gpu")


def test_a_watcher_without_jobs_serves_only_its_own_metrics() -> None:
    found = snapshot_series(samples.empty())
    assert set(found) == {
        "wattwatch_blind",
        "wattwatch_ticks_overrun_total",
        "wattwatch_tick_late_seconds",
    }


def test_the_readme_lists_every_metric() -> None:
    readme = README.read_text("utf-8")
    for metric in METRICS.values():
        assert f"| `{metric.name}` | {metric.type} | {' '.join(metric.labels) or '–'} | {metric.help} |" in readme
    assert set(re.findall("`(wattwatch_[a-z_]+)`", readme)) == set(METRICS)


def test_the_throughput_of_a_hung_job_is_0() -> None:
    found = snapshot_series(samples.cluster())
    assert value(found, "wattwatch_job_tokens_per_second", train_job="finetune-evenfix") == 0.0
    assert value(found, "wattwatch_job_tokens_per_second", train_job="pretrain-32b") == 52_980.0


def test_readings_of_a_job_that_is_no_longer_evaluated_have_no_series_and_its_ages_grow() -> None:
    found = snapshot_series(replace(samples.cluster(), seconds=samples.MONOTONIC_NOW + 60.0))
    for name in ("tokens_per_second", "confidence_ratio", "loss", "gpus"):
        assert f"wattwatch_job_{name}" not in found
    assert value(found, "wattwatch_job_progress_age_seconds", train_job="pretrain-32b") == pytest.approx(62.5)
    assert value(found, "wattwatch_job_checkpoint_age_seconds", train_job="pretrain-32b") == pytest.approx(471.4)
    assert value(found, "wattwatch_job_state", train_job="pretrain-32b", state="computing") == 1.0


def test_ages_grow_after_the_engine_has_stopped_and_nothing_is_said_of_the_nodes() -> None:
    app = make_app(samples.cluster())
    body = MetricsExporter(app.latest, app.own)
    body.render(False)
    app.time.seconds = 60.0
    found = series(body.render(False).decode())
    assert value(found, "wattwatch_probe_age_seconds", node="gpu-01") == pytest.approx(60.4)
    assert value(found, "wattwatch_job_progress_age_seconds", train_job="pretrain-32b") == pytest.approx(62.5)
    assert not {"wattwatch_node_up", "wattwatch_node_status", "wattwatch_gpu_power_watts"} & set(found)


def test_one_text_serves_the_scrapes_of_a_second() -> None:
    app = make_app(samples.cluster())
    body = MetricsExporter(app.latest, app.own)
    ages = []
    for seconds in (0.0, 0.9, 1.8):
        app.time.seconds = seconds
        ages.append(value(series(body.render(False).decode()), "wattwatch_probe_age_seconds", node="gpu-01"))
    assert ages == pytest.approx([0.4, 0.4, 2.2])


def test_an_alert_that_is_kept_open_is_counted_as_clearing() -> None:
    back = replace(samples.episodes()[4], absent_since_wall_seconds=samples.NOW - 90.0)
    found = snapshot_series(replace(samples.cluster(), episodes=(*samples.episodes()[:4], back)))
    labels = {"alert": "NodeUnreachable", "severity": "warning", "train_job": "eval-nightly"}
    assert value(found, "wattwatch_alerts_clearing", **labels) == 1.0
    assert value(found, "wattwatch_alerts_firing", **labels) == 1.0
    assert len(found["wattwatch_alerts_clearing"]) == 1


def test_undelivered_messages_are_those_of_the_moment_of_the_scrape() -> None:
    app = make_app(samples.cluster())
    waiting = DeliveryStats(waiting=7, oldest_waiting_seconds=33.0)
    latest = LatestSnapshot(samples.cluster(), app.time, 1.0, deliveries=lambda: waiting)
    found = series(MetricsExporter(latest, app.own).render(False).decode())
    assert value(found, "wattwatch_outbox_messages") == 7.0
    assert value(found, "wattwatch_outbox_oldest_seconds") == 33.0


def test_the_age_of_a_checkpoint_includes_the_age_of_its_listing() -> None:
    healthy = samples.healthy()
    (listing,) = healthy.sample.checkpoints
    hung_listing = replace(healthy, sample=replace(healthy.sample, checkpoints=(replace(listing, age_seconds=90.0),)))
    found = snapshot_series(replace(samples.cluster(), jobs={"pretrain-32b": hung_listing}))
    assert value(found, "wattwatch_job_checkpoint_age_seconds", train_job="pretrain-32b") == pytest.approx(500.4)
