"""`wattwatch status` against the real API over a loopback port."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fastapi import FastAPI

from tests.collectors.ssh.real_sshd import free_port
from tests.watcher.command_shell import Shell
from tests.watcher.web import sample_snapshots as handmade
from tests.watcher.web.served_app import make_app, served
from wattwatch.watcher.detection.model import AlertName, Severity
from wattwatch.watcher.engine.snapshot import DeliveryStats, Snapshot

TOKEN = "s3cret-täken"
DELIVERED = DeliveryStats({"ops": 12})


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with watching(replace(handmade.cluster(), deliveries=DELIVERED)) as address:
        yield address


def healthy_watch() -> Snapshot:
    """One healthy job, no alert, and every message delivered."""
    job = handmade.healthy()
    return replace(handmade.cluster(), jobs={job.name: job}, episodes=(), deliveries=DELIVERED)


@contextmanager
def watching(snapshot: Snapshot, token: str | None = None) -> Iterator[str]:
    with served(make_app(snapshot, token).app) as address:
        yield address


def test_all_jobs_are_listed_with_step_throughput_and_reason_and_open_alerts(address: str, shell: Shell) -> None:
    answer = shell.run("status", "--url", address)
    assert answer.exit_code == 2
    healthy = next(line for line in answer.out.splitlines() if line.startswith("pretrain-32b"))
    assert healthy.split()[1:4] == ["computing", "1,923/3,854", "52,980"]
    assert "Step 1,923 was" in healthy
    assert "CRITICAL JobHung finetune-evenfix: Hung at step 3,854: rank 3 waits apart from the other 15." in answer.out
    assert "WARNING NodeUnreachable eval-nightly: gpu-07 does not answer." in answer.out
    assert "(not sent, because GpuFault gpu-06/5 explains it)" in answer.out
    assert "JobSlow" not in answer.out  # closed


def test_gpus_that_are_not_seen_are_named_with_the_reason(shell: Shell) -> None:
    half = handmade.half_seen()
    with watching(replace(handmade.cluster(), jobs={half.name: half}, episodes=())) as address:
        answer = shell.run("status", "--url", address)
        (job,) = shell.run("status", "--url", address, "--json").json["jobs"]
    assert "pretrain-32b: 8 of 16 GPUs seen; not seen: ranks 8-15 on gpu-02: node does not answer" in " ".join(
        answer.out.split()
    )
    assert job["seen"] == "8 of 16 GPUs seen"
    assert job["unseen"][0] == {"node": "gpu-02", "gpu": 0, "rank": 8, "why": "node does not answer"}


def test_the_recording_of_the_latest_incident_is_named(shell: Shell) -> None:
    desk = make_app(handmade.cluster(), None)
    desk.latest.recordings = {"finetune-evenfix": "/state/incidents/x.wattwatch.gz"}
    with served(desk.app) as address:
        out = shell.run("status", "--url", address).out
    assert "latest incident of finetune-evenfix: wattwatch replay /state/incidents/x.wattwatch.gz" in out
    assert out.count("latest incident") == 1


def test_names_and_reasons_are_not_interpreted_as_markup(shell: Shell) -> None:
    job = replace(handmade.healthy(), name="[bold]a[/nonsense]", reason="[link=x]y[/]")
    with watching(replace(healthy_watch(), jobs={job.name: job})) as address:
        answer = shell.run("status", "--url", address)
    assert answer.exit_code == 0
    assert "[bold]a[/nonsense]" in answer.out
    assert "[link=x]y[/]" in answer.out
    assert "no open alerts" in answer.out


@pytest.mark.parametrize(
    ("job", "code"),
    [("pretrain-32b", 0), ("finetune-evenfix", 2), ("ablation-loader", 1), ("eval-nightly", 1)],
)
def test_the_exit_code_for_one_job_depends_on_that_job(job: str, code: int, address: str, shell: Shell) -> None:
    answer = shell.run("status", job, "--url", f"{address}/", "--json")
    assert answer.exit_code == code
    assert [view["name"] for view in answer.json["jobs"]] == [job]
    assert {alert["job"] for alert in answer.json["alerts"]} <= {job}


def test_a_job_name_with_special_characters_reaches_the_api_unchanged(shell: Shell) -> None:
    job = replace(handmade.healthy(), name='50% "x" & <ü>? #1')
    with watching(replace(healthy_watch(), jobs={job.name: job})) as address:
        answer = shell.run("status", job.name, "--url", address, "--json")
    assert answer.json["jobs"][0]["name"] == job.name
    assert answer.exit_code == 0


def test_an_alert_about_the_watcher_itself_is_shown_for_every_job(shell: Shell) -> None:
    blind = handmade.episode(AlertName.WATCHER_DEGRADED, Severity.WARNING, "", "The watcher is blind.", 5.0)
    with watching(replace(handmade.cluster(), episodes=(blind,))) as address:
        answer = shell.run("status", "pretrain-32b", "--url", address)
    assert answer.exit_code == 1
    assert "WARNING WatcherDegraded the watcher: The watcher is blind." in answer.out


def test_a_suppressed_alert_does_not_affect_the_exit_code(shell: Shell) -> None:
    quiet = replace(handmade.episodes()[0], suppressed_by="NodeUnreachable gpu-03")
    with watching(replace(healthy_watch(), episodes=(quiet,))) as address:
        assert shell.run("status", "--url", address).exit_code == 0


def test_a_watcher_that_no_longer_updates_is_unknown(shell: Shell) -> None:
    desk = make_app(replace(handmade.cluster(), episodes=()))
    desk.time.seconds = 600.0
    with served(desk.app) as address:
        answer = shell.run("status", "--url", address)
    assert answer.exit_code == 3
    assert "600 s ago" in answer.err
    assert "pretrain-32b" in answer.out


def test_an_unknown_job_is_an_error_that_lists_the_known_jobs(shell: Shell) -> None:
    job = handmade.healthy()
    with watching(replace(handmade.cluster(), jobs={job.name: job})) as address:
        answer = shell.run("status", "pretrain", "--url", address)
    assert answer.exit_code == 3
    assert "known jobs: pretrain-32b" in answer.err
    assert len(answer.err.splitlines()) == 1


def test_the_token_is_read_from_its_file(shell: Shell, tmp_path: Path) -> None:
    good, bad, empty = (tmp_path / name for name in ("good", "bad", "empty"))
    good.write_text(f"{TOKEN}\n")
    bad.write_text("another\n")
    empty.write_text("\n")
    with watching(handmade.cluster(), TOKEN) as address:
        assert shell.run("status", "--url", address, "--token-file", good).exit_code == 2
        for arguments, words in (
            ([], "401 a token is required"),
            (["--token-file", bad], "401 a token is required"),
            (["--token-file", empty], "is empty"),
            (["--token-file", tmp_path / "none"], "No such file"),
        ):
            answer = shell.run("status", "--url", address, *arguments)
            assert (answer.exit_code, answer.out) == (3, "")
            assert words in answer.err


@pytest.mark.parametrize("url", ["", "nonsense", "http://", "http://[::1", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_an_invalid_address_is_an_error_in_one_sentence(url: str, shell: Shell) -> None:
    answer = shell.run("status", "--url", url)
    assert (answer.exit_code, answer.out) == (3, "")
    assert len(answer.err.splitlines()) == 1


def test_no_watcher_is_an_error_in_one_sentence_with_what_to_do(shell: Shell) -> None:
    answer = shell.run("status", "--url", f"http://127.0.0.1:{free_port()}")
    assert answer.exit_code == 3
    assert "is `wattwatch serve` running?" in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.parametrize("content", [[], {}, [{}], ["x"], None, [{"name": "x"}]])
def test_another_service_at_that_address_is_not_mistaken_for_a_watcher(content: object, shell: Shell) -> None:
    app = FastAPI()

    @app.get("/{path:path}")
    def answer_anything(path: str) -> object:
        return content if path.startswith("api") else {"path": path}

    with served(app) as address:
        answer = shell.run("status", "--url", address)
    assert answer.exit_code == 3
    assert len(answer.err.splitlines()) == 1


def test_a_web_page_instead_of_the_api_is_an_error(shell: Shell) -> None:
    with served(FastAPI(docs_url="/api/v1/jobs")) as address:
        answer = shell.run("status", "--url", address)
    assert answer.exit_code == 3
    assert "not a wattwatch API" in answer.err


def test_nothing_wrong_is_0(shell: Shell) -> None:
    with watching(healthy_watch()) as address:
        answer = shell.run("status", "--url", address)
    assert (answer.exit_code, answer.err) == (0, "")
    assert "WARNING" not in answer.out


def test_a_job_whose_state_is_unknown_is_not_0(shell: Shell) -> None:
    unseen = handmade.unseen()
    with watching(replace(healthy_watch(), jobs={unseen.name: unseen})) as address:
        assert shell.run("status", "--url", address).exit_code == 3
        assert shell.run("status", unseen.name, "--url", address, "--json").exit_code == 3


def test_a_watcher_that_has_evaluated_no_job_is_not_0(shell: Shell) -> None:
    with watching(handmade.empty()) as address:
        answer = shell.run("status", "--url", address)
    assert answer.exit_code == 3
    assert "no job has been evaluated yet" in answer.out


def test_a_critical_alert_outweighs_a_job_whose_state_is_unknown(shell: Shell) -> None:
    jobs = {job.name: job for job in (handmade.hung(), handmade.unseen())}
    with watching(replace(healthy_watch(), jobs=jobs, episodes=handmade.episodes()[:1])) as address:
        assert shell.run("status", "--url", address).exit_code == 2


@pytest.mark.parametrize(
    ("deliveries", "sentence"),
    [
        (
            DeliveryStats(waiting=1, oldest_waiting_seconds=0.4),
            "1 alert message not delivered yet; the oldest has been waiting for 0.4 s",
        ),
        (
            DeliveryStats(waiting=3, oldest_waiting_seconds=340.0),
            "3 alert messages not delivered yet; the oldest has been waiting for 5 min 40 s",
        ),
        (
            DeliveryStats(given_up={"ops": "gone: HTTP 404: no receiver exists at this URL"}),
            "the last alert message to receiver ops was not delivered and will not be retried: gone: HTTP 404",
        ),
    ],
)
def test_messages_that_do_not_arrive_are_a_warning(deliveries: DeliveryStats, sentence: str, shell: Shell) -> None:
    with watching(replace(healthy_watch(), deliveries=deliveries)) as address:
        answer = shell.run("status", "--url", address)
        document = shell.run("status", "pretrain-32b", "--url", address, "--json").json
    assert document["deliveries"]["waiting"] == deliveries.waiting
    assert answer.exit_code == 1
    assert f"WARNING {sentence}" in " ".join(answer.out.split())


def test_the_throughput_of_a_hung_job_is_0(shell: Shell) -> None:
    hung = handmade.hung()
    with watching(replace(healthy_watch(), jobs={hung.name: hung})) as address:
        out = shell.run("status", "--url", address).out
    row = next(line for line in out.splitlines() if line.startswith(hung.name))
    assert row.split()[1:4] == ["hung", "3,854/3,854", "0"]


def test_a_job_that_is_no_longer_evaluated_is_unknown(shell: Shell) -> None:
    """Its evaluation fails at every tick, or the watcher has lost its nodes; others are evaluated all the same."""
    healthy = handmade.healthy()
    old = replace(healthy, name="old", evaluated_seconds=healthy.evaluated_seconds - 300.0)
    with watching(replace(healthy_watch(), jobs={"pretrain-32b": healthy, "old": old})) as address:
        assert shell.run("status", "pretrain-32b", "--url", address).exit_code == 0
        answer = shell.run("status", "--url", address)
        (job,) = shell.run("status", "old", "--url", address, "--json").json["jobs"]
    assert answer.exit_code == 3
    row = next(line for line in answer.out.splitlines() if line.startswith("old"))
    assert row.split()[1:4] == ["unknown", "1,923/3,854", "-"]
    assert "not evaluated for 5 min; its last known state is computing:" in " ".join(answer.out.split())
    assert (job["stale"], job["progress"]["tokens_per_second"]) == (True, None)
    assert job["progress"]["age_seconds"] == pytest.approx(302.5)


def test_an_alert_that_is_kept_open_says_first_that_the_problem_is_gone(shell: Shell) -> None:
    kept = "back to normal since 2026-08-20 10:13:30 UTC; kept open because this problem comes and goes, until ..."
    gone = replace(handmade.episodes()[4], absent_since_wall_seconds=handmade.NOW - 90.0, kept_open=kept)
    with watching(replace(healthy_watch(), episodes=(gone,))) as address:
        out = shell.run("status", "--url", address).out
    assert f"Back{kept[4:]}. Before: gpu-07 does not answer." in " ".join(out.split())
