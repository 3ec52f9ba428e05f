"""Reads the [[profiles]] tables of a file: one that `wattwatch calibrate` wrote, or a whole wattwatch.toml."""

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
    """Everything else in the file is ignored, so that a whole wattwatch.toml can be given, valid or not."""

    model_config = ConfigDict(extra="ignore")
    profiles: tuple[ProfileSection, ...] = Field((), strict=False)


def read_profiles(path: Path) -> tuple[UserProfile, ...]:
    """The profiles of the file, at least one. Raises ConfigError with every problem found, each with its location."""
    try:
        sections = ProfilesFile.model_validate(read_toml(path)).profiles
    except ValidationError as error:
        raise ConfigError(path, [line for item in error.errors() for line in describe_validation_error(item)]) from None
    if not sections:
        raise ConfigError(
            path, ["the file has no [[profiles]] table; `wattwatch calibrate SOURCE --out FILE` writes one"]
        )
    for i, section in enumerate(sections):
        try:
            compile_pattern(section.match)
        except ValueError as error:
            raise ConfigError(path, [f"profiles[{i}].match: {error}"]) from None
    return tuple(UserProfile(**section.model_dump()) for section in sections)
