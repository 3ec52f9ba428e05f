"""The result of a backtest as a JSON object and as text. Both are the same in every run on the same data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from wattwatch.watcher.backtest.run import BacktestResult, CaseResults, alert_statistics
from wattwatch.watcher.backtest.score import (
    CLAIM_CONFIDENCE,
    CaseScore,
    ConfidenceBin,
    JudgedCase,
    LeftOut,
    ProgressKnowledge,
    Ratio,
)
from wattwatch.watcher.detection.model import PowerState

MAX_FILES_LISTED: Final = 5
HEADINGS: Final = {
    ProgressKnowledge.NONE: "Verdicts from the samples only",
    ProgressKnowledge.WORD: "Verdicts from the samples and from the step progress that the label implies",
}


def backtest_object(test: BacktestResult) -> dict[str, Any]:
    return {
        "cases": {
            "scored": test.scored,
            "state_unknown_said": test.unscored.state_unknown,
            "no_such_state": test.unscored.no_such_state,
            "no_reading": test.unscored.no_reading,
        },
        "pictures": {knowledge.value: _picture_object(result) for knowledge, result in test.cases.items()},
        "logs": {
            "days": round(test.days, 3),
            "played": [
                {
                    "name": each.name,
                    "seconds": round(each.seconds, 1),
                    "rounds": each.rounds,
                    "incidents": [
                        {
                            "state": i.state,
                            "from_seconds": i.from_seconds,
                            "delay_seconds": i.delay_seconds,
                            "confirmed_delay_seconds": i.confirmed_delay_seconds,
                            "confirmed": i.confirmed,
                        }
                        for i in each.incidents
                    ],
                    "false_alarms": [
                        {
                            "alert": a.alert,
                            "severity": a.severity,
                            "confirmed": a.confirmed,
                            "opened_seconds": a.opened_seconds,
                        }
                        for a in each.false_alarms
                    ],
                }
                for each in test.series
            ],
            "false_alarms_per_day": {
                kind: row.false_per_day for kind, row in alert_statistics(test.series).items() if row.false
            },
        },
    }


def _picture_object(result: CaseResults) -> dict[str, Any]:
    plain, model, source = result.plain, result.left_out[LeftOut.MODEL], result.left_out[LeftOut.SOURCE]
    return {
        "exact": _share(plain.exact),
        "exact_model_left_out": _share(model.exact),
        "exact_source_left_out": _share(source.exact),
        "exact_by_source": {
            "sources": plain.by_source.sources,
            "mean_rate": plain.by_source.mean_rate,
            "largest": plain.by_source.largest,
            "without_largest": _share(plain.by_source.without_largest),
        },
        "claims": {
            "from_confidence": CLAIM_CONFIDENCE,
            "right": plain.claims.right,
            "of": plain.claims.of,
            "rate": None if plain.claims.rate is None else round(plain.claims.rate, 3),
            "coverage": round(plain.claims.of / plain.exact.of, 3) if plain.exact.of else None,
        },
        "hangs_found": _share(plain.hangs.found),
        "hangs_found_model_left_out": _share(model.hangs.found),
        "hangs_found_source_left_out": _share(source.hangs.found),
        "false_hangs": plain.hangs.false,
        "false_hangs_model_left_out": model.hangs.false,
        "false_hangs_source_left_out": source.hangs.false,
        "missed_hangs_said_too_surely": [_said(j) for j in result.overconfident],
        "kinds": {
            state.value: {"found": kind.found.right, "of": kind.found.of, "said_of_others": kind.false}
            for state, kind in plain.kinds.items()
        },
        "confusion": {
            label.value: {said.value: count for said, count in row.items()} for label, row in plain.matrix.items()
        },
        "reliability": [_bin(each) for each in plain.reliability],
        "reliability_model_left_out": [_bin(each) for each in model.reliability],
        "reliability_source_left_out": [_bin(each) for each in source.reliability],
        "gpu_models": {name: {"right": share.right, "of": share.of} for name, share in plain.models.items()},
        "wrong": [_said(j) for j in plain.missed],
        "missed_hangs": [_said(j) for j in result.unfindable],
    }


def _share(share: Ratio) -> dict[str, Any]:
    return {"right": share.right, "of": share.of, "rate": None if share.rate is None else round(share.rate, 3)}


def _bin(each: ConfidenceBin) -> dict[str, Any]:
    return {
        "low": each.low,
        "high": each.high,
        "said": each.confidence,
        "right": each.right.right,
        "of": each.right.of,
        "off": round(each.off, 3),
    }


def _said(judged: JudgedCase) -> dict[str, Any]:
    other = judged.verdict.alternative
    return {
        "case": judged.case.name,
        "gpu_model": judged.case.gpu_model,
        "state": judged.case.label,
        "said": judged.verdict.state.value,
        "confidence": judged.verdict.confidence,
        "alternative": None if other is None else other.state.value,
    }


def backtest_text(test: BacktestResult) -> str:
    return "\n".join(_lines(test))


def _lines(test: BacktestResult) -> Iterator[str]:
    unscored = test.unscored
    if test.scored or unscored.state_unknown or unscored.no_such_state or unscored.no_reading:
        yield f"cases scored: {test.scored}; each has power, utilization, and a state that can be seen in samples"
        yield f"cases not scored, because their true state is unknown: {_counts(unscored.state_unknown, 'verdicts')}"
        unshown = _counts(unscored.no_such_state, "states")
        yield f"cases not scored, because samples cannot show their true state: {unshown}"
        yield f"cases not scored, because power or utilization is missing: {_counts(unscored.no_reading, 'states')}"
    for knowledge, result in test.cases.items():
        yield ""
        yield from _picture_lines(HEADINGS[knowledge], result)
    if test.cases:
        yield ""
        yield "* Without GPU model: no case is judged with the profile of its own GPU model. Instead, power is compared"
        yield (
            "  with the power limit. Without source: the same, but only for cases whose source "
            "contributed to the profile."
        )
        yield "  All other rules and confidences are unchanged."
    if test.series:
        yield ""
        yield from _series_lines(test)
    if test.unlabeled:
        yield ""
        more = len(test.unlabeled) - MAX_FILES_LISTED
        yield f"files without a label: {', '.join(test.unlabeled[:MAX_FILES_LISTED])}" + (
            f" and {more} more" if more > 0 else ""
        )


def _counts(counts: Mapping[str, int], what: str) -> str:
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"{sum(counts.values())}" + (f" ({what}: {listed})" if listed else "")


def _picture_lines(head: str, result: CaseResults) -> Iterator[str]:
    plain, model, source = result.plain, result.left_out[LeftOut.MODEL], result.left_out[LeftOut.SOURCE]
    by_source = plain.by_source
    yield head
    yield (
        f"  correct          {_percent(plain.exact)}    without GPU model*: {_percent(model.exact)}    "
        f"without source*: {_percent(source.exact)}"
    )
    if by_source.sources > 1:
        yield (
            f"  by source        {by_source.mean_rate:.1%} on average over {by_source.sources} sources; without the "
            f"source with the most cases ({by_source.largest}): {_percent(by_source.without_largest)}"
        )
    yield (
        f"  confident        {_percent(plain.claims)} correct; verdicts with a confidence of {CLAIM_CONFIDENCE} or "
        f"more: {_percent(Ratio(plain.claims.of, plain.exact.of))}"
    )
    found = f"{plain.hangs.found.right} of {plain.hangs.found.of}"
    yield (
        f"  hangs found      {found}    without GPU model: {model.hangs.found.right}    "
        f"without source: {source.hangs.found.right}"
    )
    yield (
        f"  false hangs      {plain.hangs.false}    without GPU model: {model.hangs.false}    "
        f"without source: {source.hangs.false}"
    )
    yield (
        "  missed hangs whose verdict was too confident or did not give hang as the alternative: "
        f"{len(result.overconfident)}"
    )
    yield ""
    yield from _matrix_lines(plain)
    yield ""
    yield "  Mean confidence of the verdicts, compared with the fraction of them that is correct"
    yield "                                              without GPU model*"
    yield "  confidence   mean   correct   difference    mean   correct   difference"
    left_out = {each.low: each for each in model.reliability}
    for low in sorted({each.low for each in plain.reliability} | set(left_out)):
        ours = next((each for each in plain.reliability if each.low == low), None)
        without = _bin_words(left_out.get(low))
        yield f"  {low:.1f} - {low + 0.1:.1f}    {_bin_words(ours)}          {without}"
    yield ""
    yield "  GPU model                          correct"
    for name, share in plain.models.items():
        yield f"  {name[:32]:<32}  {share.right:3} of {share.of}"
    if plain.missed:
        yield ""
        yield "  Wrong verdicts"
        yield "  case    GPU model                   label           verdict         confidence   alternative"
        for judged in plain.missed:
            case, verdict = judged.case, judged.verdict
            other = "" if verdict.alternative is None else verdict.alternative.state.value
            yield (
                f"  {case.name[:6]:<7} {case.gpu_model[:26]:<27} {case.label:<15} {verdict.state.value:<15} "
                f"{verdict.confidence:.2f}         {other}"
            )


def _percent(share: Ratio) -> str:
    return f"{share.right} of {share.of}" + ("" if share.rate is None else f" ({share.rate:.1%})")


def _bin_words(each: ConfidenceBin | None) -> str:
    if each is None:
        return "   -                  "
    return f"{each.confidence:.2f}   {each.right.right:2}/{each.right.of:<2}     {each.off:.2f}"


def _matrix_lines(plain: CaseScore) -> Iterator[str]:
    """One row per label, one column per verdict; then how often the state was found, and how often it was wrong."""
    verdicts: Sequence[PowerState] = [s for s in PowerState if any(row.get(s) for row in plain.matrix.values())]
    yield "  label \\ verdict" + " ".join(f"{s.value[:9]:>9}" for s in verdicts) + "    found  false"
    for label in (*plain.matrix, *(s for s in verdicts if s not in plain.matrix)):
        row = plain.matrix.get(label, {})
        cells = " ".join(f"{row.get(s) or '.':>9}" for s in verdicts)
        kind = plain.kinds[label]
        found = f"{kind.found.right}/{kind.found.of}" if kind.found.of else "-"
        yield f"  {label.value:<14} {cells}   {found:>6}   {kind.false:>4}"
    yield "  found: cases with this label that got this verdict; false: cases with another label that got this verdict"


def _series_lines(test: BacktestResult) -> Iterator[str]:
    yield f"logs and recordings: {len(test.series)}, with a total length of {test.days * 24:.1f} h"
    for state, row in alert_statistics(test.series).items():
        if row.incidents.of:
            delays = ", ".join(f"{delay:.0f} s" for delay in row.delays_seconds)
            sure = ", ".join(f"{delay:.0f} s" for delay in row.confirmed_delays_seconds)
            yield (
                f"  {state:<18} {row.incidents.right} of {row.incidents.of} reported"
                + (f"; first alert after {delays}" if delays else "")
                + (f"; confirmed after {sure}" if sure else "")
            )
        else:
            yield f"  {state:<18} false alarms: {row.false} ({row.false_per_day:.1f} per day)"
    if not any(each.false_alarms for each in test.series):
        yield "  no false alarms"
