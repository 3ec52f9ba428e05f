"""One attempt to deliver one message over HTTP, and a look whether a receiver can be reached at all.

The URL is the secret. It is read from its file at each attempt (so it can be changed under a running watcher) and
appears in no log, error or database: errors here are our own words, never a library's.
"""

from __future__ import annotations

import logging
import re
import socket
import ssl
import urllib.request
from typing import Final

import httpx

from collectors.clock import Clock
from watcher.config import ReceiverSection, read_secret
from watcher.store import Delivery
from watcher.tell.answers import Answer, Failure, TryAgain, read_status
from watcher.tell.slack import is_about_layout, plain_payload, read_slack_answer

# httpx logs every request with its URL at INFO, httpcore at DEBUG: a Slack URL in a log is a leaked credential.
for name in ("httpx", "httpcore"):
    logging.getLogger(name).setLevel(logging.WARNING)

TIMEOUT: Final = httpx.Timeout(connect=5.0, read=10.0, write=5.0, pool=5.0)
REACH_SECONDS: Final = 5.0
ANSWER_BYTES_MOST: Final = 4096
KEEPALIVE_SECONDS: Final = 30.0
HOST: Final = re.compile(rb"[A-Za-z0-9._:-]+")  # a name (IDNA-encoded) or an address; httpx takes "[" for one


class NoUrl(Exception):
    """The receiver's URL cannot be had. Says which file, never what is in it."""


def open_client() -> httpx.Client:
    """A lane's client: TLS verified, redirects not followed, HTTPS_PROXY and SSL_CERT_FILE honoured."""
    return httpx.Client(
        timeout=TIMEOUT,
        follow_redirects=False,
        limits=httpx.Limits(keepalive_expiry=KEEPALIVE_SECONDS),
        headers={"User-Agent": "wattwatch", "Content-Type": "application/json"},
    )


def post(client: httpx.Client, receiver: ReceiverSection, delivery: Delivery, clock: Clock) -> Answer:
    """Never raises. Slack gets one more attempt in plain text where it refuses the layout."""
    try:
        url = url_of(receiver)
    except NoUrl as problem:
        return TryAgain(Failure.NO_URL, str(problem))
    try:
        status, headers, body = exchange(client, url, delivery.key, delivery.payload)
        if receiver.type == "slack" and is_about_layout(status, body):
            status, headers, body = exchange(client, url, delivery.key, plain_payload(delivery.payload))
    except httpx.TimeoutException:
        return TryAgain(Failure.TIMEOUT, "no answer in time")
    except httpx.ConnectError as error:
        if is_about_tls(error):
            return TryAgain(
                Failure.TLS, "the TLS handshake failed: certificate not trusted, expired or of another host"
            )
        return TryAgain(Failure.UNREACHABLE, "no connection")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
        return TryAgain(Failure.CUT, f"the exchange broke off ({type(error).__name__})")
    if receiver.type == "slack":
        return read_slack_answer(status, headers, body, clock.wall())
    return read_status(status, headers, clock.wall())


def exchange(client: httpx.Client, url: httpx.URL, key: str, payload: bytes) -> tuple[int, httpx.Headers, str]:
    """Post and read the beginning of the answer; a receiver cannot make us read for ever."""
    with client.stream("POST", url, content=payload, headers={"Idempotency-Key": key}) as response:
        body = b""
        for chunk in response.iter_bytes():
            body += chunk
            if len(body) >= ANSWER_BYTES_MOST:
                break
        return response.status_code, response.headers, body[:ANSWER_BYTES_MOST].decode("utf-8", "replace")


def url_of(receiver: ReceiverSection) -> httpx.URL:
    try:
        text = read_secret(receiver.url_file)
    except OSError as error:
        raise NoUrl(f"url_file {receiver.url_file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NoUrl(f"url_file {receiver.url_file} is not text") from None
    except ValueError as error:
        raise NoUrl(f"url_file {error}") from None
    try:
        url = httpx.URL(text)
    except (httpx.InvalidURL, ValueError):
        url = None
    if url is None or url.scheme not in ("http", "https") or not HOST.fullmatch(url.raw_host):
        raise NoUrl(f"url_file {receiver.url_file} does not hold an http or https URL on its first line")
    return url


def is_about_tls(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return True
        error = error.__cause__ or error.__context__
    return False


def reach(receiver: ReceiverSection) -> str | None:
    """None if a connection to the receiver's host, with TLS where its URL says so, comes about; else one sentence.

    Nothing is sent: whether the secret in the URL is good shows with the first message only. Behind a proxy, the
    proxy is what is tried.
    """
    try:
        url = url_of(receiver)
    except NoUrl as problem:
        return f"receiver {receiver.name}: {problem}"
    host, port = url.host, url.port or (443 if url.scheme == "https" else 80)
    proxy = urllib.request.getproxies().get(url.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        address = httpx.URL(proxy if "://" in proxy else f"http://{proxy}")
        host, port = address.host, address.port or 80
    place = f"receiver {receiver.name}: {host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=REACH_SECONDS) as connection:
            if url.scheme == "https" and host == url.host:
                httpx.create_ssl_context().wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        return f"{place}: its certificate is not accepted: {error.verify_message}"
    except ssl.SSLError as error:
        return f"{place}: no TLS: {error.reason or 'the handshake failed'}"
    except TimeoutError:
        return f"{place}: no answer within {REACH_SECONDS:g} s"
    except socket.gaierror:
        return f"{place}: the name cannot be resolved"
    except (OSError, UnicodeError) as error:
        return f"{place}: {getattr(error, 'strerror', None) or 'no connection'}"
    return None
