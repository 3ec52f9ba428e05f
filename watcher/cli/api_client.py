"""Ask a running watcher's API: for commands. What goes wrong there ends the command with one sentence and code 3."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import httpx

from wattwatch.watcher.config.settings import read_secret

DEFAULT_URL: Final = "http://127.0.0.1:9560"
UNKNOWN: Final = 3


def open_api_client(url: str, token_file: Path | None) -> httpx.Client:
    """A client with the token of the file, where one is given."""
    headers: dict[bytes, bytes] = {}
    if token_file is not None:
        try:
            headers[b"Authorization"] = f"Bearer {read_secret(token_file)}".encode()
        except (OSError, ValueError) as error:
            exit_unknown(f"{token_file}: no token could be read: {error}")
    try:
        return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=10.0, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        exit_unknown(f"{url}: not an address: {error}")


def get_json(client: httpx.Client, path: str) -> Any:
    """The JSON answer."""
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        exit_unknown(
            f"no watcher answers at {client.base_url}: {error or type(error).__name__}; is `wattwatch serve` running?"
        )
    if response.status_code != httpx.codes.OK:
        try:
            detail = response.json().get("detail") or response.json().get("title")
        except (ValueError, AttributeError):
            detail = response.text[:200]
        exit_unknown(f"{client.base_url}{path}: {response.status_code} {detail}")
    try:
        return response.json()
    except ValueError:
        exit_unknown(f"{client.base_url}{path}: not a wattwatch API (the answer is not JSON)")


def exit_unknown(message: str) -> NoReturn:
    click.echo(message, err=True)
    sys.exit(UNKNOWN)
