"""One attempt: the gate on all nodes, then the ranks on all nodes. What runs is ended on every way out."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from trainer.launch.endings import REFUSED, Failure
from trainer.launch.follow import FollowedFile, ForPeople
from trainer.launch.interruptions import Interruptions
from trainer.launch.links import END_SECONDS, Links, Lost, NotReached
from trainer.launch.places import Connection, Places
from trainer.launch.protocol import VERSION, Kind, Order, Word
from trainer.launch.traces import node_log, read_failures
from trainer.refusal import Refusal
from trainer.run_directory import RunDirectory

LOOK_SECONDS: Final = 0.2
# After a node's ranks have failed: time for the others to notice by themselves, to dump what their collectives did
# (a record that is gone once somebody has ended them, marin#7796), and to say how they ended.
GRACE_SECONDS: Final = 20.0

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all attempts of a launch share."""

    places: Places
    connections: tuple[Connection, ...]
    run: RunDirectory
    interruptions: Interruptions
    say: Say  # a line to the user
    grace_seconds: float = GRACE_SECONDS

    def links(
        self,
        commands: tuple[tuple[str, ...], ...],
        environment: Mapping[str, str],
        log: str | None = None,
        ports: tuple[int, ...] = (),
    ) -> Links:
        """Raises Refusal where ssh or srun is not there."""
        order = Order(VERSION, self.places.nodes, None, commands, dict(environment), log, ports)
        try:
            return Links(self.connections, order)
        except NotReached as error:
            raise Refusal(f"nothing is started: {error}") from None


@dataclass(frozen=True, slots=True)
class GateEnd:
    gate_id: str | None  # of a gate that is open
    why: str = ""  # it is not
    interrupted: bool = False
    may_pass: bool = False  # a node that does not answer, a port that is taken: another time they may be well


@dataclass(slots=True)
class RanksEnd:
    failures: list[Failure] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    codes: dict[int, int | None] = field(default_factory=dict)  # by node, of torchrun, in the order of their ends
    interrupted: bool = False
    asked: bool = False  # by the launcher's stop file: the ranks are to save and end


def pass_gate(here: Surroundings, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]) -> GateEnd:
    """All gate processes to their end. Rank 0's lines are shown; the others' where rank 0's does not tell."""
    before = gate_record(here.run).get("gate_id")
    codes: dict[int, int | None] = {}
    others: list[str] = []
    lost: list[Lost] = []
    refused = ""
    with contextlib.closing(here.links(commands, environment, ports=here.places.ports)) as links:
        while links.waiting and not lost and not refused and not here.interruptions.count:
            for told in links.hear(LOOK_SECONDS):
                if isinstance(told, Lost):
                    lost.append(told)
                elif told.kind == Kind.REFUSED:
                    refused = told.text
                elif told.kind == Kind.LINE and told.index == 0:
                    here.say(told.text)
                elif told.kind == Kind.LINE:
                    others.append(f"{here.places.nodes[told.index]}: {told.text}")
                elif told.kind == Kind.ENDED:
                    codes[told.index] = told.code
    if here.interruptions.count:
        return GateEnd(None, "interrupted at the gate; nothing was started", interrupted=True)
    if refused:
        return GateEnd(None, f"{refused}; nothing was started", may_pass=True)
    if lost:
        where = here.places.nodes[lost[0].index]
        return GateEnd(None, f"{where} cannot be reached: {lost[0].why}; nothing was started", may_pass=True)
    broken = [here.places.nodes[index] for index, code in sorted(codes.items()) if code not in (0, 1, REFUSED)]
    if broken or (REFUSED in codes.values() and codes.get(0) != REFUSED):
        for line in others:
            here.say(line)
    if broken:
        return GateEnd(None, f"the gate itself broke on {', '.join(broken)}; nothing was started")
    if REFUSED in codes.values():
        return GateEnd(None, "the gate refused the job; nothing was started")
    gate_id = gate_record(here.run).get("gate_id")
    if not gate_id or gate_id == before:
        return GateEnd(
            None, f"{here.run.gate_json} is not the gate's that ran now: this host must see the nodes' {here.run.path}"
        )
    return GateEnd(str(gate_id))


def gate_record(run: RunDirectory) -> dict[str, Any]:
    """Nothing where there is none, or none that can be read."""
    try:
        data = json.loads(run.gate_json.read_bytes())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def run_ranks(
    here: Surroundings, attempt: int, commands: tuple[tuple[str, ...], ...], environment: Mapping[str, str]
) -> RanksEnd:
    """torchrun on all nodes to its end, rank 0's log on the way."""
    path = here.run.rank_log(attempt, 0)
    log, people = FollowedFile(path), ForPeople()
    output = str(node_log(here.run, attempt, "{node}"))
    with contextlib.closing(here.links(commands, environment, output)) as links:
        watch = _Watch(here, links)
        while links.waiting and not watch.over():
            for told in links.hear(LOOK_SECONDS):
                watch.heard(told)
            for line in filter(people.shown, log.lines()):
                here.say(line)
            watch.look()
        watch.end.lost += [Lost(index, "it does not answer") for index in sorted(links.waiting)]
    for line in filter(people.shown, log.lines(end=True)):
        here.say(line)
    if people.hidden:
        here.say(f"launch: rank 0's traceback, {people.hidden:,} lines, is in {path}")
    if watch.end.asked:  # it has served, and would stop the next launch
        here.run.stop_file.unlink(missing_ok=True)
    return watch.end


class _Watch:
    """What is heard of the ranks, and when they are told to end."""

    def __init__(self, here: Surroundings, links: Links) -> None:
        self._here, self._links = here, links
        self.end = RanksEnd()
        self._end_at: float | None = None  # lifelines are cut then
        self._over_at: float | None = None  # nobody is waited for beyond

    def heard(self, told: Word | Lost) -> None:
        if isinstance(told, Lost):
            self.end.lost.append(told)
            self._here.say(f"launch: {self._here.places.nodes[told.index]} is lost: {told.why}")
            self._end_soon()
        elif told.kind == Kind.LINE:  # the node program's own: the ranks' go to files
            self._here.say(f"launch: {self._here.places.nodes[told.index]}: {told.text}")
        elif told.kind == Kind.ENDED:
            self.end.codes[told.index] = told.code
            self.end.failures += read_failures(told.text)
            if told.code != 0:
                self._end_soon()

    def _end_soon(self) -> None:
        self._end_at = self._end_at or time.monotonic() + self._here.grace_seconds

    def look(self) -> None:
        """At the user's wishes and the clock."""
        count, now = self._here.interruptions.count, time.monotonic()
        if count and not self.end.asked:
            self.end.asked = True
            self._here.run.stop_file.touch()
            self._here.say("launch: asked the ranks to save and end; once more ends them now, unsaved")
        if count > 1 and not self.end.interrupted:
            self.end.interrupted = True
            self._end_at = now
            self._here.say("launch: ending the ranks now")
        if self._end_at is not None and now >= self._end_at and self._over_at is None:
            self._links.end()
            self._over_at = now + END_SECONDS

    def over(self) -> bool:
        return self._over_at is not None and time.monotonic() >= self._over_at
