"""The HTTP application: page, read API, event stream, metrics, health. It only reads snapshots.

Every error is a problem document (RFC 9457), including those that the frameworks raise themselves. Authentication and
security headers are plain ASGI middleware, so that no response can bypass them.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import datetime
from http import HTTPStatus
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import Depends, FastAPI, Query, Request, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from fastapi.security import HTTPBearer
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wattwatch.watcher.common.formatting import describe_invalid_value
from wattwatch.watcher.diagnosis.report.page import REPORT_SECURITY_POLICY
from wattwatch.watcher.engine.snapshot import JobView, LatestSnapshot
from wattwatch.watcher.web.events import MAX_STREAMS, EventHub, StreamEvent, TooManyStreams, read_queue
from wattwatch.watcher.web.metrics import CONTENT_TYPE, MetricsExporter, WatcherMetrics
from wattwatch.watcher.web.page import PageRenderer
from wattwatch.watcher.web.schemas import (
    AlertAnswer,
    DeliveriesAnswer,
    DiagnosisAnswer,
    GpuAnswer,
    JobAnswer,
    NodeAnswer,
    TimelineAnswer,
    alert_answer,
    deliveries_answer,
    diagnosis_answer,
    gpu_answers,
    job_answer,
    no_diagnosis_reason,
    node_answer,
    timeline_answer,
)

PROBLEM_MEDIA_TYPE: Final = "application/problem+json"
UNAUTHENTICATED_PATHS: Final = frozenset({"/-/healthy", "/-/ready"})
CHALLENGE: Final = 'Bearer realm="wattwatch", Basic realm="wattwatch", charset="UTF-8"'
# No script, style or connection from elsewhere: the page shows text that came from log files of the nodes.
SECURITY_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
ASSETS: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "favicon.svg": "image/svg+xml",
}
# How long a browser waits before it reconnects to the event stream.
RETRY_MILLISECONDS: Final = 2000

bearer = HTTPBearer(auto_error=False, description="the token from `token_file`; needed only if a token is configured")


class ProblemDetails(BaseModel):
    """What went wrong (RFC 9457). `type` is always about:blank: the status says what kind of problem it is."""

    model_config = ConfigDict(title="Problem")  # its published name in /openapi.json

    type: str = Field("about:blank", description="always about:blank")
    title: str = Field(description="the status as text")
    status: int = Field(description="the HTTP status code")
    detail: str = Field(description="what is wrong with this request, and what to do")
    instance: str = Field(description="the requested path")


def create_app(latest: LatestSnapshot, metrics: WatcherMetrics, hub: EventHub, token: str | None = None) -> FastAPI:
    """The whole application over one source of snapshots. `token`: required everywhere except for the health checks."""
    # Both return at once: the engine's thread calls them.
    latest.listen(hub.offer)
    latest.listen(metrics.observe)
    metrics.event_streams.set_function(lambda: hub.streams)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hub.open(asyncio.get_running_loop())
        yield
        hub.stop()

    app = FastAPI(
        title="wattwatch",
        version=version("wattwatch"),
        description="This read-only API shows the state of jobs, nodes and alerts as the watcher sees it.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own documentation pages load scripts from the internet
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[Security(bearer)],
    )
    # Around all routes, so that unknown paths and invalid requests need the token as well.
    app.add_middleware(AuthMiddleware, token=token)
    add_problem_handlers(app)
    add_diagnosis_routes(app, latest)
    add_job_routes(app, latest)
    add_fleet_routes(app, latest)
    add_event_route(app, latest, hub)
    add_health_routes(app, latest)
    add_metrics_route(app, MetricsExporter(latest, metrics))
    add_pages(app, PageRenderer(latest))
    document_problem_responses(app)
    return app


def find_job(latest: LatestSnapshot, job: str) -> JobView:
    view = latest.snapshot.jobs.get(job)
    if view is None:
        known = ", ".join(sorted(latest.snapshot.jobs)) or "none yet"
        raise HTTPException(404, f"there is no job {job!r}; known jobs: {known}")
    return view


def add_diagnosis_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    """Added before the other routes of jobs: a job's name may contain slashes, so longer paths must match first."""

    @app.get(
        "/api/v1/jobs/{job:path}/diagnosis/report",
        tags=["diagnosis"],
        responses=documented_problems(404),
        response_class=HTMLResponse,
    )
    def read_report(job: str) -> HTMLResponse:
        """The report of the job's latest diagnosed incident: one self-contained HTML page to read, print and share."""
        view = latest.snapshot.diagnoses.get(job)
        if view is None or view.diagnosis is None:
            find_job(latest, job)
            raise HTTPException(404, no_diagnosis_reason(job, view))
        try:
            page = Path(view.report).read_bytes() if view.report else b""
        except OSError as error:
            raise HTTPException(404, f"the report cannot be read: {error.strerror or error}") from None
        if not page:
            raise HTTPException(404, "the report could not be written; the watcher's log says why")
        return HTMLResponse(
            page, headers={"content-security-policy": f"{REPORT_SECURITY_POLICY}; frame-ancestors 'none'"}
        )

    @app.get("/api/v1/jobs/{job:path}/diagnosis", tags=["diagnosis"], responses=documented_problems(404))
    def read_diagnosis(job: str) -> DiagnosisAnswer:
        """Which rank blocks the job, where and why, from the latest capture with a diagnosis. The answer is 404 if
        there is none; its field `detail` says why."""
        view = latest.snapshot.diagnoses.get(job)
        if view is None or view.diagnosis is None:
            find_job(latest, job)
            raise HTTPException(404, no_diagnosis_reason(job, view))
        return diagnosis_answer(view, view.diagnosis)


def add_job_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    def find(job: str) -> JobView:
        return find_job(latest, job)

    def answer(view: JobView) -> JobAnswer:
        age, limit = latest.job_age_seconds(view), latest.stale_limit_seconds
        return job_answer(view, age, latest.recordings.get(view.name), stale_limit_seconds=limit)

    @app.get("/api/v1/jobs", tags=["jobs"])
    def list_jobs() -> list[JobAnswer]:
        """All jobs, each with its state and the reason for it, progress, nodes and findings."""
        return [answer(view) for view in latest.snapshot.jobs.values()]

    # A job's name may contain slashes, so longer paths must match first.
    @app.get("/api/v1/jobs/{job:path}/gpus", tags=["jobs"], responses=documented_problems(404))
    def list_gpus(job: str) -> list[GpuAnswer]:
        """Every GPU of the job as last read, rank by rank."""
        view = find(job)
        return gpu_answers(view, latest.job_age_seconds(view))

    @app.get("/api/v1/jobs/{job:path}/timeline", tags=["jobs"], responses=documented_problems(404, 422))
    def read_timeline(
        job: str,
        since: Annotated[datetime | None, Query(description="only points after this time (RFC 3339)")] = None,
    ) -> list[TimelineAnswer]:
        """The job's history, oldest first: every sample of the last ten minutes, then one a minute for a day."""
        start = float("-inf") if since is None else since.timestamp()
        return [timeline_answer(point) for point in find(job).timeline if point.wall_seconds > start]

    @app.get("/api/v1/jobs/{job:path}", tags=["jobs"], responses=documented_problems(404))
    def read_job(job: str) -> JobAnswer:
        """One job."""
        return answer(find(job))


def add_fleet_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    @app.get("/api/v1/nodes", tags=["nodes"])
    def list_nodes() -> list[NodeAnswer]:
        """All nodes: whether each can be read, and how old its last data is."""
        return [node_answer(view, latest.snapshot_age_seconds) for view in latest.snapshot.nodes.values()]

    @app.get("/api/v1/alerts", tags=["alerts"])
    def list_alerts() -> list[AlertAnswer]:
        """Alert episodes: the open ones (`closed` is null) and the recently closed ones."""
        return [alert_answer(episode) for episode in latest.snapshot.episodes]

    @app.get("/api/v1/deliveries", tags=["alerts"])
    def read_deliveries() -> DeliveriesAnswer:
        """Whether alert messages reach their receivers."""
        return deliveries_answer(latest.deliveries())


def add_event_route(app: FastAPI, latest: LatestSnapshot, hub: EventHub) -> None:
    async def subscription() -> AsyncIterator[asyncio.Queue[StreamEvent | None]]:
        try:
            with hub.subscribe() as queue:
                yield queue
        except TooManyStreams:
            raise HTTPException(503, f"{MAX_STREAMS} event streams are already open; close one first") from None

    @app.get(
        "/api/v1/events",
        tags=["events"],
        response_class=EventSourceResponse,
        responses=documented_problems(503),
    )
    async def follow_events(queue: Any = Depends(subscription)) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: `state` (a job changed its state), `alert_opened`, `alert_closed`, `tick` (new data is
        available) and `resync` (events were lost: read everything again). A comment every 15 s keeps proxies from
        closing the stream."""
        # A client that reconnects has missed an unknown number of events.
        first = {"tick": latest.snapshot.tick}
        yield ServerSentEvent(event="resync", data=first, id=str(latest.snapshot.tick), retry=RETRY_MILLISECONDS)
        async for event in read_queue(queue):
            yield ServerSentEvent(event=event.name, data=event.data, id=event.id)


def add_health_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    @app.get("/-/healthy", tags=["health"], response_class=PlainTextResponse)
    async def healthy() -> PlainTextResponse:
        """The process is running. Needs no token."""
        return PlainTextResponse("healthy\n")

    @app.get("/-/ready", tags=["health"], response_class=PlainTextResponse, responses=documented_problems(503))
    async def ready() -> PlainTextResponse:
        """200 if the engine ticked recently, so that all answers are current; otherwise 503. Needs no token."""
        if not latest.is_fresh:
            raise HTTPException(
                503,
                f"the watcher's data was last updated {latest.age_seconds:.0f} s ago, which is more than the limit of "
                f"{latest.fresh_limit_seconds:.0f} s. All answers are out of date",
            )
        return PlainTextResponse(f"ready: tick {latest.snapshot.tick}\n")


def add_metrics_route(app: FastAPI, exporter: MetricsExporter) -> None:
    # Not `async`: writing 100,000 series takes a moment, so it must run on a worker thread, not on the event loop.
    @app.get("/metrics", tags=["metrics"], response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """All metrics in the Prometheus text format. They are listed in watcher/web/README.md."""
        compressed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"content-encoding": "gzip"} if compressed else {}
        return Response(
            exporter.render(compressed), media_type=CONTENT_TYPE, headers={**headers, "vary": "accept-encoding"}
        )


def add_pages(app: FastAPI, page: PageRenderer) -> None:
    def add(path: str, render: Callable[[], str]) -> None:
        def show() -> HTMLResponse:
            return HTMLResponse(render())

        app.get(path, include_in_schema=False)(show)

    add("/", page.page)
    add("/live", page.live)
    add("/docs", lambda: page.docs(app.openapi()))
    for name, media_type in ASSETS.items():
        add_asset(app, name, media_type)


def add_asset(app: FastAPI, name: str, media_type: str) -> None:
    # Read once: an upgrade in place must not mix old pages with new scripts.
    content = (resources.files("wattwatch.watcher.web") / "assets" / name).read_bytes()

    async def show() -> Response:
        return Response(content, media_type=media_type)

    app.get(f"/assets/{name}", include_in_schema=False)(show)


def document_problem_responses(app: FastAPI) -> None:
    """Add the problem document to every operation, and remove FastAPI's own 422 document, which is never sent."""
    document = app.openapi()
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = ProblemDetails.model_json_schema()
    for path in document["paths"].values():
        for operation in path.values():
            content = operation["responses"].get("422", {}).get("content", {})
            if "application/json" in content:
                del operation["responses"]["422"]
            operation["responses"]["default"] = {
                "description": "any error",
                "content": {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }


def problem_response(status: int, detail: str, instance: str, headers: Mapping[str, str] | None = None) -> Response:
    document = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=instance)
    return JSONResponse(document.model_dump(), status, headers=headers, media_type=PROBLEM_MEDIA_TYPE)


def documented_problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """For `responses=` of a route: with these statuses it answers with a problem document."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {PROBLEM_MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def add_problem_handlers(app: FastAPI) -> None:
    """Make every kind of error a problem document. An unexpected one reveals nothing about the watcher's internals."""

    async def on_http_error(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"nothing exists at {request.url.path}; see /docs for all paths"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.url.path} does not accept {request.method}; see /docs for all paths"
        return problem_response(error.status_code, detail, request.url.path, error.headers)

    async def on_invalid_request(request: Request, error: RequestValidationError) -> Response:
        detail = "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {describe_invalid_value(item)}" for item in error.errors()
        )
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, detail, request.url.path)

    async def on_unexpected_error(request: Request, error: Exception) -> Response:
        detail = (
            f"internal error of the watcher ({type(error).__name__}). Please report it with the traceback from the log"
        )
        return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, detail, request.url.path)

    app.exception_handler(HTTPException)(on_http_error)
    app.exception_handler(RequestValidationError)(on_invalid_request)
    app.exception_handler(Exception)(on_unexpected_error)


class AuthMiddleware:
    """Requires the token if one is configured, and adds the security headers to every response."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._token is not None and scope["path"] not in UNAUTHENTICATED_PATHS:
            given = token_from_header(Headers(scope=scope).get("authorization", ""))
            # Constant time: a plain comparison would reveal how many leading bytes are right.
            if given is None or not hmac.compare_digest(given, self._token):
                detail = (
                    "a token is required: send it as `Authorization: Bearer ...`; in a browser, enter it as the "
                    "password, with any user name"
                )
                response = problem_response(401, detail, scope["path"], {"www-authenticate": CHALLENGE})
                await response(scope, receive, send_with_headers)
                return
        await self._app(scope, receive, send_with_headers)


def token_from_header(authorization: str) -> bytes | None:
    """The token in an Authorization header: Bearer, or the password of Basic, which is all that a browser can send."""
    scheme, _, credentials = authorization.partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials.encode("latin-1")  # ASGI decodes header bytes as Latin-1: this restores them
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None
