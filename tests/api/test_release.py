"""The scripts that build and check a release, on made-up wheels and changelogs."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ingot
from support.scripts import script

ROOT = Path(__file__).parents[2]
SBOM = "ingot_tensors-1.0.dist-info/sboms/ingot.cyclonedx.json"
RECORD = "ingot_tensors-1.0.dist-info/RECORD"


WHEELS = script("wheels")
RELEASE = script("check-release")


def digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def wheel(path: Path, source: Path, year: int = 2026) -> Path:
    """Write a wheel like one that maturin builds from the sources in `source`."""
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


def test_build_of_two_folders_gives_equal_wheels(tmp_path: Path) -> None:
    made = []
    for number, folder in enumerate(("one", "a longer folder")):
        source = tmp_path / folder
        built = wheel(tmp_path / f"built{number}.whl", source, 2020 + number)
        made.append(tmp_path / f"normal{number}.whl")
        WHEELS.normalise(built, made[-1], source)
    assert made[0].read_bytes() == made[1].read_bytes()


def test_check_wheels_records_changes_in_a_wheel(tmp_path: Path) -> None:
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


def test_check_wheels_finds_paths_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WHEELS, "output", lambda *command: "/opt/rust")
    monkeypatch.setattr(WHEELS, "ROOT", tmp_path)
    assert WHEELS.leaks(wheel(tmp_path / "built.whl", tmp_path)) == [f"{SBOM} holds {tmp_path}/"]
    WHEELS.normalise(tmp_path / "built.whl", tmp_path / "normal.whl", tmp_path)
    assert WHEELS.leaks(tmp_path / "normal.whl") == []


def test_split_keeps_the_symbols_in_a_file_that_the_library_names(tmp_path: Path) -> None:
    if not shutil.which("rustc"):
        pytest.skip("needs Rust")
    library = Path(ingot._native.__file__).read_bytes()
    symbols = tmp_path / "symbols" / "ingot.debug"
    stripped = WHEELS.split(library, symbols)
    assert len(stripped) <= len(library)
    assert (symbols.name.encode() in stripped, b".symtab" in stripped) == (True, False)
    assert symbols.stat().st_size > 0


def test_oversized_names_a_library_with_its_symbols(tmp_path: Path) -> None:
    path = tmp_path / "ingot-1.0-cp311-abi3-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ingot/_native.abi3.so", bytes(8_000_001))
    assert WHEELS.oversized(path) == ["the library has 8,000,001 bytes, expected at most 8,000,000"]


def test_check_wheels_names_differing_members(tmp_path: Path) -> None:
    one, other = wheel(tmp_path / "one.whl", tmp_path), wheel(tmp_path / "other.whl", tmp_path / "b")
    assert WHEELS.differing(one, one) == []
    assert WHEELS.differing(one, other) == [SBOM, RECORD]


def test_workflow_builds_and_tests_every_wheel() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")
    # Windows has another linker there.
    released = [name for name in WHEELS.TARGETS if not name.endswith("-cross")]
    assert "-cross" not in workflow
    # Each wheel occurs once in the jobs that build, and at least once in the jobs that test.
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


def test_check_release_accepts_a_matching_tag() -> None:
    assert RELEASE.faults("v1.2.0", CARGO, CHANGELOG) == []
    assert RELEASE.notes(CHANGELOG, "1.2.0") == ("2026-11-30", "### Added\n\n- A.")


@pytest.mark.parametrize(
    ("tag", "changelog", "fault"),
    [
        ("v1.3.0", CHANGELOG, "the tag is v1.3.0, and Cargo.toml has 1.2.0: expected v1.2.0"),
        ("v1.2.0", CHANGELOG.replace("1.2.0", "1.2.1"), "CHANGELOG.md has no section 1.2.0"),
        ("v1.2.0", CHANGELOG.replace(" - 2026-11-30", ""), "CHANGELOG.md has no date for 1.2.0"),
        (
            "v1.2.0",
            CHANGELOG.replace("### Added\n\n- A.\n", ""),
            "the section 1.2.0 of CHANGELOG.md is empty",
        ),
    ],
)
def test_check_release_rejects_a_wrong_tag(tag: str, changelog: str, fault: str) -> None:
    (said,) = RELEASE.faults(tag, CARGO, changelog)
    assert said.startswith(fault)


def test_check_release_rejects_another_crate_version() -> None:
    cargo = {"workspace": {**CARGO["workspace"], "dependencies": {"ingot-format": {"version": "1.1.0"}}}}
    said = RELEASE.faults("v1.2.0", cargo, CHANGELOG)
    assert said == ["Cargo.toml asks for ingot-format 1.1.0, expected 1.2.0"]


PLACEHOLDER = "FILL-IN"


def test_check_release_names_templates_that_are_not_filled_in(tmp_path: Path) -> None:
    (tmp_path / "conda").mkdir()
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "ingot-tensors"\n')
    (tmp_path / "README.md").write_text(
        "![A](https://example.org/a.png) ![B](docs/b.svg) [a link](docs/c.md)\n"
    )
    (tmp_path / "conda" / "recipe.yaml").write_text('context:\n  version: "1.1.0"\n')
    (tmp_path / "CITATION.cff").write_text(f"repository-code: {PLACEHOLDER}\nversion: 1.2.0\n")
    said = RELEASE.unfilled(tmp_path, "1.2.0")
    assert "docs/b.svg" in said[1]
    assert [fault.partition(":")[0] for fault in said] == [
        "pyproject.toml has no [project.urls]",
        "README.md",
        "CITATION.cff, line 1",
        "CODE_OF_CONDUCT.md is missing",
        ".github/CODEOWNERS is missing",
        "conda/recipe.yaml",
    ]


def test_check_release_writes_the_addresses_of_pictures(tmp_path: Path) -> None:
    project = '[project]\nname = "ingot-tensors"\n'
    readme = tmp_path / "README.md"
    readme.write_text("![A](https://example.org/a.png)\n![B](docs/b.svg) [a link](docs/c.md)\n")
    (tmp_path / "pyproject.toml").write_text(project)
    assert "no Source" in RELEASE.write_addresses(tmp_path, "v1.2.0")
    (tmp_path / "pyproject.toml").write_text(
        f'{project}[project.urls]\nSource = "https://example.org/ingot/"\n'
    )
    assert RELEASE.write_addresses(tmp_path, "v1.2.0") is None
    assert readme.read_text() == (
        "![A](https://example.org/a.png)\n"
        "![B](https://example.org/ingot/raw/v1.2.0/docs/b.svg) [a link](docs/c.md)\n"
    )
    assert RELEASE.relative_pictures(readme.read_text()) == []


def test_templates_of_the_repository_exist_and_have_the_version() -> None:
    version = tomllib.loads((ROOT / "Cargo.toml").read_text("utf-8"))["workspace"]["package"]["version"]
    said = RELEASE.unfilled(ROOT, version)
    assert [fault for fault in said if "missing" in fault or "version" in fault] == []


def test_pre_commit_runs_the_versions_of_lint() -> None:
    hooks = (ROOT / ".pre-commit-config.yaml").read_text("utf-8")
    used = re.findall(r'additional_dependencies: \["([^"]+)"\]', hooks)
    assert used
    assert set(used) <= pins("lint")


def pins(name: str) -> set[str]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text("utf-8").splitlines()
    return {line for line in lines if "==" in line}


def test_make_dev_installs_versions_of_make_test_without_torch() -> None:
    assert pins("dev") < pins("test")
    assert not any(line.startswith("torch") for line in pins("dev"))


def commit(repository: Path, subject: str) -> None:
    author = ["-c", "user.name=ingot", "-c", "user.email=ingot@example.org"]
    subprocess.run(
        ["git", *author, "commit", "--quiet", "--allow-empty", "--message", subject],
        cwd=repository,
        check=True,
    )


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a long subject before the check was added, and a short one after."""
    folder = tmp_path / "origin"
    (folder / "scripts").mkdir(parents=True)
    subprocess.run(["git", "init", "--quiet", folder], check=True)
    commit(folder, "x" * 100)
    shutil.copy(ROOT / "scripts" / "check-commits", folder / "scripts")
    subprocess.run(["git", "add", "scripts"], cwd=folder, check=True)
    commit(folder, "Check the subjects of commits")
    commit(folder, "y" * 72)
    return folder


def checked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, folder / "scripts" / "check-commits", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_check_commits_ignores_commits_before_it_was_added(repository: Path) -> None:
    assert checked(repository).returncode == 0


@pytest.mark.parametrize("depth", ["1", "2", "100"])
def test_check_commits_rejects_a_long_subject_in_a_shallow_clone(
    repository: Path, tmp_path: Path, depth: str
) -> None:
    commit(repository, "z" * 73)
    clone = tmp_path / "clone"
    subprocess.run(
        ["git", "clone", "--quiet", "--depth", depth, repository.as_uri(), clone],
        check=True,
        capture_output=True,
    )
    done = checked(clone)
    assert done.returncode == 1
    assert "has 73 characters, expected at most 72" in done.stderr


def test_check_commits_rejects_a_long_message(repository: Path) -> None:
    message = repository / "message"
    message.write_text("# a comment\n" + "z" * 73 + "\n\nThe body.\n")
    assert checked(repository, "--message", str(message)).returncode == 1
    message.write_text("# a comment\nShort\n\n" + "z" * 100 + "\n")
    assert checked(repository, "--message", str(message)).returncode == 0
