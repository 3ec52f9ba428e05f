"""The protocol between the launcher and the node programs: one request, then messages, each a line of JSON.

The request arrives on standard input, which stays open: when it ends, the node program terminates what it runs. So the
death of the launcher, or of the connection, needs no message.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass

PROTOCOL_VERSION: Final = 1
# Number of a file descriptor; what the program writes there comes back in the ENDED message.
REPORT_VARIABLE: Final = "WATTWATCH_REPORT_FD"


@dataclass(frozen=True, slots=True)
class StartRequest:
    """What to run. All nodes of one transport receive the same request; each runs the command at its own index."""

    v: int
    nodes: tuple[str, ...]
    index: int | None  # of the node in `nodes`; None: the node finds itself by its Slurm name
    commands: tuple[tuple[str, ...], ...]  # by node index
    environment: dict[str, str] = field(default_factory=dict)
    log: str | None = None  # file for the output, with {node} for the node's name; None: the output comes back as lines
    ports: tuple[int, ...] = ()  # ports that the first node will listen on: it checks that they are free


class MessageKind(StrEnum):
    STARTED = "started"
    LINE = "line"  # of the program's output
    ENDED = "ended"
    TROUBLE = "trouble"  # the program could not be started
    REFUSED = "refused"  # the program was not started; the text says why


@dataclass(frozen=True, slots=True)
class NodeMessage:
    """A message from a node program."""

    wattwatch_node: int  # protocol version; also marks our lines among others on standard output
    index: int  # of the node; -1 if the node does not know it
    kind: str
    text: str = ""  # LINE, TROUBLE, REFUSED: the text; ENDED: the program's report
    code: int | None = None  # ENDED: the exit code, or minus the signal; None: it could not be killed


def encode_request(request: StartRequest) -> bytes:
    return json.dumps(asdict(request)).encode() + b"\n"


def parse_request(line: bytes) -> StartRequest:
    """Raises InvalidDataError for anything but a request of our version."""
    try:
        request = parse_dataclass(StartRequest, json.loads(line))
    except ValueError as error:
        raise InvalidDataError(f"the request from the launcher is not valid: {error}") from None
    if request.v != PROTOCOL_VERSION:
        raise InvalidDataError(
            f"the launcher's protocol version is {request.v}, but this node's is {PROTOCOL_VERSION}: install the same "
            "version of wattwatch on both"
        )
    return request


def encode_message(message: NodeMessage) -> bytes:
    return json.dumps(asdict(message)).encode() + b"\n"


def parse_message(line: bytes) -> NodeMessage | None:
    """None for a line that is not ours: a login script's greeting, a library's warning."""
    try:
        message = parse_dataclass(NodeMessage, json.loads(line))
    except (ValueError, RecursionError):
        return None
    return message if message.wattwatch_node == PROTOCOL_VERSION else None
