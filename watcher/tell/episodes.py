"""One alert from its opening to its closing, and the decision when to tell people. Pure: time is an argument.

An episode is one run of one finding (job, alert, scope): it gets a new id each time it opens. `decide` looks at what
was told last and what is true now, and names its reason; `advance` gives the episode after that decision.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from typing import Final

from watcher.judge.finding import AlertName, Finding, Severity
from watcher.judge.verdict import Suspect
from watcher.witness import Witness

# A condition is over when it was missing in this many looks and for this long: one odd sample closes nothing.
CLEAR_LOOKS: Final = 2
CLEAR_SECONDS: Final = 2.0
# What comes back again and again within AGAIN_SECONDS must be missing for longer before it counts as over: a rebooting
# node, a loss that is NaN at every third step. By how often it came back. What stops a job is seen to end, when steps
# advance, and each time is another stop: a minute is enough.
CLEAR_SECONDS_FLAPPING: Final = (CLEAR_SECONDS, 60.0, 600.0)
CLEAR_SECONDS_GRAVE: Final = (CLEAR_SECONDS, 60.0)
# What outlived its root cause this long is told on its own. A job needs a moment to move again once its node is back.
RELEASE_SECONDS: Final = 10.0
# Opened again within this time: the message says so.
AGAIN_SECONDS: Final = 600.0
# After a restart the detector starts from nothing. What it does not see yet may still be true: it is over when the
# opposite is seen (`is_refuted`). Where that takes a judgement over time, the detector gets twice the time that it
# needed before, within these bounds. What nothing was seen of for the longest of them is closed as not known.
SETTLE_SECONDS_LEAST: Final = 30.0
SETTLE_SECONDS_MOST: Final = 1800.0

# What stops a job. It is never kept quiet without a word: whoever was told of its cause is told that it follows.
GRAVE: Final = frozenset({AlertName.JOB_HUNG, AlertName.JOB_CRASHED, AlertName.CHECKPOINT_STALLED})

# The kernel says it once, and the board may answer all the same.
XID_SECONDS: Final = 900.0

RANK: Final = {Severity.INFO: 0, Severity.WARNING: 1, Severity.CRITICAL: 2}


class Notice(StrEnum):
    """What a message announces."""

    OPENED = "opened"
    RAISED = "raised"
    DIAGNOSED = "diagnosed"
    REMINDER = "reminder"
    CLOSED = "closed"


class Reason(Enum):
    """Why something was told, or was not. The value is a sentence for people."""

    OPENED = "It is new."
    OPENED_AGAIN = "It is back: it was over for less than ten minutes."
    OUTLIVED_CAUSE = "Its cause is over and it remains."
    CONFIRMED = "It was a suspicion before; now it is confirmed."
    GRAVER = "It is more severe than when it was last told."
    FOLLOWED = "Something critical follows from it since it was last told."
    CONCERNS_MORE = "Something follows from it that concerns you."
    DIAGNOSED = "It is known now who holds the job up."
    LOOKED_INTO = "It was looked into, and nothing proves yet who holds the job up."
    REMINDER_DUE = "It is still open."
    CLEARED = "The condition is no longer there."
    REPLACED = "It did not get better: another alert of the job has taken its place."
    NOT_KNOWN = "It is not known any more: since the watcher has restarted, nothing was seen that says it is over."
    JOB_ENDED = "The job has completed."
    NOT_WATCHED = "The job is no longer in the configuration; nothing is known of its state."
    UNCHANGED = "It was told and nothing changed."
    SUPPRESSED = "A root cause that is told explains it."
    CAUSE_JUST_OVER = "Its cause has just gone; it may go with it."
    CLEAR_PENDING = "It was not seen in this look, which is too short a time to call it over."
    SETTLING = "The watcher has restarted and has not yet seen that it is over."
    CLEARED_UNTOLD = "It is over and nobody had been told of it."
    NEVER_TRUE = "There is nothing and there was nothing."
    ENDED_BEFORE = "It concerns a job that has completed."


@dataclass(frozen=True, slots=True)
class Diagnosed:
    """What was found out about an open episode, as people are told it."""

    words: str  # one sentence: who, where, in what
    conclusive: bool

    def __str__(self) -> str:
        return f"{self.words.rstrip('. ')} ({'conclusive' if self.conclusive else 'not proved'})"


@dataclass(frozen=True, slots=True)
class Told:
    """What the receivers know. None of it is taken back: an episode's severity only rises."""

    notices: int  # messages so far; numbers them
    seconds: float  # when the last one was enqueued
    severity: Severity
    confirmed: bool
    receivers: tuple[str, ...]  # who was told, and hears of the end
    suspects: tuple[Suspect, ...]  # as in the last firing message: the closing one carries the same labels
    followers: tuple[str, ...] = ()  # the grave ones that were named in any message
    diagnosis: Diagnosed | None = None  # as in the last message
    diagnosed: bool = False  # a message of its own has told one: there is no second


@dataclass(frozen=True, slots=True)
class Episode:
    """Times in seconds of the clock that `decide` is given, unless they say wall."""

    id: str
    finding: Finding  # as it was last seen
    began_seconds: float  # when the condition began
    opened_wall_seconds: float
    detection_seconds: float  # from the beginning of the condition to the opening
    counted_seconds: float  # until when the cost is counted
    gpu_seconds_lost: float = 0.0
    joules_lost: float = 0.0  # only of looks in which it was seen: less than the seconds tell, never more
    severity: Severity = Severity.INFO  # the highest so far, of its own or of what follows from it
    confirmed: bool = False
    suppressed_by: str | None = None
    released_seconds: float | None = None  # when its root cause went; None while there is one or never was
    absent_seconds: float | None = None  # since when it was not seen; None while it is seen
    absent_looks: int = 0
    settling: bool = False  # loaded after a restart and not seen since
    reopenings: int = 0  # how often in a row it came back within AGAIN_SECONDS
    followers: tuple[str, ...] = ()  # what it keeps quiet, in words
    diagnosis: Diagnosed | None = None  # the newest
    told: Told | None = None
    closed_wall_seconds: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.finding.key

    def shifted(self, seconds: float, now: float = float("inf")) -> Episode:
        """The same on another clock. No time may lie after `now`: wall clocks are set back sometimes."""

        def shift(value: float) -> float:
            return min(value + seconds, now)

        def shift_or_none(value: float | None) -> float | None:
            return None if value is None else shift(value)

        return replace(
            self,
            began_seconds=shift(self.began_seconds),
            counted_seconds=shift(self.counted_seconds),
            released_seconds=shift_or_none(self.released_seconds),
            absent_seconds=shift_or_none(self.absent_seconds),
            finding=replace(self.finding, since_seconds=shift(self.finding.since_seconds)),
            told=None if self.told is None else replace(self.told, seconds=shift(self.told.seconds)),
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """When the same key closed last, told, and how often it had come back by then."""

    seconds: float
    reopenings: int


@dataclass(frozen=True, slots=True)
class Look:
    """What one evaluation says of one key. Only for jobs that were judged: no news is not good news."""

    finding: Finding | None  # None: judged, and not there
    now: float
    wall: float
    cause: str | None = None  # the root cause that explains it, in words
    followers: tuple[Finding, ...] = ()  # what it explains: these lend it their severity
    job_ended: bool = False
    ending: Ending | None = None  # of the last episode of the same key
    witness: Witness | None = None  # what is positively seen of the job
    successors: tuple[Finding, ...] = ()  # where it is not there: confirmed findings that have taken its place
    diagnosis: Diagnosed | None = None  # of the open episode, where one has come
    newly_concerned: tuple[str, ...] = ()  # receivers not told yet, to whom its consequences would have been told


@dataclass(frozen=True, slots=True)
class Decision:
    reason: Reason
    notice: Notice | None = None
    closes: bool = False


def own_severity(finding: Finding) -> Severity:
    """A suspicion is a warning at most, whatever it would be if it were confirmed."""
    if not finding.confirmed and RANK[finding.severity] > RANK[Severity.WARNING]:
        return Severity.WARNING
    return finding.severity


def severity_of(finding: Finding, followers: tuple[Finding, ...] = ()) -> Severity:
    """Its own, or the gravest of what it keeps quiet: a critical consequence is never hidden behind a warning."""
    return max((own_severity(each) for each in (finding, *followers)), key=RANK.__getitem__)


def grave_news(told: Told | None, look: Look) -> tuple[Finding, ...]:
    """What is critical, follows from an episode, and was said in no message of it yet."""
    named = () if told is None else told.followers
    source = look.finding
    # A silent node is critical when its job stands, and says so itself.
    says_stop = (
        source is not None and source.alert is AlertName.NODE_UNREACHABLE and own_severity(source) is Severity.CRITICAL
    )
    return tuple(
        each
        for each in look.followers
        if each.alert in GRAVE
        and own_severity(each) is Severity.CRITICAL
        and name_of(each) not in named
        and not (says_stop and each.alert is not AlertName.JOB_CRASHED)
    )


def is_news(diagnosis: Diagnosed | None, episode: Episode, finding: Finding) -> bool:
    """Whether a diagnosis is worth a message of its own. Of a suspicion only a proof is: it may be gone in a moment."""
    if diagnosis is None or episode.told is None or episode.told.diagnosed or diagnosis == episode.told.diagnosis:
        return False
    return diagnosis.conclusive or finding.confirmed


def is_again(look: Look) -> bool:
    """The same thing closed a short while ago."""
    return look.ending is not None and look.now - look.ending.seconds < AGAIN_SECONDS


def clear_seconds(episode: Episode) -> float:
    """How long it must be missing before it is over."""
    steady = episode.finding.alert in GRAVE or episode.finding.alert is AlertName.JOB_COMPLETED
    ladder = CLEAR_SECONDS_GRAVE if steady else CLEAR_SECONDS_FLAPPING
    return ladder[min(episode.reopenings, len(ladder) - 1)]


def is_refuted(episode: Episode, look: Look, missing_seconds: float) -> bool:
    """Whether the opposite of what an earlier process of the watcher has found is seen now."""
    alert, node = episode.finding.alert, episode.finding.scope.partition("/")[0]
    watched_long = missing_seconds >= settle_seconds(episode)
    if not episode.finding.job:
        return watched_long  # the watcher's own: it knows itself
    witness = look.witness
    if witness is None:
        return False
    if alert in GRAVE or alert is AlertName.JOB_COMPLETED:
        return witness.advancing
    if alert in (AlertName.NODE_UNREACHABLE, AlertName.PROBE_BLIND):
        return node in witness.nodes_ok
    if alert is AlertName.GPU_FAULT:
        by_kernel = any(fact.startswith("Xid ") for fact in episode.finding.evidence)
        return node in witness.nodes_ok and (not by_kernel or look.now - episode.began_seconds >= XID_SECONDS)
    # Slow, starving, hot, overdue: the detector would say so again of a job that runs and that it has watched.
    return watched_long and witness.advancing and (not node or node in witness.nodes_ok)


def settle_seconds(episode: Episode) -> float:
    """How long a restarted watcher must have watched before it may call this episode over."""
    return min(max(SETTLE_SECONDS_LEAST, 2 * episode.detection_seconds), SETTLE_SECONDS_MOST)


def decide(episode: Episode | None, look: Look, reminder_seconds: float | None = None) -> Decision:
    """Tell, and why; or do not tell, and why not. `episode` is the open one of this key, if there is one."""
    if look.finding is None:
        return decide_absent(episode, look)
    if look.job_ended and look.finding.alert is not AlertName.JOB_COMPLETED:
        # The end of the job ends its troubles: a released node that no longer answers is nobody's page.
        if episode is None:
            return Decision(Reason.ENDED_BEFORE)
        return closing(episode, Reason.JOB_ENDED)
    if episode is None:
        # Explained by something that is told: open it for the page and the API, and keep quiet.
        if look.cause is not None:
            return Decision(Reason.SUPPRESSED)
        # The same thing closed a short while ago. People are told, and told that it comes and goes.
        if is_again(look):
            return Decision(Reason.OPENED_AGAIN, Notice.OPENED)
        return Decision(Reason.OPENED, Notice.OPENED)
    if look.cause is not None:
        # Told before its cause was known, or never told: either way the cause speaks for it now.
        return Decision(Reason.SUPPRESSED)
    if episode.told is None:
        # Its cause went a moment ago. A hang needs a step to be over: wait before it becomes a message of its own.
        released = look.now if episode.released_seconds is None else episode.released_seconds
        if look.now - released < RELEASE_SECONDS:
            return Decision(Reason.CAUSE_JUST_OVER)
        return Decision(Reason.OUTLIVED_CAUSE, Notice.OPENED)
    if RANK[severity_of(look.finding, look.followers)] > RANK[episode.told.severity]:
        # Graver than what people know: confirmed by progress, or something critical now follows from it.
        if look.finding.confirmed and not episode.told.confirmed:
            return Decision(Reason.CONFIRMED, Notice.RAISED)
        return Decision(Reason.GRAVER, Notice.RAISED)
    if look.finding.confirmed and not episode.told.confirmed:
        # Confirmed at the same severity: people should know that it is no suspicion any more.
        return Decision(Reason.CONFIRMED, Notice.RAISED)
    if grave_news(episode.told, look):
        # As severe as before, and still news: the job has stopped, and nobody else will say so.
        return Decision(Reason.FOLLOWED, Notice.RAISED)
    if look.newly_concerned:
        # A consequence is kept quiet whose receivers have not heard of its cause: they alone are told now.
        return Decision(Reason.CONCERNS_MORE, Notice.RAISED)
    if is_news(look.diagnosis, episode, look.finding):
        # Who it is: what whoever was paged would find out next. One message of it, however often it is looked into.
        proved = look.diagnosis is not None and look.diagnosis.conclusive
        return Decision(Reason.DIAGNOSED if proved else Reason.LOOKED_INTO, Notice.DIAGNOSED)
    if reminder_seconds is not None and look.now - episode.told.seconds >= reminder_seconds:
        return Decision(Reason.REMINDER_DUE, Notice.REMINDER)
    # True, told, unchanged. Milder or unconfirmed again counts as unchanged: nothing is taken back before the end.
    return Decision(Reason.UNCHANGED)


def decide_absent(episode: Episode | None, look: Look) -> Decision:
    """The job was judged and the finding is not there."""
    if episode is None:
        return Decision(Reason.NEVER_TRUE)
    if look.job_ended and episode.finding.alert is not AlertName.JOB_COMPLETED:
        return closing(episode, Reason.JOB_ENDED)
    since = look.now if episode.absent_seconds is None else episode.absent_seconds
    # After a restart, and nothing seen that ends it. The detector may need long to see it again, or may never.
    if episode.settling and not look.successors and not is_refuted(episode, look, look.now - since):
        # What a completed job has reached stays true until it runs again.
        if look.now - since < SETTLE_SECONDS_MOST or episode.finding.alert is AlertName.JOB_COMPLETED:
            return Decision(Reason.SETTLING)
        return closing(episode, Reason.NOT_KNOWN)
    # One look without it, or looks too close together: a flicker would close it and open the next one.
    if episode.absent_looks + 1 < CLEAR_LOOKS or look.now - since < clear_seconds(episode):
        return Decision(Reason.CLEAR_PENDING)
    return closing(episode, Reason.REPLACED if look.successors else Reason.CLEARED)


def closing(episode: Episode, reason: Reason) -> Decision:
    """Who was told of the opening is told of the end; who was not hears nothing."""
    if episode.told is None:
        return Decision(Reason.CLEARED_UNTOLD, closes=True)
    return Decision(reason, Notice.CLOSED, closes=True)


def opened(identifier: str, look: Look, finding: Finding) -> Episode:
    """A new episode of this finding; the cost counts from when its condition began."""
    began = min(finding.since_seconds, look.now)
    return Episode(
        id=identifier,
        finding=finding,
        began_seconds=began,
        opened_wall_seconds=look.wall,
        detection_seconds=look.now - began,
        counted_seconds=began,
        reopenings=look.ending.reopenings + 1 if look.ending is not None and is_again(look) else 0,
    )


def advance(episode: Episode, look: Look, decision: Decision, receivers: tuple[str, ...] = ()) -> Episode:
    """The episode after the look and the decision; `receivers` are those that this notice goes to."""
    after = seen(episode, look, look.finding) if look.finding is not None else missed(episode, look)
    after = replace(after, diagnosis=look.diagnosis or episode.diagnosis)
    if decision.notice is not None:
        before = episode.told
        firing = decision.notice is not Notice.CLOSED
        after = replace(
            after,
            told=Told(
                notices=1 if before is None else before.notices + 1,
                seconds=look.now,
                severity=after.severity if firing or before is None else before.severity,
                confirmed=after.confirmed if firing or before is None else before.confirmed,
                receivers=tuple(sorted({*receivers, *(() if before is None else before.receivers)})),
                suspects=after.finding.suspects if firing or before is None else before.suspects,
                followers=(
                    *(() if before is None else before.followers),
                    *(name_of(each) for each in grave_news(before, look)),
                ),
                diagnosis=after.diagnosis,
                diagnosed=decision.notice is Notice.DIAGNOSED or (before is not None and before.diagnosed),
            ),
        )
    if decision.closes:
        after = replace(after, closed_wall_seconds=look.wall)
    return after


def seen(episode: Episode, look: Look, finding: Finding) -> Episode:
    """Still true: its cost goes on. A gap in which the job was not judged counts, as it is true on both sides of it."""
    severity = severity_of(finding, look.followers)
    released = None
    if look.cause is None and (episode.suppressed_by is not None or episode.released_seconds is not None):
        released = look.now if episode.released_seconds is None else episode.released_seconds
    return replace(
        episode,
        finding=finding,
        gpu_seconds_lost=episode.gpu_seconds_lost + finding.gpus_idle * max(0.0, look.now - episode.counted_seconds),
        joules_lost=episode.joules_lost + finding.idle_joules,
        counted_seconds=max(look.now, episode.counted_seconds),
        severity=max(severity, episode.severity, key=RANK.__getitem__),
        confirmed=episode.confirmed or finding.confirmed,
        suppressed_by=look.cause,
        released_seconds=released,
        absent_seconds=None,
        absent_looks=0,
        settling=False,
        followers=tuple(name_of(follower) for follower in look.followers),
    )


def missed(episode: Episode, look: Look) -> Episode:
    """Not there: that costs nothing, unless it is only that a restarted watcher has not seen it again yet."""
    return replace(
        episode,
        counted_seconds=episode.counted_seconds if episode.settling else max(look.now, episode.counted_seconds),
        absent_seconds=look.now if episode.absent_seconds is None else episode.absent_seconds,
        absent_looks=episode.absent_looks + 1,
    )


def name_of(finding: Finding) -> str:
    """ "NodeUnreachable node-02": how one finding is called where another one mentions it."""
    return f"{finding.alert.value} {finding.scope}".rstrip()
