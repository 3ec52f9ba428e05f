"""Bytes as a tool, a shell, a logger or a person delivers them -> lines of plain text.

A person pastes from a terminal, a web page, a mail or a chat. Each adds something of its own: colors and cursor
movements, HTML entities and tags, spaces and bars of other alphabets, quotation marks. All of it is removed here, so
that each format is read in one place only. Nothing here knows what a GPU is.
"""

from __future__ import annotations

import html
import quopri
import re
from typing import Final

_BOMS: Final = ((b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"), (b"\xef\xbb\xbf", "utf-8"))

# Escape sequences of terminals, also as a pager or a logger shows them: "^[[1m", "\e[1m", "\x1b[1m", "\u001b[1m".
_ESCAPE: Final = r"(?:\x1b|\^\[|␛|\\(?:e|x1[bB]|033|u001[bB]))"
_CURSOR: Final = re.compile(rf"{_ESCAPE}\[(?P<count>\d*)(?:;\d*)*(?P<move>[A-HJSTfd])")  # to another place: a new line
_ESCAPES: Final = re.compile(
    rf"{_ESCAPE}\[[0-?]*[ -/]*[@-~]"  # CSI: colors, erasing, modes
    rf"|{_ESCAPE}\][^\x07\x1b]*(?:\x07|\x1b\\)"  # OSC: window titles
    rf"|\x1b[()][0-9A-Za-z]|\x1b[=>78cDEHMNOZ]|[\x0e\x0f]"  # character sets, single-letter sequences
)
_ESCAPE_MARKS: Final = ("\x1b", "^[[", "␛", "\\", "\x0e", "\x0f")

# HTML of a page or a mail. A document of `nvidia-smi -q -x` is not HTML: it keeps its tags.
_HTML: Final = re.compile(
    r"&(?:nbsp|amp|lt|gt|quot|apos|ensp|emsp|thinsp|vert|verbar|lowbar|hyphen|minus|percnt|colon|sol|plus|equals|period"
    r"|comma|boxv|boxh|lpar|rpar|lsqb|rsqb|num|excl|deg|#\d{1,7}|#[xX][0-9a-fA-F]{1,6});"
    r"|<br\s*/?>|</?(?:pre|code|p|div|span|samp|tt|font|blockquote|body|html)(?:\s[^<>]{0,300})?>",
    re.IGNORECASE,
)
_BREAKING_TAG: Final = re.compile(r"<br\s*/?>\n?|</(?:p|div|pre|blockquote)>|<(?:pre|p|div)(?:\s[^<>]{0,300})?>", re.I)
_OTHER_TAG: Final = re.compile(
    r"</?(?:code|span|samp|tt|font|b|i|em|strong|u|a|blockquote|body|html)(?:\s[^<>]{0,300})?>", re.I
)

_CHARACTERS: Final = str.maketrans(
    {
        **dict.fromkeys((chr(code) for code in (0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000)), " "),
        **dict.fromkeys("\u00ad\u200b\u200c\u200d\u200e\u200f\u202a\u202b\u202c\u2060\ufeff", None),  # no width
        **dict.fromkeys("│┃║╎╏┆┇┊┋▏▕❘❙¦｜︱ǀ∣", "|"),
        **dict.fromkeys("─━┄┅┈┉╌╍╴╶╸╺╼╾‐‑‒–—―−﹣－", "-"),
        **dict.fromkeys("═＝", "="),
        **dict.fromkeys("┌┍┎┏┐┑┒┓└┕┖┗┘┙┚┛├┝┞┟┠┡┢┣┤┥┦┧┨┩┪┫┬┭┮┯┰┱┲┳┴┵┶┷┸┹┺┻┼┽┾┿╀╁╂╃╄╅╆╇╈╉╊╋", "+"),
        **dict.fromkeys("╒╓╔╕╖╗╘╙╚╛╜╝╞╟╠╡╢╣╤╥╦╧╨╩╪╫╬╭╮╯╰＋", "+"),
        **dict.fromkeys("％﹪", "%"),
        **dict.fromkeys("／∕⁄", "/"),
        **dict.fromkeys("：﹕∶", ":"),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‘’‚‛′", "'"),
        "…": "...",
        "℃": "°C",
    }
)  # fmt: skip

_QUOTE: Final = re.compile(r"^(?:[ \t]{0,3}>)+[ ]?", re.MULTILINE)  # of mails and of Markdown
_ACTIONS_STAMP: Final = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{7}Z ", re.MULTILINE)  # logs of GitHub Actions
# What `docker compose logs` puts before each line of a service, and `kubectl logs --timestamps` before each of a pod.
_SERVICE: Final = re.compile(r"[A-Za-z][\w.\-]* +\| ?")
_COLLECTOR_STAMP: Final = re.compile(r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:Z|[+-]\d\d:\d\d) ", re.MULTILINE)
_TABLE_EDGE: Final = re.compile(r"[+|][-=]{10}")
_SOFT_BREAK: Final = re.compile(rb"=\r?\n")


def decode_lines(data: bytes) -> tuple[list[str], bool]:
    """The lines, and whether the last one is incomplete (no line end). Invalid bytes become U+FFFD.

    Handles UTF-8 and UTF-16 (PowerShell redirects, with and without byte-order mark), CRLF, escape sequences of
    terminals, HTML, quoted mail, and typographic characters. A killed logger leaves NUL padding, which ends a line.
    """
    if b"=3D" in data and _SOFT_BREAK.search(data):  # a mail as it was sent: quoted-printable
        data = quopri.decodestring(data)
    text = _decode(data)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    # Plain searches first: a log may have 500 MB.
    if any(mark in text for mark in _ESCAPE_MARKS):
        text = _ESCAPES.sub("", _CURSOR.sub(_moved, text))
    if ("&" in text or "<" in text) and "<nvidia_smi_log" not in text and _HTML.search(text):
        text = text_of_html(text)
    if not text.isascii():
        text = text.translate(_CHARACTERS)
    if ">" in text:
        text = _QUOTE.sub("", text)
    if "Z " in text:
        text = _ACTIONS_STAMP.sub("", text)
    text = _without_prefix(text)
    filled = text.rstrip("\0")
    cut = bool(filled) and not filled.endswith("\n")
    if "\0" in filled:
        filled = re.sub("\0+", "\n", filled)
    lines = filled.split("\n")
    return (lines if cut else lines[:-1]), cut


def _without_prefix(text: str) -> str:
    """Without the name of one service before every line, and without time stamps before the lines of a table, which has
    its own date. Names of several services tell hosts apart, and stamps of rows are their times: those stay."""
    beginning = text.lstrip()[:200]
    if service := _SERVICE.match(beginning):
        prefix = service[0].rstrip()
        lines = text.split("\n")
        if all(line.startswith(prefix) for line in lines if line.strip()):
            text = "\n".join(line[len(prefix) :].removeprefix(" ") for line in lines)
            beginning = text.lstrip()[:200]
    if _COLLECTOR_STAMP.match(beginning) and _TABLE_EDGE.search(text[:4000]):
        text = _COLLECTOR_STAMP.sub("", text)
    return text


def text_of_html(text: str) -> str:
    """Text without the tags of a page, its entities as characters; also of text that was escaped twice."""
    text = _OTHER_TAG.sub("", _BREAKING_TAG.sub("\n", text))
    for _ in range(2):
        text = html.unescape(text)
    return text


def _moved(match: re.Match[str]) -> str:
    """The cursor to the right in its line is space; to any other place, or a cleared screen, begins a new line."""
    if match["move"] == "C":
        return " " * min(int(match["count"] or 1), 200)
    return " " if match["move"] in "DG" else "\n"


def _decode(data: bytes) -> str:
    for bom, encoding in _BOMS:
        if data.startswith(bom):
            return _even_length(data[len(bom) :], encoding).decode(encoding, "replace")
    head = data[:4000]
    # ASCII text in UTF-16 has a NUL in every second byte; padding has them next to each other.
    odd, even = head[1::2].count(0), head[::2].count(0)
    if len(head) >= 8 and odd * 10 > len(head) * 4 and even * 10 < odd:
        return _even_length(data, "utf-16-le").decode("utf-16-le", "replace")
    if len(head) >= 8 and even * 10 > len(head) * 4 and odd * 10 < even:
        return _even_length(data, "utf-16-be").decode("utf-16-be", "replace")
    return data.decode("utf-8", "replace")


def _even_length(data: bytes, encoding: str) -> bytes:
    """Without half a UTF-16 character at the end, which a cut may leave."""
    return data[: len(data) // 2 * 2] if encoding.startswith("utf-16") else data
