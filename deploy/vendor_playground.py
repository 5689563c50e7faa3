"""Brings the playground's two libraries into the repository, from npm: KaTeX (formulas) and highlight.js (code).

python deploy/vendor_playground.py

Needs npm. The archives are compared with the checksums below; `vendor.json` then records a checksum of every file, which a
test compares with what is there. To update one, change its version and its checksum (`npm view NAME dist.integrity`).
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).parents[1] / "bough" / "entrypoints" / "http" / "ui" / "static" / "vendor"


@dataclass(frozen=True, slots=True)
class Package:
    """One package of npm, and what is taken from it."""

    name: str
    version: str
    license: str
    integrity: str
    """SHA-512 of the archive, as npm writes it."""
    folder: str
    files: dict[str, str]
    """Path (or directory, with a slash) in the package -> path in the folder."""


PACKAGES = (
    Package(
        name="katex",
        version="0.19.1",
        license="MIT",
        integrity="sha512-jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        folder="katex",
        files={
            "dist/katex.min.js": "katex.min.js",
            "dist/katex.min.css": "katex.min.css",
            "dist/fonts/": "fonts/",
            "LICENSE": "LICENSE",
        },
    ),
    Package(
        name="@highlightjs/cdn-assets",
        version="11.12.0",
        license="BSD-3-Clause",
        integrity="sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        folder="highlight",
        files={"es/highlight.min.js": "highlight.min.js", "LICENSE": "LICENSE"},
    ),
)
WANTED_FONTS = ".woff2"
"""Every browser that runs the page reads these; the older formats are left out."""


def main() -> int:
    shutil.rmtree(TARGET, ignore_errors=True)
    record = []
    for package in PACKAGES:
        with tempfile.TemporaryDirectory() as place:
            archive = fetch(package, Path(place))
            unpack(package, archive, TARGET / package.folder)
        files = sorted(path for path in (TARGET / package.folder).rglob("*") if path.is_file())
        sums = {str(path.relative_to(TARGET)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
        record.append(
            {"name": package.name, "version": package.version, "license": package.license,
             "integrity": package.integrity, "files": sums}
        )  # fmt: skip
        print(f"{package.name} {package.version}: {len(sums)} files")
    (TARGET / "vendor.json").write_text(json.dumps(record, indent=1) + "\n")
    return 0


def fetch(package: Package, place: Path) -> Path:
    """The package's archive, compared with its checksum."""
    command = ["npm", "pack", f"{package.name}@{package.version}", "--silent", "--pack-destination", str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=place)
    (archive,) = place.glob("*.tgz")
    found = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != package.integrity:
        raise SystemExit(f"{package.name} {package.version}: its checksum is {found}")
    return archive


def unpack(package: Package, archive: Path, folder: Path) -> None:
    """Writes the wanted files of an archive."""
    with tarfile.open(archive) as tar:
        for member in tar.getmembers():
            inside = member.name.removeprefix("package/")
            for source, target in package.files.items():
                if source.endswith("/") and inside.startswith(source) and inside.endswith(WANTED_FONTS):
                    place = folder / target / inside.removeprefix(source)
                elif inside == source:
                    place = folder / target
                else:
                    continue
                content = tar.extractfile(member)
                assert content is not None
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(content.read())


if __name__ == "__main__":
    sys.exit(main())
