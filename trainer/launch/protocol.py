"""What launcher and node program say to each other: one order in, words out, a line of JSON each.

The order comes on standard input, which stays open: its end means "end what you run" (the lifeline).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Final

from wattwatch.trainer.dataclass_json import InvalidDataError, parse_dataclass

PROTOCOL_VERSION: Final = 1
REPORT_VARIABLE: Final = "WATTWATCH_REPORT_FD"  # a descriptor; what the program writes there comes back when it ends


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The same for all nodes that hear it: each runs its own command."""

    v: int
    nodes: tuple[str, ...]
    index: int | None  # of the node; None: it finds itself by its name in Slurm
    commands: tuple[tuple[str, ...], ...]  # by index
    environment: dict[str, str] = field(default_factory=dict)
    log: str | None = None  # file for the output, {node} in it; None: the output comes back as lines
    ports: tuple[int, ...] = ()  # where the first node will listen: it looks whether somebody else does


class MessageKind(StrEnum):
    STARTED = "started"
    LINE = "line"  # of the program's output
    ENDED = "ended"
    TROUBLE = "trouble"  # the program could not be started
    REFUSED = "refused"  # it was not started: the text says why


@dataclass(frozen=True, slots=True)
class NodeMessage:
    wattwatch_node: int  # the version; what else stands on standard output has no such field
    index: int
    kind: str
    text: str = ""  # of a line or a trouble; of an end: the program's report
    code: int | None = None  # of an end: the exit code, or minus the signal


def encode_request(order: StartRequest) -> bytes:
    return json.dumps(asdict(order)).encode() + b"\n"


def parse_request(line: bytes) -> StartRequest:
    """Raises NotPlain for what is no order, or one of another version."""
    try:
        order = parse_dataclass(StartRequest, json.loads(line))
    except ValueError as error:
        raise InvalidDataError(f"no order: {error}") from None
    if order.v != PROTOCOL_VERSION:
        raise InvalidDataError(
            f"an order of version {order.v}, this node has {PROTOCOL_VERSION}: install one version of wattwatch"
        )
    return order


def encode_message(word: NodeMessage) -> bytes:
    return json.dumps(asdict(word)).encode() + b"\n"


def parse_message(line: bytes) -> NodeMessage | None:
    """None for what is no word: a login script's greeting, a library's warning."""
    try:
        data = json.loads(line)
        word = parse_dataclass(NodeMessage, data)
    except (ValueError, RecursionError):
        return None
    return word if word.wattwatch_node == PROTOCOL_VERSION else None
