"""`python -m tests.faults [SEEDS] [ROW ...]`: plays the rows and prints what was said, of whom, and how late."""

from __future__ import annotations

import sys

from tests.faults.suite import ROWS, Outcome, Row, play, variant


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    numbers = {int(number) for number in sys.argv[2:]}
    wrong = 0
    print_line("row", "fault", "expected", "said", "who (last)", "first", "confirmed", "after limit")
    for row in ROWS:
        if not numbers or row.number in numbers:
            outcomes = [play(row, variant(row, seed)) for seed in range(seeds)]
            wrong += sum(bool(outcome.problems) for outcome in outcomes)
            print_row(row, outcomes)
    sys.stdout.write(f"{wrong} variants wrong; delays in sample intervals, median (worst)\n")
    sys.exit(1 if wrong else 0)


def print_row(row: Row, outcomes: list[Outcome]) -> None:
    expected = ", ".join(f"{each.alert} {each.severity}" for each in row.expected) or "nothing"
    said = ", ".join(dict.fromkeys(word for outcome in outcomes for word in outcome.said)) or "nothing"
    print_line(
        str(row.number),
        row.name,
        expected,
        said,
        outcomes[-1].who[:24],
        spread([outcome.first_intervals for outcome in outcomes]),
        spread([outcome.confirmed_intervals for outcome in outcomes]),
        spread([outcome.after_limit_intervals for outcome in outcomes]),
    )
    for outcome in outcomes:
        for problem in outcome.problems:
            sys.stdout.write(f"      WRONG {problem}\n            {outcome.setting}\n")


def spread(values: list[float | None]) -> str:
    told = sorted(value for value in values if value is not None)
    return f"{told[len(told) // 2]:.0f} ({told[-1]:.0f})" if told else "-"


def print_line(*cells: str) -> None:
    widths = (3, 62, 27, 40, 24, 10, 12, 10)
    sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() + "\n")


if __name__ == "__main__":
    main()
