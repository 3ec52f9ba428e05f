"""The page: what it shows without scripts, what it never lets through, and what large jobs cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser

import httpx
import pytest

from tests.watcher.web import sample_snapshots as samples
from tests.watcher.web.served_app import make_app, served
from wattwatch.collectors.samples import ProgressSample
from wattwatch.watcher.common import formatting
from wattwatch.watcher.detection.model import Alternative, JobState, PowerState
from wattwatch.watcher.engine.snapshot import Snapshot
from wattwatch.watcher.web.page import STRIP_HEIGHT, PageRenderer, gpus_to_draw, power_history, power_strip


class Words(HTMLParser):
    """The text that a reader sees, and every tag with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(snapshot: Snapshot, seconds: float = 0.0) -> Words:
    app = make_app(snapshot)
    app.time.seconds = seconds
    return Words(PageRenderer(app.latest).page())


def test_each_job_shows_its_state_since_when_how_certain_and_why() -> None:
    text = page(samples.cluster()).text
    assert "finetune-evenfix hung for 3 min 40 s No step for 3 min 40 s" in text
    assert "Suspect: rank 3 on gpu-03 GPU 3" in text
    assert "sampled 0.4 s ago" in text
    # The confidence is that of what the sample shows, not of the job's state.
    assert "Last sample: hang (confidence 94 %), one low rest busy." in text
    assert text.count("94 %") == 1
    assert "step 1,923 of 3,854" in text
    assert "GPU-hours lost 1.0 187 Wh" in text
    assert "tokens/s 52,980" in text
    assert "power by rank 184–194 W of 1,100 W" in text


def test_a_check_decides_between_two_only_where_there_are_two() -> None:
    job = samples.unseen()
    check = "Run nvidia-smi on the node"
    alone = replace(job.verdict, alternative=None, deciding_check=check)
    one_of_two = replace(alone, alternative=Alternative(PowerState.HANG, 0.1))
    text = page(replace(samples.cluster(), jobs={"a": replace(job, verdict=alone)})).text
    assert f"To find out: {check}." in text
    assert "between the two" not in text
    text = page(replace(samples.cluster(), jobs={"a": replace(job, verdict=one_of_two)})).text
    assert f"To decide between the two: {check}." in text


def test_an_unknown_value_is_never_shown_as_a_number() -> None:
    text = page(replace(samples.cluster(), jobs={"eval-nightly": samples.unseen()})).text
    assert "step – step age – tokens/s – checkpoint age – GPUs 0" in text
    assert "Last sample: unknown, unknown. There is no reading." in text
    assert "confidence" not in text
    assert "The GPUs of this job cannot be read now." in text


def test_a_lost_gpu_shows_why_it_has_no_reading() -> None:
    text = page(replace(samples.cluster(), jobs={"a": samples.lost_gpu()})).text
    assert "5 gpu-06 5 lost lost" in text


def test_hostile_names_stay_text() -> None:
    found = page(samples.cluster())
    assert samples.HOSTILE.split("\n")[0].strip() in found.text
    assert [attrs.get("src") for tag, attrs in found.tags if tag == "script"] == ["/assets/page.js"]
    assert "49" not in found.text  # {{7*7}} was not evaluated


def test_nothing_on_the_page_needs_what_its_policy_forbids() -> None:
    with served(make_app(samples.cluster()).app) as address:
        answer = httpx.get(address)
        assets = [httpx.get(f"{address}/assets/{name}") for name in ("page.css", "page.js", "favicon.svg")]
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for _, attrs in Words(answer.text).tags:
        assert "style" not in attrs
        assert not [name for name in attrs if name.startswith("on")]
        assert not [v for v in attrs.values() if v and re.match("(https?:)?//|javascript:", v)]
    assert "<style" not in answer.text
    assert [asset.status_code for asset in assets] == [200, 200, 200]
    assert [asset.headers["x-content-type-options"] for asset in assets] == ["nosniff"] * 3


def test_the_page_is_complete_without_scripts() -> None:
    found = page(samples.cluster())
    assert ("meta", {"http-equiv": "refresh", "content": "5"}) in found.tags
    assert "Open alerts" in found.text


@pytest.mark.parametrize(
    ("change", "seconds", "says"),
    [
        (lambda s: replace(s, blind=True), 0.0, "The watcher lost contact with most nodes"),
        (lambda s: s, 61.0, "The watcher has stopped: its last update was 1 min 1 s ago"),
        (
            lambda s: replace(s, deliveries=replace(s.deliveries, oldest_waiting_seconds=340.0)),
            0.0,
            "Alert messages are not being delivered. Undelivered messages: 1. The oldest has been waiting for "
            "5 min 40 s. Receivers with failed deliveries: ops.",
        ),
    ],
)
def test_problems_of_the_watcher_itself_come_first(
    change: Callable[[Snapshot], Snapshot], seconds: float, says: str
) -> None:
    text = page(change(samples.cluster()), seconds).text
    assert says in text
    assert text.index(says) < text.index("Open alerts")


def test_a_healthy_watcher_shows_no_banner() -> None:
    live = PageRenderer(make_app(samples.cluster()).latest).live()
    assert "banner" not in live


def test_ages_count_up_to_the_time_of_the_response() -> None:
    text = page(samples.cluster(), 5.0).text
    assert "sampled 5.4 s ago" in text
    assert "gpu-01 data 5.4 s old" in text


def test_every_state_has_a_name_a_color_and_a_shape() -> None:
    with served(make_app(samples.cluster()).app) as address:
        text = httpx.get(address).text
        css = httpx.get(f"{address}/assets/page.css").text
    for state in JobState:
        assert f'<symbol id="state-{state.value}"' in text
        assert f".state-{state.value} {{" in css


def test_a_watcher_without_jobs_has_a_page() -> None:
    text = page(samples.empty()).text
    assert "0 jobs · no open alerts · 0 of 0 nodes ok" in text
    assert "0 jobs have been evaluated so far." in text


def test_a_thousand_gpus_are_one_chart_and_no_table() -> None:
    text = PageRenderer(make_app(samples.large(128)).latest).live()
    assert "GPUs not listed: 1024; the API has all of them" in text
    assert len(text) < 250_000


def test_the_same_snapshot_is_rendered_once_for_concurrent_requests() -> None:
    app = make_app(samples.cluster())
    renderer = PageRenderer(app.latest)
    assert renderer.live() is renderer.live()
    app.time.seconds = 1.0
    assert "sampled 1.4 s ago" in Words(renderer.live()).text


def test_bars_show_readings_and_marks_show_missing_ones() -> None:
    lost = samples.lost_gpu()
    strip = power_strip(lost.sample.gpus, lost.verdict.suspects)
    assert strip.bars.count("z") == 7
    assert strip.absent.count("z") == 1
    assert strip.marked == ""
    hung = samples.hung()
    strip = power_strip(hung.sample.gpus, hung.verdict.suspects)
    assert (strip.bars.count("z"), strip.marked.count("z")) == (15, 1)
    heights = [float(h) for h in re.findall(r"v-([0-9.]+)h", strip.bars)]
    assert max(heights) <= STRIP_HEIGHT


def test_gpus_that_are_not_seen_are_drawn_and_named_as_such() -> None:
    """Half of the ranks were blind, and the bars of the others filled the whole width."""
    half = samples.half_seen()
    assert [(each.rank, each.gpu.power_watts is None) for each in gpus_to_draw(half.sample)] == [
        (rank, rank >= 8) for rank in range(16)
    ]
    strip = power_strip(gpus_to_draw(half.sample), ())
    assert (strip.bars.count("z"), strip.absent.count("z")) == (8, 8)
    assert strip.width == power_strip(samples.healthy().sample.gpus, ()).width
    drawn = page(replace(samples.cluster(), jobs={"pretrain-32b": half}))
    assert "Not seen: ranks 8-15 on gpu-02: node does not answer" in drawn.text
    assert "8 gpu-02 0 not seen: node does not answer" in drawn.text
    labels = [attributes.get("aria-label") or "" for tag, attributes in drawn.tags if tag == "svg"]
    assert any(label.startswith("power by rank, 8 of 16 GPUs: ") for label in labels)
    assert "Not seen" not in page(replace(samples.cluster(), jobs={"a": samples.healthy()})).text


def test_the_power_history_has_gaps_where_there_is_no_data() -> None:
    points = list(samples.healthy().timeline)
    for i in range(200, 300):
        points[i] = replace(points[i], power_watts_median=None, power_watts_low=None, power_watts_high=None)
    drawn = power_history(points, samples.healthy().sample.gpus, samples.NOW)
    assert drawn is not None
    assert drawn.median.count("M") == 2
    assert [segment.state for segment in drawn.segments] == ["computing", "checkpointing", "computing"]
    assert power_history(points[:1], (), samples.NOW) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "–"),
        (float("inf"), "–"),
        (-1.0, "0 s"),
        (0.44, "0.4 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (200.0, "3 min 20 s"),
        (1_200.0, "20 min"),
        (7_500.0, "2 h 5 min"),
        (273_600.0, "3 d 4 h"),
    ],
)
def test_durations_are_formatted_for_people(seconds: float | None, text: str) -> None:
    assert formatting.format_duration(seconds) == text


def test_the_throughput_of_a_hung_job_is_0_beside_its_last_report() -> None:
    text = page(replace(samples.cluster(), jobs={"a": samples.hung()}), 3.0).text
    assert "tokens/s 0 52,958, 3 min 43 s ago" in text


def test_a_state_that_the_watcher_found_is_at_least_as_old_as_the_watch() -> None:
    found = replace(samples.healthy(), state_began_unseen=True)
    assert "computing for at least 2 min 1 s" in page(replace(samples.cluster(), jobs={"a": found})).text
    assert "computing for 2 min 1 s" in page(replace(samples.cluster(), jobs={"a": samples.healthy()})).text


def test_a_job_that_is_no_longer_evaluated_shows_nothing_as_current() -> None:
    old = replace(samples.healthy(), evaluated_seconds=samples.MONOTONIC_NOW - 120.0)
    text = page(replace(samples.cluster(), jobs={"a": old})).text
    assert "computing when last evaluated, 2 min ago" in text
    assert "This job has not been evaluated for 2 min . Everything below is that old." in text
    assert "tokens/s – 52,980, 2 min 2 s ago" in text


def test_an_alert_that_is_kept_open_says_first_that_the_problem_is_gone() -> None:
    kept = "back to normal since 2026-08-20 10:13:30 UTC; kept open because this problem comes and goes, until ..."
    gone = replace(
        samples.episodes()[4],
        absent_since_wall_seconds=samples.NOW - 90.0,
        last_seen_wall_seconds=samples.NOW - 90.0,
        kept_open=kept,
    )
    text = page(replace(samples.cluster(), episodes=(gone,))).text
    assert f"Back{kept[4:]}. Before: gpu-07 does not answer." in text
    assert "As last seen, 1 min 30 s ago:" in text


def test_ages_do_not_change_when_the_wall_clock_is_set() -> None:
    """Not even those of a job that has not been evaluated since."""
    app = make_app(samples.cluster())
    before = Words(PageRenderer(app.latest).page()).text
    app.time.wall_step = -3600.0
    assert Words(PageRenderer(app.latest).page()).text == before


def test_a_message_that_was_given_up_is_a_banner() -> None:
    given_up = replace(samples.cluster().deliveries, given_up={"ops": "gone: HTTP 404"})
    text = page(replace(samples.cluster(), deliveries=given_up)).text
    assert "The last alert message to receiver ops was not delivered and will not be retried: gone: HTTP 404." in text


def test_the_power_history_ends_and_breaks_where_the_job_was_not_evaluated() -> None:
    """For three minutes in the middle, and since a minute."""
    points = [p for i, p in enumerate(samples.healthy().timeline) if not 100 <= i < 280 and i < 540]
    drawn = power_history(points, samples.healthy().sample.gpus, samples.NOW)
    assert drawn is not None
    assert drawn.median.count("M") == 2
    computing = [segment for segment in drawn.segments if segment.state == "computing"]
    assert [(round(s.x), round(s.x + s.width)) for s in computing] == [(0, 99), (280, 420), (480, 539)]


def with_progress(**changes: object) -> Words:
    job = samples.healthy()
    progress = replace(job.sample.progress, **changes)  # type: ignore[arg-type]  # names are JobProgress's
    return page(replace(samples.cluster(), jobs={"a": replace(job, sample=replace(job.sample, progress=progress))}))


def test_a_guessed_step_and_a_step_within_its_epoch_are_shown_as_such() -> None:
    words = with_progress(guessed=True, epoch=3, epoch_step=6800, epoch_steps=29_317)
    assert "epoch 3, 6,800 of 29,317 guessed" in words.text
    assert "guessed" not in with_progress().text


def test_a_log_that_shows_no_step_is_named_with_the_reason() -> None:
    source = ProgressSample(
        "/runs/train.log", "", None, age_seconds=3.0, why="no line has a known format (71 lines read)"
    )
    text = with_progress(step=None, total_steps=None, sources=(source,)).text
    assert "No step found in /runs/train.log: no line has a known format (71 lines read)" in text
    assert "No step found" not in with_progress().text
