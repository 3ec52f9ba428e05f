"""Every error of the API is a problem document (RFC 9457), also those that the frameworks raise themselves."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import ipaddress
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
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wattwatch.watcher.diagnosis.report.page import REPORT_SECURITY_POLICY
from wattwatch.watcher.engine.latest import LatestSnapshot
from wattwatch.watcher.engine.snapshot import JobView
from wattwatch.watcher.web.events import MAX_STREAMS, EventHub, StreamEvent, TooManyStreams, read_queue
from wattwatch.watcher.web.metrics import CONTENT_TYPE, MetricsExporter, WatcherMetrics
from wattwatch.watcher.web.page import PageRenderer
from wattwatch.watcher.web.schemas import (
    AlertAnswer,
    DiagnosisAnswer,
    GpuAnswer,
    JobAnswer,
    NodeAnswer,
    TimelineAnswer,
    alert_answer,
    diagnosis_answer,
    gpu_answer,
    job_answer,
    no_diagnosis_reason,
    node_answer,
    timeline_answer,
)

MEDIA_TYPE: Final = "application/problem+json"


class ProblemDetails(BaseModel):
    """What went wrong (RFC 9457). `type` is about:blank: the status says which kind it is."""

    type: str = Field("about:blank", description="always about:blank")
    title: str = Field(description="the status in words")
    status: int = Field(description="the HTTP status code")
    detail: str = Field(description="what is wrong with this request, and what to do")
    instance: str = Field(description="the path that was asked for")


def problem_response(status: int, detail: str, instance: str, headers: Mapping[str, str] | None = None) -> Response:
    document = ProblemDetails(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=instance)
    return JSONResponse(document.model_dump(), status, headers=headers, media_type=MEDIA_TYPE)


def documented_problems(*statuses: int) -> dict[int | str, dict[str, object]]:
    """For `responses=` of a route: these statuses answer with a problem document."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {MEDIA_TYPE: {"schema": schema}}}
        for status in statuses
    }


def add_problem_handlers(app: FastAPI) -> None:
    """Let each kind of error answer with a problem document. An unexpected one tells nothing of the inside."""

    async def refused(request: Request, error: HTTPException) -> Response:
        detail = error.detail
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"there is nothing at {request.url.path}; /docs lists what there is"
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{request.method} is not answered at {request.url.path}; /docs lists what is"
        return problem_response(error.status_code, detail, request.url.path, error.headers)

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return problem_response(HTTPStatus.UNPROCESSABLE_ENTITY, wrong, request.url.path)

    async def unexpected(request: Request, error: Exception) -> Response:
        detail = f"an error inside the watcher ({type(error).__name__}); its log has the rest: please report it"
        return problem_response(HTTPStatus.INTERNAL_SERVER_ERROR, detail, request.url.path)

    app.exception_handler(HTTPException)(refused)
    app.exception_handler(RequestValidationError)(invalid)
    app.exception_handler(Exception)(unexpected)


# Who may read, and what a browser may do with what it reads. Plain ASGI, so that no answer slips past it.

OPEN_PATHS: Final = frozenset({"/-/healthy", "/-/ready"})
CHALLENGE: Final = 'Bearer realm="wattwatch", Basic realm="wattwatch", charset="UTF-8"'
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


class AuthMiddleware:
    """Asks for the token where there is one, and puts the security headers on every answer."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if self._token is not None and scope["path"] not in OPEN_PATHS:
            given = token_from_header(Headers(scope=scope).get("authorization", ""))
            if given is None or not hmac.compare_digest(given, self._token):
                detail = (
                    "this watcher asks for its token: send it as `Authorization: Bearer ...`, "
                    "or as the password of any user name where a browser asks"
                )
                refusal = problem_response(401, detail, scope["path"], {"www-authenticate": CHALLENGE})
                await refusal(scope, receive, send_guarded)
                return
        await self._app(scope, receive, send_guarded)


def token_from_header(authorization: str) -> bytes | None:
    """The token of a header: Bearer, or the password of Basic, which is what a browser can send for the page."""
    scheme, _, credentials = authorization.partition(" ")
    credentials = credentials.strip()
    if scheme.lower() == "bearer":
        return credentials.encode("latin-1")  # the bytes as they came: that is how ASGI reads headers
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(credentials, validate=True).partition(b":")[2]
        except (binascii.Error, ValueError):
            return None
    return None


def is_loopback(host: str) -> bool:
    """True where only this machine can connect. A name that is not localhost may be anything: False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# The HTTP face: page, read API, events, metrics, health. Reads snapshots; changes nothing anywhere.

STALE_INTERVALS: Final = 5.0  # boards of a job not judged for longer are history, not readings
STALE_LEAST_SECONDS: Final = 5.0
ASSETS: Final = {
    "page.css": "text/css",
    "page.js": "text/javascript",
    "favicon.svg": "image/svg+xml",
}
RETRY_MILLISECONDS: Final = 2000

bearer = HTTPBearer(auto_error=False, description="the token of `token_file`; only where one is configured")


def create_app(latest: LatestSnapshot, own: WatcherMetrics, hub: EventHub, token: str | None = None) -> FastAPI:
    """The whole application over one source of snapshots. `token`: asked for everywhere but at the health endpoints."""
    stale_after = max(STALE_LEAST_SECONDS, STALE_INTERVALS * latest.interval_seconds)
    latest.listen(hub.offer)
    latest.listen(own.note)
    own.event_streams.set_function(lambda: hub.streams)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hub.open(asyncio.get_running_loop())
        yield
        hub.stop()

    app = FastAPI(
        title="wattwatch",
        version=version("wattwatch"),
        description="What the watcher knows of its jobs, nodes and alerts. Everything here only reads.",
        lifespan=lifespan,
        docs_url=None,  # the framework's own pages load scripts from the internet
        redoc_url=None,
        openapi_url="/openapi.json",
        dependencies=[Security(bearer)],
    )
    app.add_middleware(AuthMiddleware, token=token)
    add_problem_handlers(app)
    add_diagnosis_routes(app, latest)
    add_job_routes(app, latest)
    add_fleet_routes(app, latest)
    add_event_route(app, latest, hub)
    add_health_routes(app, latest)
    add_metrics_route(app, MetricsExporter(latest, own, stale_after))
    add_pages(app, PageRenderer(latest))
    document_problem_responses(app)
    return app


def find_job(latest: LatestSnapshot, job: str) -> JobView:
    view = latest.snapshot.jobs.get(job)
    if view is None:
        known = ", ".join(sorted(latest.snapshot.jobs)) or "none yet"
        raise HTTPException(404, f"no job is named {job!r}; known jobs: {known}")
    return view


def add_diagnosis_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    """Before the other routes of jobs: a job's name may hold slashes, and the longer paths come first."""

    @app.get(
        "/api/v1/jobs/{job:path}/diagnosis/report",
        tags=["diagnosis"],
        responses=documented_problems(404),
        response_class=HTMLResponse,
    )
    def read_report(job: str) -> HTMLResponse:
        """The page of the job's latest diagnosed incident, complete in itself: to read, print and pass on."""
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
        """Who holds the job up, where and why, from the latest capture that told. 404 says why there is none."""
        view = latest.snapshot.diagnoses.get(job)
        if view is None or view.diagnosis is None:
            find_job(latest, job)
            raise HTTPException(404, no_diagnosis_reason(job, view))
        return diagnosis_answer(view, view.diagnosis)


def add_job_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    def find(job: str) -> JobView:
        return find_job(latest, job)

    @app.get("/api/v1/jobs", tags=["jobs"])
    def list_jobs() -> list[JobAnswer]:
        """All jobs, each with its state, why, progress, nodes and findings."""
        return [
            job_answer(view, latest.age_seconds, latest.wall_seconds, latest.recordings.get(view.name))
            for view in latest.snapshot.jobs.values()
        ]

    # A job's name may hold slashes; the longer paths come first.
    @app.get("/api/v1/jobs/{job:path}/gpus", tags=["jobs"], responses=documented_problems(404))
    def list_gpus(job: str) -> list[GpuAnswer]:
        """Every board of the job as it was last read, rank by rank."""
        return [gpu_answer(board) for board in find(job).sample.gpus]

    @app.get("/api/v1/jobs/{job:path}/timeline", tags=["jobs"], responses=documented_problems(404, 422))
    def read_timeline(
        job: str,
        since: Annotated[datetime | None, Query(description="only moments after this one (RFC 3339)")] = None,
    ) -> list[TimelineAnswer]:
        """The job's history, oldest first: every sample of the last ten minutes, then one a minute for a day."""
        start = float("-inf") if since is None else since.timestamp()
        return [timeline_answer(point) for point in find(job).timeline if point.wall_seconds > start]

    @app.get("/api/v1/jobs/{job:path}", tags=["jobs"], responses=documented_problems(404))
    def read_job(job: str) -> JobAnswer:
        """One job."""
        return job_answer(find(job), latest.age_seconds, latest.wall_seconds, latest.recordings.get(job))


def add_fleet_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    @app.get("/api/v1/nodes", tags=["nodes"])
    def list_nodes() -> list[NodeAnswer]:
        """All nodes: how each is seen, and how old what it said last is."""
        return [node_answer(view, latest.age_seconds) for view in latest.snapshot.nodes.values()]

    @app.get("/api/v1/alerts", tags=["alerts"])
    def list_alerts() -> list[AlertAnswer]:
        """Alert episodes: the open ones (`closed` is null), and those that closed lately."""
        return [alert_answer(episode) for episode in latest.snapshot.episodes]


def add_event_route(app: FastAPI, latest: LatestSnapshot, hub: EventHub) -> None:
    async def subscription() -> AsyncIterator[asyncio.Queue[StreamEvent | None]]:
        try:
            with hub.subscribe() as queue:
                yield queue
        except TooManyStreams:
            raise HTTPException(503, f"{MAX_STREAMS} event streams are open already; close one") from None

    @app.get(
        "/api/v1/events",
        tags=["events"],
        response_class=EventSourceResponse,
        responses=documented_problems(503),
    )
    async def follow_events(queue: Any = Depends(subscription)) -> AsyncIterator[ServerSentEvent]:
        """Server-sent events: `state` (a job changed), `alert_opened`, `alert_closed`, `tick` (there is news to
        read) and `resync` (events were lost: read anew). A comment every 15 s keeps proxies from closing it."""
        hello = {"tick": latest.snapshot.tick}
        yield ServerSentEvent(event="resync", data=hello, id=str(latest.snapshot.tick), retry=RETRY_MILLISECONDS)
        async for event in read_queue(queue):
            yield ServerSentEvent(event=event.name, data=event.data, id=event.id)


def add_health_routes(app: FastAPI, latest: LatestSnapshot) -> None:
    @app.get("/-/healthy", tags=["health"], response_class=PlainTextResponse)
    async def healthy() -> PlainTextResponse:
        """The process answers. Needs no token."""
        return PlainTextResponse("healthy\n")

    @app.get("/-/ready", tags=["health"], response_class=PlainTextResponse, responses=documented_problems(503))
    async def ready() -> PlainTextResponse:
        """The engine came round lately: what is served is true now. Needs no token."""
        if not latest.fresh:
            raise HTTPException(
                503,
                f"the engine last came round {latest.age_seconds:.0f} s ago, "
                f"more than {latest.fresh_limit_seconds:.0f} s: what is served is old",
            )
        return PlainTextResponse(f"ready: tick {latest.snapshot.tick}\n")


def add_metrics_route(app: FastAPI, body: MetricsExporter) -> None:
    # Not `async`: writing 100,000 series takes a moment, which belongs on a worker thread.
    @app.get("/metrics", tags=["metrics"], response_class=PlainTextResponse)
    def metrics(request: Request) -> Response:
        """All metrics in the Prometheus text format. The list of them is in watcher/serve/README.md."""
        packed = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"content-encoding": "gzip"} if packed else {}
        return Response(body.render(packed), media_type=CONTENT_TYPE, headers={**headers, "vary": "accept-encoding"})


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
    content = (resources.files("wattwatch.watcher.web") / "assets" / name).read_bytes()

    async def show() -> Response:
        return Response(content, media_type=media_type)

    app.get(f"/assets/{name}", include_in_schema=False)(show)


def document_problem_responses(app: FastAPI) -> None:
    """Every operation of the OpenAPI document may answer with a problem; the framework's own 422 is never sent."""
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
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}},
            }
