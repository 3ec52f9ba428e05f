"""The API as programs see it: field names, errors, tokens. All over a real socket."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from tests.watcher.web import sample_snapshots as samples
from tests.watcher.web.served_app import ServedApp, make_app, served
from wattwatch.watcher.daemon.preflight import is_loopback

FROZEN = Path(__file__).parents[2] / "data" / "serve" / "api_fields.json"
README = Path(__file__).parents[3] / "watcher" / "web" / "README.md"
TOKEN = "s3cret-täken"
ODD_NAME = 'team/"x" & <ü>?'


@pytest.fixture(scope="module")
def app() -> ServedApp:
    snapshot = samples.cluster()
    odd = replace(samples.lost_gpu(), name=ODD_NAME)
    return make_app(replace(snapshot, jobs={**snapshot.jobs, ODD_NAME: odd}))


@pytest.fixture(scope="module")
def client(app: ServedApp) -> Iterator[httpx.Client]:
    with served(app.app) as address, httpx.Client(base_url=address, trust_env=False) as client:
        yield client


@pytest.fixture(scope="module")
def guarded() -> Iterator[httpx.Client]:
    app = make_app(samples.cluster(), TOKEN).app
    with served(app) as address, httpx.Client(base_url=address, trust_env=False) as client:
        yield client


def problem_of(answer: httpx.Response) -> dict[str, Any]:
    assert answer.headers["content-type"] == "application/problem+json"
    document: dict[str, Any] = answer.json()
    assert set(document) == {"type", "title", "status", "detail", "instance"}
    assert document["status"] == answer.status_code
    return document


def test_fields_are_as_frozen(client: httpx.Client) -> None:
    """Programs depend on these. Add to the file; change or remove nothing in it without a new version of the API."""
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    now = {name: sorted(s["properties"]) for name, s in schemas.items() if "properties" in s}
    assert now == json.loads(FROZEN.read_text("utf-8"))


def test_a_job_names_the_recording_of_its_newest_incident(app: ServedApp, client: httpx.Client) -> None:
    assert client.get("/api/v1/jobs/finetune-evenfix").json()["incident"] is None
    app.latest.recordings = {"finetune-evenfix": "/var/lib/wattwatch/incidents/x.wattwatch.gz"}
    assert client.get("/api/v1/jobs/finetune-evenfix").json()["incident"].endswith("x.wattwatch.gz")
    assert [job["incident"] for job in client.get("/api/v1/jobs").json()].count(None) == len(
        app.latest.snapshot.jobs
    ) - 1
    app.latest.recordings = {}


def test_a_job_has_state_reason_progress_and_verdict(client: httpx.Client) -> None:
    job = client.get("/api/v1/jobs/finetune-evenfix").json()
    assert (job["name"], job["state"]) == ("finetune-evenfix", "hung")
    assert job["since"] == "2026-08-20T10:11:20Z"
    assert "No step for 3 min 40 s" in job["reason"]
    assert job["progress"]["step"] == 3854
    assert job["progress"]["age_seconds"] == pytest.approx(220.4)  # 220 s when it was evaluated, 0.4 s ago
    assert job["verdict"]["shape"] == "one_low_rest_busy"
    assert job["verdict"]["suspects"] == [{"node": "gpu-03", "gpu": 3, "rank": 3}]
    assert job["checkpoint"]["name"] == "step-00001500"  # the newer one is not complete
    assert job["wasted_gpu_seconds"] == {"JobHung": 3520.0}
    assert job["wasted_energy_joules"] == {"JobHung": 3520.0 * 191}


def test_the_list_of_jobs_has_each_job_as_its_own_path_returns_it(client: httpx.Client) -> None:
    jobs = client.get("/api/v1/jobs").json()
    assert [job["name"] for job in jobs] == [*samples.cluster().jobs, ODD_NAME]
    assert jobs[1] == client.get("/api/v1/jobs/finetune-evenfix").json()


def test_a_job_of_any_name_can_be_requested(client: httpx.Client) -> None:
    job = client.get(f"/api/v1/jobs/{quote(ODD_NAME, safe='')}").json()
    assert job["name"] == ODD_NAME
    rank_gpus = client.get(f"/api/v1/jobs/{quote(ODD_NAME, safe='')}/gpus").json()
    assert len(rank_gpus) == 8


def test_an_unknown_reading_is_null_with_a_reason(client: httpx.Client) -> None:
    lost = client.get(f"/api/v1/jobs/{quote(ODD_NAME, safe='')}/gpus").json()[5]
    assert lost["power_watts"] is None
    assert lost["reasons"] == {"power_watts": "lost", "utilization_percent": "lost"}
    job = client.get(f"/api/v1/jobs/{quote(ODD_NAME, safe='')}").json()
    assert (job["progress"]["loss"], job["progress"]["loss_finite"]) == (None, False)


def test_the_timeline_can_be_followed(client: httpx.Client) -> None:
    everything = client.get("/api/v1/jobs/pretrain-32b/timeline").json()
    later = client.get("/api/v1/jobs/pretrain-32b/timeline", params={"since": everything[-3]["time"]}).json()
    assert later == everything[-2:]


def test_nodes_have_their_status_and_the_age_of_their_data(client: httpx.Client) -> None:
    nodes = {node["node"]: node for node in client.get("/api/v1/nodes").json()}
    assert (nodes["gpu-01"]["status"], nodes["gpu-01"]["detail"]) == ("ok", "")
    assert nodes["gpu-06"]["hung_calls"] == {
        "nvidia-smi": 48.4,
        "list /mnt/ckpt": 12.4,
    }  # 48 s and 12 s in a line that is 0.4 s old
    assert nodes["gpu-07"]["age_seconds"] == 301.0
    assert nodes["gpu-08"]["age_seconds"] is None


def test_alerts_are_the_open_and_the_recently_closed_ones(client: httpx.Client) -> None:
    alerts = client.get("/api/v1/alerts").json()
    assert {alert["alert"] for alert in alerts if alert["closed"] is None} == {
        "JobHung",
        "JobStarving",
        "GpuFault",
        "JobCrashed",
        "NodeUnreachable",
    }
    (closed,) = (alert for alert in alerts if alert["closed"] is not None)
    assert closed["opened"] < closed["closed"]
    assert [alert["suppressed_by"] for alert in alerts if alert["alert"] == "JobCrashed"] == ["GpuFault gpu-06/5"]


def test_ages_grow_while_the_watcher_is_stopped() -> None:
    app = make_app(samples.cluster())
    with served(app.app) as address:
        app.time.seconds = 100.0
        job = httpx.get(f"{address}/api/v1/jobs/finetune-evenfix").json()
        assert (job["progress"]["age_seconds"], job["age_seconds"]) == pytest.approx((320.4, 100.4))
        document = problem_of(httpx.get(f"{address}/-/ready"))
        assert document["status"] == 503
        assert "100 s ago" in document["detail"]
        assert httpx.get(f"{address}/-/healthy").status_code == 200


def test_ready_means_that_the_engine_has_ticked() -> None:
    app = make_app(samples.empty(), ticked=False)
    with served(app.app) as address:
        assert httpx.get(f"{address}/-/ready").status_code == 503
        app.latest.publish(samples.cluster())
        assert httpx.get(f"{address}/-/ready").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status", "says"),
    [
        ("GET", "/nowhere", 404, "/docs"),
        ("GET", "/api/v1/jobs/none", 404, "known jobs: "),
        ("GET", "/api/v1/jobs/none/gpus", 404, "there is no job 'none'"),
        ("POST", "/api/v1/jobs", 405, "POST"),
        ("DELETE", "/", 405, "DELETE"),
        ("GET", "/api/v1/jobs/pretrain-32b/timeline?since=yesterday", 422, "since"),
        ("GET", "/assets/../service.py", 404, ""),
    ],
)
def test_every_error_is_a_problem_document(
    client: httpx.Client, method: str, path: str, status: int, says: str
) -> None:
    document = problem_of(client.request(method, path))
    assert document["status"] == status
    assert says in document["detail"]


def test_an_internal_error_is_a_problem_document_without_internals() -> None:
    app = make_app(samples.cluster())
    app.latest.snapshot = None  # type: ignore[assignment]  # an impossible value, to provoke an internal error
    with served(app.app) as address:
        document = problem_of(httpx.get(f"{address}/api/v1/jobs"))
    assert document["status"] == 500
    assert "Traceback" not in document["detail"]
    assert "snapshot" not in document["detail"]


@pytest.mark.parametrize("path", ["/", "/live", "/api/v1/jobs", "/metrics", "/docs", "/openapi.json", "/none"])
@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic !!!", "Digest x", "Bearer"])
def test_without_the_token_nothing_is_revealed(guarded: httpx.Client, path: str, header: str | None) -> None:
    answer = guarded.get(path, headers={} if header is None else {"authorization": header})
    assert problem_of(answer)["status"] == 401
    assert "Bearer" in answer.headers["www-authenticate"]
    assert "pretrain" not in answer.text


def test_the_token_is_accepted_as_bearer_and_as_basic_password(guarded: httpx.Client) -> None:
    bearer = f"Bearer {TOKEN}".encode()
    basic = b"Basic " + base64.b64encode(f"anyone:{TOKEN}".encode())
    for given in (bearer, basic):
        assert guarded.get("/", headers={b"authorization": given}).status_code == 200
        assert guarded.get("/api/v1/jobs", headers={b"authorization": given}).status_code == 200


def test_health_needs_no_token(guarded: httpx.Client) -> None:
    assert guarded.get("/-/healthy").status_code == 200
    assert guarded.get("/-/ready").status_code == 200


def test_docs_load_nothing_from_other_hosts(client: httpx.Client) -> None:
    docs = client.get("/docs").text
    assert "http://" not in docs
    assert "https://" not in docs
    assert "<script" not in docs
    for path in client.get("/openapi.json").json()["paths"]:
        assert path in docs


def test_every_field_and_path_is_documented(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert operation["description"], path
            assert operation["responses"]["default"]["content"].keys() == {"application/problem+json"}
    readme = README.read_text("utf-8")
    for path in document["paths"]:
        assert f"`{path}`" in readme


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("gpu-login", False),
    ],
)
def test_loopback_is_an_address_that_no_other_machine_reaches(host: str, only_here: bool) -> None:
    assert is_loopback(host) is only_here


def test_throughput_is_that_of_now_with_the_last_report_and_its_age_beside_it(client: httpx.Client) -> None:
    progress = client.get("/api/v1/jobs/finetune-evenfix").json()["progress"]
    assert (progress["tokens_per_second"], progress["reported_tokens_per_second"]) == (0.0, 52_958.0)
    assert progress["reported_tokens_per_second_age_seconds"] == pytest.approx(220.4)


def test_every_gpu_reading_has_its_age(client: httpx.Client) -> None:
    gpus = client.get("/api/v1/jobs/pretrain-32b/gpus").json()
    assert [gpu["age_seconds"] for gpu in gpus] == pytest.approx([0.8] * 16)  # a line of 0.4 s, evaluated 0.4 s ago


def test_deliveries_are_those_of_now(client: httpx.Client) -> None:
    assert client.get("/api/v1/deliveries").json() == {
        "waiting": 1,
        "oldest_waiting_seconds": 4.5,
        "sent": {"ops": 12},
        "failed": {"ops": {"rate_limited": 2, "timeout": 1}},
        "given_up": {},
    }
