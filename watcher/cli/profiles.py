"""`wattwatch profiles [MODEL]`: which power of a GPU model counts as which state, what was measured, and why a range is
wider than that."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import click
from rich.markup import escape

from wattwatch.watcher.cli.shared import json_option, print_json, text_console
from wattwatch.watcher.detection.baselines.profiles import (
    PowerBand,
    PowerMeasurement,
    PowerProfile,
    find_profile,
    generic_profile,
    profile_for,
    published_measurements,
    reasons_for_wider_ranges,
    shipped_profiles,
    unknown_model_text,
)

# The rows of a profile: state, and the states of the measurements that it rests on.
STATES: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    ("idle", ("idle",)),
    ("waiting", ("context", "waiting", "checkpoint")),
    ("starvation", ("starvation",)),
    ("communication", ("communication",)),
    ("light", ()),
    ("compute", ("compute",)),
)
STATE_TEXT: Final = {
    "idle": "no process uses the GPU",
    "waiting": "idle with a CUDA context, spinning in a collective, waiting for a checkpoint",
    "starvation": "waiting for input, utilization scattered over the ranks",
    "communication": "all ranks evenly busy in collectives",
    "light": "healthy work below compute power",
    "compute": "all ranks busy",
}


@click.command()
@click.argument("model", required=False)
@click.option(
    "--limit",
    "limit_watts",
    type=click.FloatRange(min=1.0, max=10_000.0),
    metavar="WATTS",
    help="Power limit of your GPUs, if it is not the usual one: the ranges are scaled to it.",
)
@json_option("Print a JSON list with one object for each profile.")
def profiles_command(model: str | None, limit_watts: float | None, as_json: bool) -> None:
    """Print which power counts as which state, for one GPU model or for all.

    MODEL is the name of a profile or of a GPU ("b300", "NVIDIA H100 80GB HBM3"). With it, the published measurements
    and their sources are listed, and the reasons why a range is wider than what was measured.

    Exit code: 0, or 2 for a model without a profile.
    """
    if model is None:
        if limit_watts is not None:
            raise click.UsageError("--limit needs a MODEL")
        if as_json:
            print_json([profile_object(each) for each in shipped_profiles()])
        else:
            print_overview(shipped_profiles())
        return
    profile = find_profile(model)
    if profile is None:
        raise click.BadParameter(
            f"{unknown_model_text(model)}. Other GPUs are judged by the profile generic, scaled to their power limit",
            param_hint="MODEL",
        )
    usual_watts = profile.limit_watts
    if limit_watts is not None:
        profile = profile_for(None, limit_watts) if profile == generic_profile() else profile.scaled(limit_watts)
    if as_json:
        print_json([profile_object(profile)])
    else:
        print_profile(profile, usual_watts)


def profile_object(profile: PowerProfile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "match": profile.match,
        "limit_watts": profile.limit_watts,
        "certain": profile.certain,
        "bands_from": profile.bands_from or None,
        "bands_certain": profile.bands_certain,
        "states": [
            {
                "state": state,
                "low_watts": band.low_watts,
                "high_watts": None if math.isinf(band.high_watts) else band.high_watts,
                "scaled_from": scaled_from(profile, state),
                "why_wider": reasons_for_wider_ranges(profile.name).get(state),
            }
            for state, _ in STATES
            for band in used_bands(profile, state)
        ],
        "measurements": [
            {
                "state": each.state,
                "low_watts": each.watts.low_watts,
                "high_watts": each.watts.high_watts,
                "above_idle": each.above_idle,
                "limit_watts": each.limit_watts,
                "gpus": each.gpus,
                "what": each.what,
                "source": each.source,
            }
            for each in published_measurements()
            if each.profile == profile.name
        ],
        "source": profile.source,
    }


def used_bands(profile: PowerProfile, state: str) -> tuple[PowerBand, ...]:
    """The ranges that count as `state`; none where the state is not known on this model."""
    if state == "light":
        return profile.light
    band = {
        "idle": PowerBand(0.0, profile.idle_watts),
        "waiting": PowerBand(0.0, profile.floor_watts),
        "starvation": profile.starvation,
        "communication": profile.communication,
        "compute": PowerBand(profile.compute_watts, math.inf),
    }[state]
    return () if band is None else (band,)


def scaled_from(profile: PowerProfile, state: str) -> str | None:
    """The profile whose range was scaled to this model; None for the model's own."""
    if state not in ("starvation", "communication") or not profile.bands_from:
        return None
    own = next(each for each in shipped_profiles() if each.name == profile.bands_from)
    return own.name


def band_text(state: str, band: PowerBand) -> str:
    if state == "idle":
        return f"about {band.high_watts:,.0f} W"
    if math.isinf(band.high_watts):
        return f"from {band.low_watts:,.0f} W"
    return str(band) if band.low_watts else f"up to {band.high_watts:,.0f} W"


def print_overview(profiles: Sequence[PowerProfile]) -> None:
    rows = [("model", "limit", *(state for state, _ in STATES), "certainty")]
    for profile in profiles:
        cells = [f"{profile.limit_watts:,.0f} W"]
        for state, _ in STATES:
            mark = "*" if scaled_from(profile, state) else ""
            cells.append(", ".join(band_text(state, band) + mark for band in used_bands(profile, state)) or "-")
        rows.append((profile.name, *cells, f"{profile.certain:.1f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    measured = next(profile for profile in profiles if not profile.bands_from)
    click.echo(
        f"\n* Not measured on this model, but scaled from the range of {measured.name}. Verdicts that use this range "
        "have less confidence.\n"
        "The watcher starts with these ranges. While it runs, it learns the power of your own GPUs; `wattwatch "
        "calibrate` measures that power in advance.\n"
        'For GPUs of other models, the profile "generic" is scaled to their power limit.\n'
        "`wattwatch profiles MODEL` lists the published measurements with their sources, and the reasons why a range "
        "is wider than the measurements."
    )


def print_profile(profile: PowerProfile, usual_watts: float) -> None:
    console = text_console()
    matched = f"GPUs whose name matches {profile.match}" if profile.match else "GPUs that match no other profile"
    console.print(f"[bold]{profile.name}[/]: {escape(matched)}, at a power limit of {profile.limit_watts:,.0f} W")
    mine = [each for each in published_measurements() if each.profile == profile.name]
    for state, of_states in STATES:
        bands = used_bands(profile, state)
        counted = " and ".join(band_text(state, band) for band in bands) or "not known on this model"
        console.print(f"\n  [bold]{state:<14}[/] {counted}  ({STATE_TEXT[state]})")
        for each in mine:
            if each.state in of_states:
                console.print(f"    published: {escape(measurement_text(each, state))}")
        if (reason := reasons_for_wider_ranges(profile.name).get(state)) is not None:
            console.print(f"    wider because: {escape(reason)}")
    console.print(f"\n  {escape(scaling_text(profile, usual_watts))}")
    console.print(
        f"  certainty {profile.certain:.1f}, on a scale from 0 to 1: how reliable a verdict is if it uses only these "
        "figures"
    )
    console.print(f"  also from: {escape(profile.source)}")


def measurement_text(measurement: PowerMeasurement, state: str) -> str:
    """One line, beside the range of `state`."""
    gpus = "" if measurement.gpus is None else f"{measurement.gpus:,} GPU{'s' if measurement.gpus > 1 else ''}, "
    limit = "limit not published" if measurement.limit_watts is None else f"limit {measurement.limit_watts:,.0f} W"
    plus = " above idle" if measurement.above_idle else ""
    kind = "" if measurement.state == state else f", {measurement.state}"
    return f"{measurement.watts}{plus}{kind} ({gpus}{limit}): {measurement.what}. {measurement.source}"


def scaling_text(profile: PowerProfile, usual_watts: float) -> str:
    """How the ranges came about that were not measured at this limit, or not on this model."""
    parts = []
    if profile.limit_watts != usual_watts:
        parts.append(
            f"Scaled from a power limit of {usual_watts:,.0f} W: idle and waiting power do not depend on the limit and "
            "are unchanged; the other ranges are scaled in proportion to the difference between waiting power and "
            "limit."
            if profile.name != generic_profile().name
            else f"All ranges are scaled from a power limit of {usual_watts:,.0f} W."
        )
    if profile.bands_from:
        parts.append(
            f"Starvation and communication were not measured on this model: their ranges are scaled from those of "
            f"{profile.bands_from}. Verdicts that use them have {profile.bands_certain:.1f} times the usual confidence."
        )
    share = profile.compute_watts / profile.limit_watts
    compute = (
        f"A GPU counts as computing at {profile.compute_watts:,.0f} W ({share * 100:.0f} % of the power limit) or more."
    )
    work = [
        each.watts.low_watts
        for each in published_measurements()
        if (each.profile, each.state) == (profile.name, "compute")
    ]
    if work and min(work) < profile.compute_watts and profile.limit_watts == usual_watts:
        compute += (
            f" But some published measurements of healthy jobs with light work are lower, from {min(work):,.0f} W. "
            "Below the compute range, a verdict is therefore less certain, or unknown."
        )
    return " ".join([*parts, compute])
