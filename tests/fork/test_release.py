# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""What stands beside the archives of a release."""

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from utils.fork.build import REPOSITORY, read_pin


pytest.importorskip("cyclonedx", reason="only in the environment of `make release`")
METADATA = 'Metadata-Version: 2.4\nName: transformers\nRequires-Dist: numpy>=1.17\nRequires-Dist: torch>=2.6; extra == "torch"\n'


def run(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "utils.release", str(folder)]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)


def test_checksums_and_materials(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "transformers-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr("transformers-1.dist-info/METADATA", METADATA)
    (tmp_path / "transformers-1.tar.gz").write_bytes(b"source")
    assert run(tmp_path).returncode == 0
    sums = dict(reversed(line.split("  ")) for line in (tmp_path / "SHA256SUMS").read_text().splitlines())
    assert set(sums) == {"transformers-1-py3-none-any.whl", "transformers-1.tar.gz", "sbom.cdx.json"}
    for name, digest in sums.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest
    bill = json.loads((tmp_path / "sbom.cdx.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    components = {component["name"]: component for component in bill["components"]}
    assert set(components) == {"transformers", "numpy"}
    assert components["transformers"]["version"] == read_pin().version
    assert {"name": "record_sha256", "value": read_pin().record_sha256} in components["transformers"]["properties"]


def test_missing_archive_is_refused(tmp_path: Path):
    result = run(tmp_path)
    assert result.returncode != 0
    assert "must hold one wheel and one source distribution, but holds 0 and 0" in result.stderr
