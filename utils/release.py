# Copyright 2026 The prefill-once authors. Licensed under the Apache License, Version 2.0: see LICENSE.
"""
Adds to a folder with the archives of a release what lets others check them: `SHA256SUMS`, and `sbom.cdx.json`, a bill
of materials (CycloneDX 1.6) that names the upstream release they were made from, and what they require.

    python -m utils.release dist
"""

import argparse
import hashlib
import zipfile
from email.parser import HeaderParser
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement

from .fork.build import PACKAGE, read_pin


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def find_archives(folder: Path) -> tuple[Path, Path]:
    """
    Returns the wheel and the source distribution in `folder`.

    Raises:
        FileNotFoundError: If it doesn't hold one of each.
    """
    wheels, sources = sorted(folder.glob("*.whl")), sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sources) != 1:
        raise FileNotFoundError(
            f"{folder} must hold one wheel and one source distribution, but holds {len(wheels)} and {len(sources)}"
        )
    return wheels[0], sources[0]


def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel requires, without the extras."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = HeaderParser().parsestr(archive.read(name).decode("utf-8"))
    found = map(Requirement, metadata.get_all("Requires-Dist", []))
    return [requirement for requirement in found if "extra" not in str(requirement.marker or "")]


def bill_of_materials(wheel: Path, source: Path) -> str:
    """Returns the bill of materials as JSON."""
    pin = read_pin()
    archives = [
        Component(
            name=path.name,
            type=ComponentType.FILE,
            hashes=[HashType(alg=HashAlgorithm.SHA_256, content=sha256(path))],
        )
        for path in (wheel, source)
    ]
    fork = Component(name=PACKAGE, version=pin.fork_version, components=archives, bom_ref="fork")
    upstream = Component(
        name=PACKAGE,
        version=pin.version,
        purl=PackageURL("pypi", None, PACKAGE, pin.version),
        properties=[Property(name="record_sha256", value=pin.record_sha256)],
        bom_ref="upstream",
    )
    required = [
        Component(
            name=requirement.name,
            purl=PackageURL("pypi", None, requirement.name),
            properties=[Property(name="specifier", value=str(requirement.specifier))],
        )
        for requirement in requirements(wheel)
    ]
    bom = Bom(components=[upstream, *required])
    bom.metadata.component = fork
    bom.register_dependency(fork, [upstream, *required])
    return JsonV1Dot6(bom).output_as_string(indent=2)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m utils.release", description=__doc__)
    parser.add_argument("folder", type=Path, help="the folder with the wheel and the source distribution")
    folder = parser.parse_args().folder
    wheel, source = find_archives(folder)
    (folder / "sbom.cdx.json").write_text(bill_of_materials(wheel, source) + "\n", encoding="utf-8")
    listed = [wheel, source, folder / "sbom.cdx.json"]
    lines = [f"{sha256(path)}  {path.name}\n" for path in listed]
    (folder / "SHA256SUMS").write_text("".join(lines), encoding="utf-8")
    print("".join(lines), end="")


if __name__ == "__main__":
    main()
