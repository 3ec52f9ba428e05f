"""The [[profiles]] tables of a file: one that `wattwatch calibrate` wrote, or a whole wattwatch.toml."""

from __future__ import annotations

from pathlib import Path

from pydantic import ConfigDict, Field, ValidationError

from wattwatch.watcher.config.settings import (
    ConfigError,
    ProfileSection,
    Section,
    compile_pattern,
    describe_validation_error,
    read_toml,
)
from wattwatch.watcher.detection.baselines.profiles import UserProfile


class ProfilesFile(Section):
    """What else the file holds is none of our business."""

    model_config = ConfigDict(extra="ignore")
    profiles: tuple[ProfileSection, ...] = Field((), strict=False)


def read_profiles(path: Path) -> tuple[UserProfile, ...]:
    """At least one. Raises ConfigError with every problem found, each naming its place."""
    try:
        sections = ProfilesFile.model_validate(read_toml(path)).profiles
    except ValidationError as error:
        raise ConfigError(path, [line for item in error.errors() for line in describe_validation_error(item)]) from None
    if not sections:
        raise ConfigError(path, ["no [[profiles]] table in it: `wattwatch calibrate SOURCE --out FILE` writes one"])
    for i, section in enumerate(sections):
        try:
            compile_pattern(section.match)
        except ValueError as error:
            raise ConfigError(path, [f"profiles[{i}].match: {error}"]) from None
    return tuple(UserProfile(**section.model_dump()) for section in sections)
