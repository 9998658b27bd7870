# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What the fork takes over from upstream's metadata."""

from importlib.metadata import EntryPoint

import pytest

from utils.fork.metadata import entry_points_by_group, requirements_by_extra


def test_requirements_are_sorted_by_extra():
    requirements = [
        "numpy>=1.17",
        'tomli>=2; python_version < "3.11"',
        'torch>=2.6; extra == "torch"',
        'ray[tune]>=2.7; (python_version < "3.14" or sys_platform == "linux") and extra == "ray"',
        'fugashi>=1; python_version < "3.14" and extra == "ja"',
        'local @ https://example.org/local-1.whl ; python_version < "3.14" and extra == "ja"',
        'torch>=2.6; extra == "all"',
    ]
    assert requirements_by_extra(requirements, ["torch", "ray", "ja", "all", "empty"]) == {
        "": ["numpy>=1.17", 'tomli>=2 ; python_version < "3.11"'],
        "torch": ["torch>=2.6"],
        "ray": ['ray[tune]>=2.7 ; (python_version < "3.14" or sys_platform == "linux")'],
        "ja": [
            'fugashi>=1 ; python_version < "3.14"',
            'local @ https://example.org/local-1.whl ; python_version < "3.14"',
        ],
        "all": ["torch>=2.6"],
        "empty": [],
    }


@pytest.mark.parametrize(
    "marker",
    [
        'extra == "a" and python_version < "3.14"',
        'extra == "a" or extra == "b"',
        'python_version < "3.14" and (extra == "a" or extra == "b")',
        'extra != "a"',
    ],
)
def test_refuses_an_extra_elsewhere_than_at_the_end(marker):
    with pytest.raises(ValueError, match="its extra is not the last part of its marker"):
        requirements_by_extra([f"numpy; {marker}"], ["a", "b"])


def test_entry_points_are_sorted_by_group():
    points = [
        EntryPoint("transformers", "transformers.cli:main", "console_scripts"),
        EntryPoint("other", "transformers.other", "console_scripts"),
        EntryPoint("plugin", "transformers.plugin", "plugins"),
    ]
    assert entry_points_by_group(points) == {
        "console_scripts": ["transformers = transformers.cli:main", "other = transformers.other"],
        "plugins": ["plugin = transformers.plugin"],
    }
