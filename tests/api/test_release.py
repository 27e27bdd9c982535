"""What builds and checks a release, on wheels and changelogs made for the purpose."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from support.scripts import script

ROOT = Path(__file__).parents[2]
SBOM = "ingot_tensors-1.0.dist-info/sboms/ingot.cyclonedx.json"
RECORD = "ingot_tensors-1.0.dist-info/RECORD"


WHEELS = script("wheels")
RELEASE = script("check-release")


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def wheel(path: Path, source: Path, year: int = 2026) -> Path:
    """A wheel as maturin makes it of the sources in `source`."""
    members = {
        "ingot/__init__.py": b"",
        "ingot/_native.abi3.so": b"\x7fELF",
        SBOM: b'{"bom-ref": "path+' + source.as_uri().encode() + b'/crates/io#ingot-io@1.0"}',
    }
    record = "".join(f"{name},{digest(data)},{len(data)}\n" for name, data in members.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, RECORD: f"{record}{RECORD},,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0)), data)
    return path


def test_wheels_of_two_folders_are_one_byte_for_byte(tmp_path: Path) -> None:
    made = []
    for number, folder in enumerate(("one", "a longer folder")):
        source = tmp_path / folder
        built = wheel(tmp_path / f"built{number}.whl", source, 2020 + number)
        made.append(tmp_path / f"normal{number}.whl")
        WHEELS.normalise(built, made[-1], source)
    assert made[0].read_bytes() == made[1].read_bytes()


def test_what_was_changed_in_a_wheel_is_recorded(tmp_path: Path) -> None:
    normal = tmp_path / "normal.whl"
    WHEELS.normalise(wheel(tmp_path / "built.whl", tmp_path), normal, tmp_path)
    with zipfile.ZipFile(normal) as archive:
        assert str(tmp_path).encode() not in archive.read(SBOM)
        rows = list(csv.reader(io.StringIO(archive.read(RECORD).decode())))
        assert [row[0] for row in rows] == archive.namelist()
        for name, recorded, nbytes in rows[:-1]:
            assert (recorded, int(nbytes)) == (digest(archive.read(name)), len(archive.read(name)))
        modes = {info.filename: info.external_attr >> 16 for info in archive.infolist()}
    assert (modes["ingot/__init__.py"], modes["ingot/_native.abi3.so"]) == (0o100644, 0o100755)


def test_a_folder_of_the_machine_in_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHEELS, "output", lambda *command: "/opt/rust")
    monkeypatch.setattr(WHEELS, "ROOT", tmp_path)
    assert WHEELS.leaks(wheel(tmp_path / "built.whl", tmp_path)) == [f"{SBOM} holds {tmp_path}/"]
    WHEELS.normalise(tmp_path / "built.whl", tmp_path / "normal.whl", tmp_path)
    assert WHEELS.leaks(tmp_path / "normal.whl") == []


def test_wheels_that_differ_are_told_by_their_members(tmp_path: Path) -> None:
    one, other = wheel(tmp_path / "one.whl", tmp_path), wheel(tmp_path / "other.whl", tmp_path / "b")
    assert WHEELS.differing(one, one) == []
    assert WHEELS.differing(one, other) == [SBOM, RECORD]


def test_the_workflow_builds_and_tries_every_wheel_that_there_is() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    # Windows has a linker of its own there.
    released = [name for name in WHEELS.TARGETS if not name.endswith("-cross")]
    assert "-cross" not in workflow
    # Once where it is built, and once or more where it is tried.
    assert [name for name in released if f"wheel: {name} }}" not in workflow] == []
    assert [name for name in released if f"wheel: {name}, " not in workflow] == []


CARGO: dict[str, Any] = {
    "workspace": {
        "package": {"version": "1.2.0"},
        "dependencies": {"ingot-format": {"version": "1.2.0"}, "libc": {"version": "0.2"}},
    }
}
CHANGELOG = """\
# Changelog

## Unreleased

## 1.2.0 - 2026-11-30

### Added

- A.

## 1.1.0 - 2026-01-01

- B.
"""


def test_a_tag_that_agrees_with_everything_may_be_released() -> None:
    assert RELEASE.faults("v1.2.0", CARGO, CHANGELOG) == []
    assert RELEASE.notes(CHANGELOG, "1.2.0") == ("2026-11-30", "### Added\n\n- A.")


@pytest.mark.parametrize(
    ("tag", "changelog", "fault"),
    [
        ("v1.3.0", CHANGELOG, "the tag is v1.3.0, and Cargo.toml has 1.2.0: expected v1.2.0"),
        ("v1.2.0", CHANGELOG.replace("1.2.0", "1.2.1"), "CHANGELOG.md has no section 1.2.0"),
        ("v1.2.0", CHANGELOG.replace(" - 2026-11-30", ""), "CHANGELOG.md gives 1.2.0 no date"),
        ("v1.2.0", CHANGELOG.replace("### Added\n\n- A.\n", ""), "CHANGELOG.md says nothing of 1.2.0"),
    ],
)
def test_a_tag_that_does_not_agree_is_refused(tag: str, changelog: str, fault: str) -> None:
    (said,) = RELEASE.faults(tag, CARGO, changelog)
    assert said.startswith(fault)


def test_a_crate_that_asks_for_another_version_is_refused() -> None:
    cargo = {"workspace": {**CARGO["workspace"], "dependencies": {"ingot-format": {"version": "1.1.0"}}}}
    said = RELEASE.faults("v1.2.0", cargo, CHANGELOG)
    assert said == ["Cargo.toml asks for ingot-format 1.1.0, expected 1.2.0"]
