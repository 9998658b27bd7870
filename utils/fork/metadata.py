# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What the fork's package takes over from upstream's metadata, in the form that setuptools takes it."""

import re
from collections import defaultdict
from collections.abc import Iterable
from importlib.metadata import EntryPoint

from packaging.requirements import Requirement


def requirements_by_extra(requirements: Iterable[str], extras: Iterable[str]) -> dict[str, list[str]]:
    """
    Sorts requirements by extra.

    Args:
        requirements (`Iterable[str]`): The values of `Requires-Dist`.
        extras (`Iterable[str]`): The values of `Provides-Extra`.

    Returns:
        `dict[str, list[str]]`: Extra -> its requirements, without the extra in their markers. Those that always hold
            have the key `""`.

    Raises:
        `ValueError`: A marker has its extra elsewhere than at its end, where setuptools writes it.
    """
    by_extra = {"": [], **{extra: [] for extra in extras}}
    for line in requirements:
        requirement = Requirement(line)
        marker = str(requirement.marker or "")
        extra = ""
        if match := re.fullmatch(r'(?:(?P<others>.*) and )?extra == "(?P<extra>[^"]+)"', marker):
            extra, marker = match["extra"], match["others"] or ""
        if "extra" in marker:
            raise ValueError(f"requirement `{line}`: its extra is not the last part of its marker")
        requirement.marker = None
        # A space before the semicolon, as a URL would swallow it
        by_extra[extra].append(f"{requirement} ; {marker}" if marker else str(requirement))
    return by_extra


def entry_points_by_group(entry_points: Iterable[EntryPoint]) -> dict[str, list[str]]:
    """Sorts entry points (console scripts and others) by group."""
    by_group = defaultdict(list)
    for point in entry_points:
        by_group[point.group].append(f"{point.name} = {point.value}")
    return dict(by_group)
