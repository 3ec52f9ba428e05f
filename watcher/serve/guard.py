"""Who may read, and what a browser may do with what it reads. Plain ASGI, so that no answer slips past it."""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from watcher.serve.problems import problem

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


class Guard:
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
            given = token_of(Headers(scope=scope).get("authorization", ""))
            if given is None or not hmac.compare_digest(given, self._token):
                detail = (
                    "this watcher asks for its token: send it as `Authorization: Bearer ...`, "
                    "or as the password of any user name where a browser asks"
                )
                refusal = problem(401, detail, scope["path"], {"www-authenticate": CHALLENGE})
                await refusal(scope, receive, send_guarded)
                return
        await self._app(scope, receive, send_guarded)


def token_of(authorization: str) -> bytes | None:
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
