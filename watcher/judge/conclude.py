"""A scene and what was concluded of it -> a `Verdict` that carries the numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from watcher.judge.advice import ADVICE
from watcher.judge.job_sample import RankGpu
from watcher.judge.scene import CERTAIN_ENOUGH, Scene
from watcher.judge.shape import LONE
from watcher.judge.verdict import Alternative, PowerState, Suspect, Verdict

MOST: Final = 0.99  # no picture is proof


def conclude(
    scene: Scene,
    state: PowerState,
    confidence: float,
    why: str,
    alternative: tuple[PowerState, float] | None = None,
    suspects: Sequence[RankGpu] = (),
) -> Verdict:
    return Verdict(
        state=state,
        confidence=round(min(MOST, confidence), 2),
        shape=scene.picture.shape,
        why=f"{why} ({scene.words}).",
        advice=ADVICE[state],
        suspects=tuple(Suspect(g.node, g.gpu.index, g.rank) for g in suspects),
        power_fraction=scene.fraction,
        alternative=None if alternative is None else Alternative(alternative[0], round(alternative[1], 2)),
        at_floor=scene.at_floor,
    )


def left_behind(scene: Scene) -> tuple[RankGpu, ...]:
    """The one rank that stands out, where it is one."""
    return scene.picture.standing_out if scene.picture.shape in LONE else ()


def floor_known(scene: Scene) -> bool:
    """The profile is of this board, or scaled by its limit, and leaves room between rest and work."""
    return scene.known and scene.profile.certain >= CERTAIN_ENOUGH
