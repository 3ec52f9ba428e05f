"""Slack incoming webhooks: Block Kit layout, size limits, and Slack's own responses.

Slack documents limits per block (header 150 characters, section 3,000) and per message (50 blocks). In practice it also
rejects messages of more than about 13,200 characters in all (https://github.com/slackapi/bolt-js/issues/2509), which
hits exactly the long messages of a bad incident. Ours stay below 10,000 characters as sent. A success is HTTP 200 with
the body "ok". Not yet tried against hooks.slack.com itself, only against these documented limits.
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
    RateLimit,
    Receiver,
    RetryLater,
    classify_status,
    parse_retry_after,
)
from wattwatch.watcher.detection.model import Severity, Suspect

MAX_CHARACTERS: Final = 10_000
MAX_HEADER_CHARACTERS: Final = 150
MAX_SECTION_CHARACTERS: Final = 3000
# With more suspects than this, a table is easier to read than a sentence.
MAX_SUSPECTS_IN_A_SENTENCE: Final = 3
SEVERITY_EMOJI: Final = {
    Severity.INFO: ":large_blue_circle:",
    Severity.WARNING: ":large_orange_circle:",
    Severity.CRITICAL: ":red_circle:",
}
RESOLVED_EMOJI: Final = ":white_check_mark:"
# HTTP 400 with one of these errors means that Slack rejects the layout; plain text may still be accepted.
LAYOUT_ERRORS: Final = ("invalid_blocks", "invalid_attachments", "msg_blocks_too_long", "invalid_payload")
PERMANENT_ERRORS: Final = ("invalid_token", "no_service", "no_team", "team_disabled", "channel_is_archived")


class SlackReceiver(Receiver):
    """One Slack channel behind an incoming webhook."""

    # Slack allows one message a second with short bursts, and may disable a webhook that sends more.
    rate_limit = RateLimit(messages_per_second=1.0, burst=4.0)

    def render(self, message: AlertMessage, receiver_name: str) -> bytes:
        return slack_payload(message)

    def fallback_payload(self, status: int, body: str, payload: bytes) -> bytes | None:
        return plain_text_payload(payload) if is_layout_error(status, body) else None

    def classify_response(
        self, status: int, headers: Mapping[str, str], body: str, wall_seconds: float
    ) -> DeliveryOutcome:
        return classify_slack_response(status, headers, body, wall_seconds)


RECEIVER: Final = SlackReceiver()


def slack_payload(message: AlertMessage) -> bytes:
    """JSON of at most MAX_CHARACTERS characters. The field `text` alone is a complete message too."""
    share = 1.0
    while True:
        payload = orjson.dumps(
            {
                "text": escape_mrkdwn(message.text, round(MAX_SECTION_CHARACTERS * share)),
                "blocks": list(message_blocks(message, share)),
            }
        )
        # JSON escaping doubles quotes and backslashes, so measure the result and shorten the texts until it fits.
        if len(payload.decode("utf-8")) <= MAX_CHARACTERS:
            return payload
        share *= 0.8


def plain_text_payload(payload: bytes) -> bytes:
    """The same message without its blocks."""
    return orjson.dumps({"text": orjson.loads(payload)["text"]})


def message_blocks(message: AlertMessage, share: float) -> Iterable[Mapping[str, Any]]:
    """Block Kit blocks; each text is cut to `share` of its usual length."""
    emoji = RESOLVED_EMOJI if message.is_closed else SEVERITY_EMOJI[message.severity]
    title = escape_mrkdwn(message.title, MAX_HEADER_CHARACTERS - len(emoji) - 1)
    yield {"type": "header", "text": {"type": "plain_text", "text": f"{emoji} {title}", "emoji": True}}
    yield section_block(escape_mrkdwn(message.summary, round(1000 * share)) or "-")
    if message.diagnosis:
        yield section_block("*Diagnosis:* " + escape_mrkdwn(message.diagnosis, round(900 * share)))
    if len(message.suspects) > MAX_SUSPECTS_IN_A_SENTENCE:
        yield section_block(suspect_table(message.suspects, round(900 * share)))
    elif message.suspects:
        yield section_block("*Suspect:* " + escape_mrkdwn(join_suspects(message.suspects), round(900 * share)))
    if message.evidence:
        yield section_block(fit_lines((f"• {fact}" for fact in message.evidence), round(2200 * share)))
    if message.advice and not message.is_closed:
        yield section_block("*What to do:* " + escape_mrkdwn(message.advice, round(900 * share)))
    facts = [message.cost, message.timing, message.reason, message.inhibited_sentence, message.link]
    context = escape_mrkdwn(" ".join(fact for fact in facts if fact), round(700 * share))
    yield {"type": "context", "elements": [{"type": "mrkdwn", "text": context or "-"}]}


def section_block(text: str) -> Mapping[str, Any]:
    return {"type": "section", "text": {"type": "mrkdwn", "text": text}}


def suspect_table(suspects: tuple[Suspect, ...], max_characters: int) -> str:
    """A table in a code block. It is cut between rows: a cut inside the fence would garble the rest of the message."""
    cells = [
        ("rank", "GPU", "node"),
        *((number_or_unknown(s.rank), number_or_unknown(s.gpu), s.node) for s in suspects),
    ]
    table = (f"{rank:>5} {gpu:>4} {node}".replace("`", "'") for rank, gpu, node in cells)
    return f"```{fit_lines(table, max_characters - 6)}```"


def number_or_unknown(number: int | None) -> str:
    return "?" if number is None else str(number)


def fit_lines(lines: Iterable[str], max_characters: int) -> str:
    """As many whole lines as fit, and how many were left out. One line may use at most a third of the space."""
    kept: list[str] = []
    space = max_characters - 25  # for "… and N more"
    left_out = 0
    for line in lines:
        escaped_line = "" if left_out else escape_mrkdwn(line.replace("\n", " "), max(20, max_characters // 3))
        if left_out or len(escaped_line) + 1 > space:
            left_out += 1
            continue
        kept.append(escaped_line)
        space -= len(escaped_line) + 1
    if left_out:
        kept.append(f"… and {left_out} more")
    return "\n".join(kept)


def escape_mrkdwn(text: str, max_characters: int) -> str:
    """Slack's three entities, no control characters, at most `max_characters`, never cut inside an entity.

    Without the escaping, a log line that contains "<!channel>" would page everyone in the channel.
    """
    entities = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
    result: list[str] = []
    space = max_characters
    for character in text:
        if ord(character) < 32 and character not in "\n\t":
            continue
        if 0xD800 <= ord(character) <= 0xDFFF:  # a lone surrogate: bytes of a log that were not UTF-8
            character = "\ufffd"
        piece = entities.get(character, character)
        space -= len(piece)
        result.append(piece)
        if space < 0:
            while result and space < 1:
                space += len(result.pop())
            return "".join(result) + "…"
    return "".join(result)


def classify_slack_response(status: int, headers: Mapping[str, str], body: str, wall_seconds: float) -> DeliveryOutcome:
    """Slack answers "ok", or one word that names the error."""
    error = body.strip()
    if status == 200 and error != "ok":
        # A proxy's login page, or a service that only looks like Slack: nobody has seen the message.
        return RetryLater(DeliveryFailure.UNEXPECTED_RESPONSE, 'HTTP 200, but the response is not Slack\'s "ok"')
    if status in (400, 403, 404, 410):
        for permanent in PERMANENT_ERRORS:
            if permanent in error:
                failure = DeliveryFailure.UNAUTHORIZED if permanent == "invalid_token" else DeliveryFailure.GONE
                return GiveUp(failure, f"Slack: {permanent}")
    if status == 429 and "retry-after" not in headers:
        # Some of Slack's throttling names the delay in the body only
        # (https://github.com/prometheus/alertmanager/issues/2111).
        delay = parse_retry_after(retry_after_in_body(error), wall_seconds)
        return RetryLater(DeliveryFailure.RATE_LIMITED, "HTTP 429", delay)
    return classify_status(status, headers, wall_seconds)


def retry_after_in_body(body: str) -> str | None:
    try:
        return str(orjson.loads(body)["retry_after"])
    except (ValueError, KeyError, TypeError):
        return None


def is_layout_error(status: int, body: str) -> bool:
    """Whether Slack rejected the blocks, so that the plain text is worth one attempt."""
    return status == 400 and any(error in body for error in LAYOUT_ERRORS)
