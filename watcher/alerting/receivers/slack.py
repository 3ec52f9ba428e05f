"""Slack's incoming webhook: layout and answers.

Limits as documented by Slack (header 150, section 3000, 50 blocks), and as met in the field: about 13,200 characters
over all blocks are refused (slackapi/bolt-js#2509), and the message lost that way was the worst page of its incident.
Ours stay under 10,000 as sent. Success is HTTP 200 with the body "ok". Never tried against hooks.slack.com itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from wattwatch.watcher.alerting.message import AlertMessage, join_suspects
from wattwatch.watcher.alerting.receivers.base import (
    DeliveryFailure,
    DeliveryOutcome,
    GiveUp,
    RetryLater,
    classify_status,
    parse_retry_after,
)
from wattwatch.watcher.detection.model import Severity, Suspect

MAX_CHARACTERS: Final = 10_000
MAX_HEADER_CHARACTERS: Final = 150
MAX_SECTION_CHARACTERS: Final = 3000
# Beyond this many suspects a sentence is harder to read than a table.
MAX_SUSPECTS_IN_A_SENTENCE: Final = 3
SEVERITY_EMOJI: Final = {
    Severity.INFO: ":large_blue_circle:",
    Severity.WARNING: ":large_orange_circle:",
    Severity.CRITICAL: ":red_circle:",
}
RESOLVED_EMOJI: Final = ":white_check_mark:"
# 400 with one of these: Slack does not like the layout; the words alone may still pass.
LAYOUT_ERRORS: Final = ("invalid_blocks", "invalid_attachments", "msg_blocks_too_long", "invalid_payload")
PERMANENT_ERRORS: Final = ("invalid_token", "no_service", "no_team", "team_disabled", "channel_is_archived")


def slack_payload(message: AlertMessage) -> bytes:
    """JSON of at most CHARACTERS_MOST characters; `text` alone is a whole message too."""
    share = 1.0
    while True:
        payload = orjson.dumps(
            {"text": escape_mrkdwn(message.text, round(3000 * share)), "blocks": list(message_blocks(message, share))}
        )
        # JSON doubles quotes and backslashes: measure what is sent, and cut the text further where it must be.
        if len(payload.decode("utf-8")) <= MAX_CHARACTERS:
            return payload
        share *= 0.8


def plain_text_payload(payload: bytes) -> bytes:
    """The same message without layout."""
    return orjson.dumps({"text": orjson.loads(payload)["text"]})


def message_blocks(message: AlertMessage, share: float) -> Iterable[Mapping[str, Any]]:
    mark = RESOLVED_EMOJI if message.is_over else SEVERITY_EMOJI[message.severity]
    title = escape_mrkdwn(message.title, MAX_HEADER_CHARACTERS - len(mark) - 1)
    yield {"type": "header", "text": {"type": "plain_text", "text": f"{mark} {title}", "emoji": True}}
    yield section_block(escape_mrkdwn(message.summary, round(1000 * share)) or "-")
    if message.diagnosis:
        yield section_block("*Diagnosis:* " + escape_mrkdwn(message.diagnosis, round(900 * share)))
    if len(message.suspects) > MAX_SUSPECTS_IN_A_SENTENCE:
        yield section_block(suspect_table(message.suspects, round(900 * share)))
    elif message.suspects:
        yield section_block("*Suspect:* " + escape_mrkdwn(join_suspects(message.suspects), round(900 * share)))
    if message.evidence:
        yield section_block(fit_lines((f"• {fact}" for fact in message.evidence), round(2200 * share)))
    if message.advice and not message.is_over:
        yield section_block("*What to do:* " + escape_mrkdwn(message.advice, round(900 * share)))
    facts = [message.cost, message.timing, message.reason]
    if message.followers:
        facts.append("Follows from it and is not told on its own: " + ", ".join(message.followers))
    if message.link:
        facts.append(message.link)
    context = escape_mrkdwn(" ".join(fact for fact in facts if fact), round(700 * share))
    yield {"type": "context", "elements": [{"type": "mrkdwn", "text": context or "-"}]}


def section_block(text: str) -> Mapping[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def suspect_table(suspects: tuple[Suspect, ...], most: int) -> str:
    """In a code block, cut between rows, never inside the fence."""
    cells = [
        ("rank", "GPU", "node"),
        *((number_or_unknown(s.rank), number_or_unknown(s.gpu), s.node) for s in suspects),
    ]
    table = (f"{rank:>5} {gpu:>4} {node}".replace("`", "'") for rank, gpu, node in cells)
    return f"```{fit_lines(table, most - 6)}```"


def number_or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def fit_lines(lines: Iterable[str], most: int) -> str:
    """As many whole lines as fit, and how many did not. A single line may use a third of the room."""
    kept: list[str] = []
    room = most - 25
    left_out = 0
    for line in lines:
        shown_line = "" if left_out else escape_mrkdwn(line.replace("\n", " "), max(20, most // 3))
        if left_out or len(shown_line) + 1 > room:
            left_out += 1
            continue
        kept.append(shown_line)
        room -= len(shown_line) + 1
    if left_out:
        kept.append(f"… and {left_out} more")
    return "\n".join(kept)


def escape_mrkdwn(text: str, most: int) -> str:
    """Slack's three entities, no control characters, at most `most` characters, never cut inside an entity.

    Without this a log line holding "<!channel>" would page everybody.
    """
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    result: list[str] = []
    room = most
    for character in text:
        if ord(character) < 32 and character not in "\n\t":
            continue
        if 0xD800 <= ord(character) <= 0xDFFF:
            character = "\ufffd"
        piece = entities.get(character, character)
        room -= len(piece)
        result.append(piece)
        if room < 0:
            while result and room < 1:
                room += len(result.pop())
            return "".join(result) + "…"
    return "".join(result)


def classify_slack_response(status: int, headers: Mapping[str, str], body: str, wall_seconds: float) -> DeliveryOutcome:
    """Slack says "ok", or one word of why not."""
    word = body.strip()
    if status == 200 and word != "ok":
        # A proxy's login page, or a service that only looks like Slack: nobody has read the message.
        return RetryLater(DeliveryFailure.UNEXPECTED_ANSWER, 'HTTP 200 without Slack\'s "ok"')
    if status in (400, 403, 404, 410):
        for error in PERMANENT_ERRORS:
            if error in word:
                return GiveUp(
                    DeliveryFailure.UNAUTHORISED if error == "invalid_token" else DeliveryFailure.GONE,
                    f"Slack: {error}",
                )
    if status == 429 and "retry-after" not in headers:
        # Some of Slack's throttling says it in the body only (alertmanager#2111).
        return RetryLater(
            DeliveryFailure.RATE_LIMITED, "HTTP 429", parse_retry_after(retry_after_in_body(word), wall_seconds)
        )
    return classify_status(status, headers, wall_seconds)


def retry_after_in_body(body: str) -> str | None:
    try:
        return str(orjson.loads(body)["retry_after"])
    except (ValueError, KeyError, TypeError):
        return None


def is_layout_error(status: int, body: str) -> bool:
    """Slack refused the blocks: the plain text is worth one attempt."""
    return status == 400 and any(error in body for error in LAYOUT_ERRORS)
