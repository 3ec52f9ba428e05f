"""Every error of the API is a problem document (RFC 9457), also those that the frameworks raise themselves."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

MEDIA_TYPE: Final = "application/problem+json"


class Problem(BaseModel):
    """What went wrong (RFC 9457). `type` is about:blank: the status says which kind it is."""

    type: str = Field("about:blank", description="always about:blank")
    title: str = Field(description="the status in words")
    status: int = Field(description="the HTTP status code")
    detail: str = Field(description="what is wrong with this request, and what to do")
    instance: str = Field(description="the path that was asked for")


def problem(status: int, detail: str, instance: str, headers: Mapping[str, str] | None = None) -> Response:
    document = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=instance)
    return JSONResponse(document.model_dump(), status, headers=headers, media_type=MEDIA_TYPE)


def documented(*statuses: int) -> dict[int | str, dict[str, object]]:
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
        return problem(error.status_code, detail, request.url.path, error.headers)

    async def invalid(request: Request, error: RequestValidationError) -> Response:
        wrong = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        return problem(HTTPStatus.UNPROCESSABLE_ENTITY, wrong, request.url.path)

    async def unexpected(request: Request, error: Exception) -> Response:
        detail = f"an error inside the watcher ({type(error).__name__}); its log has the rest: please report it"
        return problem(HTTPStatus.INTERNAL_SERVER_ERROR, detail, request.url.path)

    app.exception_handler(HTTPException)(refused)
    app.exception_handler(RequestValidationError)(invalid)
    app.exception_handler(Exception)(unexpected)
