"""The witness of what ranks printed last: whoever failed by itself, and not for another's end. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from watcher.diagnose.collectives.operations import operation_words
from watcher.diagnose.diagnosis import Cause, DiagnosisVerdict
from watcher.diagnose.evidence import Evidence, LogFailure
from watcher.diagnose.flight.record import RankRecord
from watcher.diagnose.known_ranks import known_ranks
from watcher.diagnose.traces.failures import SIZES, kind_named
from watcher.diagnose.traces.stacks import frame_in_words
from watcher.diagnose.witnesses.witness import LOGS, Witness
from watcher.diagnose.words import ranks_in_words

FAILED_WEIGHT: Final = 0.85
SEVERAL_WEIGHT: Final = 0.6
ABORTED_WEIGHT: Final = 0.4  # of two whose sizes differ, either may be wrong
EARLIER_SECONDS: Final = 2.0  # between last words: what clocks of file servers and a long traceback may differ


def of_logs(evidence: Evidence) -> Witness | None:
    failed = {log.rank: log.failure for log in evidence.logs if log.failure is not None}
    if not failed:
        return None
    own = {rank: failure for rank, failure in failed.items() if not failure.follows}
    if not own:
        return Witness(LOGS, f"{ranks_in_words(failed)} lost a peer, or gave up on one; none says why")
    if sizes := {rank: failure for rank, failure in own.items() if failure.kind == SIZES}:
        return _of_sizes(sizes, evidence.records)
    own = _earliest(own, {log.rank: log.age_seconds for log in evidence.logs})
    doing = {rank: in_short(failure) for rank, failure in own.items()}
    causes = {failure.cause for failure in own.values()}
    told = causes.pop() if len(causes) == 1 else None
    cause = None if told is None else Cause(told)
    first, *rest = sorted(own)
    words = f"rank {first} {doing[first]}" + (f"; {ranks_in_words(rest)} failed too" if rest else "")
    if len(own) > 1 and 2 * len(own) > len(known_ranks(evidence) | set(own)):
        return Witness(LOGS, words, cause=cause)  # most ranks alike: none of them is odd
    return Witness(LOGS, words, frozenset(own), SEVERAL_WEIGHT if rest else FAILED_WEIGHT, cause, doing)


def in_short(failure: LogFailure) -> str:
    """`raised ValueError: shard 7 holds no tokens, at read_shard (train.py:59)`: after "rank 2"."""
    kind = kind_named(failure.kind)
    what = f"raised {failure.words}" if kind is None else f"{kind.words}: {failure.words}"
    return what if failure.frame is None else f"{what}, at {frame_in_words(failure.frame)}"


def _earliest(own: Mapping[int, LogFailure], ages: Mapping[int, float | None]) -> dict[int, LogFailure]:
    """Those that fell silent before the others, where that is known of all."""
    known = {rank: age for rank in own if (age := ages.get(rank)) is not None}
    if len(known) < len(own):
        return dict(own)
    oldest = max(known.values())
    return {rank: failure for rank, failure in own.items() if known[rank] >= oldest - EARLIER_SECONDS}


def _of_sizes(aborted: Mapping[int, LogFailure], records: Sequence[RankRecord]) -> Witness:
    """gloo ends the rank that receives more than it expects. Whether that one is wrong or the sender, is told by what
    the others launched last: where that is the same on all, it is; where one of them differs, that one is."""
    first = min(aborted)
    said = f"rank {first} {in_short(aborted[first])}"
    last = {r.rank: what for r in records if r.rank not in aborted and (what := _last_launch(r)) is not None}
    counts = Counter(last.values()).most_common()
    odd = [rank for rank, what in last.items() if len(counts) == 2 and what == counts[1][0]]
    doing = {rank: in_short(failure) for rank, failure in aborted.items()}
    named, weight, more = frozenset(aborted), ABORTED_WEIGHT, "it or whoever sent to it is wrong"
    if len(counts) == 1 and len(last) > 1 and len(aborted) == 1:
        weight, more = FAILED_WEIGHT, f"{ranks_in_words(last)} all launched {counts[0][0]}"
    elif len(odd) == 1 and len(last) > 2:
        more = f"rank {odd[0]} launched {counts[1][0]}, the others {counts[0][0]}"
        named, weight, doing = frozenset(odd), FAILED_WEIGHT, {odd[0]: f"launched {counts[1][0]}"}
    return Witness(LOGS, f"{said}; {more}", named, weight, Cause.PROGRAM, doing, verdict=DiagnosisVerdict.MISMATCH)


def _last_launch(record: RankRecord) -> str | None:
    launches = [part.launches[-1] for part in record.groups if part.launches]
    last = max(launches, key=lambda launch: launch.record, default=None)
    return None if last is None else operation_words(last.operation, sizes=True)
