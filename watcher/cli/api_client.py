"""Asks the API of a running watcher, for the commands. A failure ends the command with one sentence and exit code 3."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from wattwatch.watcher.cli.shared import exit_unknown
from wattwatch.watcher.config.settings import read_secret

TIMEOUT_SECONDS = 10.0


def open_api_client(url: str, token_file: Path | None) -> httpx.Client:
    """A client for the API at `url`, with the bearer token from the file if one is given."""
    headers: dict[bytes, bytes] = {}
    if token_file is not None:
        try:
            # As bytes: httpx would encode a str as ASCII, and a token may hold any character.
            headers[b"Authorization"] = f"Bearer {read_secret(token_file)}".encode()
        except (OSError, ValueError) as error:
            exit_unknown(f"{token_file}: cannot read the token: {error}")
    try:
        # Not through a proxy from the environment: the default address is loopback, which no proxy can reach.
        return httpx.Client(base_url=url.rstrip("/"), headers=headers, timeout=TIMEOUT_SECONDS, trust_env=False)
    except (httpx.InvalidURL, ValueError) as error:
        exit_unknown(f"{url}: not a valid address: {error}")


def get_json(client: httpx.Client, path: str, hint: str = "") -> Any:
    """The JSON answer to a GET request. `hint`: added to the error if no watcher answers."""
    try:
        response = client.get(path)
    except httpx.HTTPError as error:
        exit_unknown(
            f"no watcher answers at {client.base_url}: {error or type(error).__name__}; is `wattwatch serve` running?"
            f"{hint}"
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
        exit_unknown(f"{client.base_url}{path}: this is not a wattwatch API: the answer is not JSON")
