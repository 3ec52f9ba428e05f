"""Would a hung job give its evidence away? Notes beside the check of a node: nothing that they say need be so.

Looked at: worker sockets and whose they are, py-spy, processes with a flight recorder, and whether sshd lets us through
to NCCL's RAS. Nothing is sent to any of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import paramiko

from collectors.ssh.channels import NodeChannels

PREFIX: Final = "capture "
RECORDER: Final = "'^TORCH_(FR|NCCL_TRACE)_BUFFER_SIZE=[1-9]'"


@dataclass(frozen=True, slots=True)
class CaptureLook:
    """What a capture of this job would ask on a node."""

    job: str
    run_directory: str | None
    ras_port: int


def capture_script(looks: Sequence[CaptureLook]) -> str:
    """POSIX shell, in the manner of `check.script`: its `say` is defined there."""
    if not looks:
        return ""
    lines = [
        f'say "{PREFIX}user" yes "$(id -u) $(id -un)"',
        f'say "{PREFIX}py-spy" yes "$(command -v py-spy)"',
        # Environments of other users cannot be read: then it is not known.
        f'say "{PREFIX}recorders" yes "$(grep -lzsE {RECORDER} /proc/[0-9]*/environ 2>/dev/null | wc -l)"',
    ]
    for number, look in enumerate(looks):
        if look.run_directory is None:
            continue
        path = shlex.quote(f"{look.run_directory}/worker")
        lines.append(
            f"if [ -d {path} ]; then if [ -r {path} ] && [ -x {path} ]; then open=yes; else open=no; fi; "
            f'say "{PREFIX}{number}" $open "$(stat -c %U {path}) '
            f"$(ls {path} 2>/dev/null | grep -c '^rank-[0-9]*[.]sock$')\"; "
            f'else say "{PREFIX}{number}" absent ""; fi'
        )
    return "\n".join(lines) + "\n"


def capture_notes(answer: str, looks: Sequence[CaptureLook], ras: dict[int, str]) -> tuple[tuple[str, str], ...]:
    """(job, sentence), from the script's answer; `ras`: by port."""
    rows = [row.split("\t") for row in answer.splitlines()]
    said = {name: (verdict, words.strip()) for name, verdict, words in (row for row in rows if len(row) == 3)}
    if f"{PREFIX}user" not in said:
        return ()
    user = said[f"{PREFIX}user"][1].partition(" ")[2]
    spy = "py-spy is there" if said.get(f"{PREFIX}py-spy", ("", ""))[1] else "no py-spy"
    found = []
    for number, look in enumerate(looks):
        sockets = _sockets(look, said.get(f"{PREFIX}{number}"), user)
        found.append((look.job, "; ".join((sockets, _recorders(said), spy, ras.get(look.ras_port, "")))))
    return tuple(found)


def _sockets(look: CaptureLook, told: tuple[str, str] | None, user: str) -> str:
    if look.run_directory is None or told is None:
        return "no run_directory, so no worker sockets: dumps that lie there, RAS and processes only"
    verdict, words = told
    if verdict == "absent":
        return f"no worker sockets in {look.run_directory}/worker yet: right before the job's first start"
    owner, _, number = words.partition(" ")
    if verdict == "no":
        return f"worker sockets are open to {owner} only, and we log in as {user}: log in as {owner}, or as root"
    return f"worker sockets: {number}, of {owner}" + ("" if owner == user else f", and we log in as {user}")


def _recorders(said: dict[str, tuple[str, str]]) -> str:
    number = said.get(f"{PREFIX}recorders", ("", ""))[1]
    if number in ("", "0"):
        return (
            "no process is seen with TORCH_FR_BUFFER_SIZE set (at the job's start; before torch 2.8: "
            "TORCH_NCCL_TRACE_BUFFER_SIZE)"
        )
    return f"flight recorder set in {number} process{'' if number == '1' else 'es'}"


def ras_words(transport: paramiko.Transport, port: int, timeout_seconds: float) -> str:
    """Whether a channel to RAS opens; it is closed at once."""
    place = f"NCCL RAS at 127.0.0.1:{port}"
    try:
        NodeChannels("", lambda: transport).connect(port, timeout_seconds).close()
    except ConnectionRefusedError:
        return f"{place}: we are let through, nobody listens: no job with NCCL runs now, or it has another port"
    except OSError as error:
        return f"{place}: {error}"
    return f"{place}: it listens, and we are let through"
