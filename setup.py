# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Packages the fork: files, requirements and the rest of the metadata come from the upstream release that the build
requirements in `pyproject.toml` bring into the build environment. See docs/fork.md.
"""

import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel


REPOSITORY = Path(__file__).resolve().parent
# A build backend doesn't run with its project on the path
sys.path.insert(0, str(REPOSITORY))

from utils.fork.build import PACKAGE, build_tree, check_upstream, find_upstream, read_pin  # noqa: E402
from utils.fork.metadata import entry_points_by_group, requirements_by_extra  # noqa: E402


EDITABLE_TREE = "build/editable"
PIN = read_pin()
UPSTREAM = find_upstream()
check_upstream(UPSTREAM, PIN)


class BuildPackage(build_py):
    """Builds the tree of the fork where setuptools expects the package's files."""

    def run(self):
        if self.editable_mode:
            return  # see `BuildEditable`
        # Nothing that an earlier build has left may get into the package
        shutil.rmtree(self.build_lib, ignore_errors=True)
        build_tree(UPSTREAM, Path(self.build_lib))

    def get_source_files(self):
        return []

    def get_outputs(self, include_bytecode=True):
        return [str(file) for file in Path(self.build_lib).rglob("*") if file.is_file()]

    def get_output_mapping(self):
        return {}


class BuildEditable(editable_wheel):
    """Builds the tree that an editable install points to. (setuptools ignores errors of a `build_py` there.)"""

    def run(self):
        build_tree(UPSTREAM, REPOSITORY / EDITABLE_TREE, link=True)
        super().run()


class BuildWheel(bdist_wheel):
    """Puts upstream's licence files, which lie outside of the project, beside ours."""

    def egg2dist(self, egginfo_path, distinfo_path):
        super().egg2dist(egginfo_path, distinfo_path)
        metadata = Path(distinfo_path, "METADATA")
        for name in UPSTREAM.metadata.get_all("License-File"):
            copy = Path(distinfo_path, "licenses", "upstream", name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(UPSTREAM.locate_file(f"{PACKAGE}-{UPSTREAM.version}.dist-info/licenses/{name}"), copy)
            text = metadata.read_text(encoding="utf-8")
            text = text.replace("\nLicense-File: ", f"\nLicense-File: upstream/{name}\nLicense-File: ", 1)
            metadata.write_text(text, encoding="utf-8")


metadata = UPSTREAM.metadata
extras = requirements_by_extra(UPSTREAM.requires, metadata.get_all("Provides-Extra", []))
Path("build").mkdir(exist_ok=True)

setup(
    name=PACKAGE,
    version=PIN.fork_version,
    description=f"Hugging Face Transformers {PIN.version}, with each prompt computed once for all beams and sequences",
    long_description=Path("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author=f"The prefill-once authors; of Transformers: {metadata['Author']}",
    keywords=metadata["Keywords"],
    license=metadata["License"],
    license_files=["LICENSE", "NOTICE"],
    classifiers=metadata.get_all("Classifier"),
    project_urls={"Upstream": metadata["Home-page"]},
    python_requires=metadata["Requires-Python"],
    install_requires=extras.pop(""),
    extras_require=extras,
    entry_points=entry_points_by_group(UPSTREAM.entry_points),
    packages=[PACKAGE],
    package_dir={"": EDITABLE_TREE},
    cmdclass={"bdist_wheel": BuildWheel, "build_py": BuildPackage, "editable_wheel": BuildEditable},
    options={"egg_info": {"egg_base": "build"}},
    zip_safe=False,
)
