"""`python -m tests.faults.healthy [HOURS [SEEDS]]`: healthy days, and what was said on them."""

from __future__ import annotations

import sys
import time

from tests.faults.healthy_days import SECONDS_A_DAY, live


def main() -> None:
    hours = float(sys.argv[1]) if len(sys.argv) > 1 else 24.0
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 20
    started = time.process_time()
    days = warnings = forbidden = 0.0
    for seed in range(seeds):
        day = live(seed, hours * 3600.0)
        days += day.seconds / SECONDS_A_DAY
        warnings += day.warnings
        forbidden += len(day.forbidden)
        setting = day.setting
        sys.stdout.write(
            f"seed {seed:2}: {setting.board} {setting.nodes}x{setting.gpus}, {setting.step_seconds:g} s a step "
            f"+-{setting.noise:.0%}, {setting.progress}, {setting.work}, {setting.interval_seconds:g} s: "
            f"{day.events.total()} events, {day.warnings} warnings, {len(day.forbidden)} false alarms\n"
        )
        for seconds, during, said in day.said:
            if said.worst != "info":
                sys.stdout.write(f"    {seconds:7.0f} s, {during}: {said.alert} {said.worst}: {said.newest.summary}\n")
                sys.stdout.write(
                    f"        for {said.last - said.opened:.0f} s; {' | '.join(said.newest.evidence)[:300]}\n"
                )
        sys.stdout.flush()
    sys.stdout.write(
        f"{days:.1f} healthy days: {forbidden:.0f} JobHung, JobCrashed or GpuFault; "
        f"{warnings / days:.2f} warnings a day; "
        f"{time.process_time() - started:.0f} s of one core\n"
    )
    sys.exit(1 if forbidden or warnings > days else 0)


if __name__ == "__main__":
    main()
