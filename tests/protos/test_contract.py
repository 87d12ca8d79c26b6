"""The public protos: their style, and that nothing a client relies on goes away."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet

from tests.testing.commands import run_command

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "protos" / "baseline.binpb"
BUF = Path(sys.executable).with_name("buf")
Change = Callable[[FileDescriptorProto], None]


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the protos into a descriptor set."""
    path = tmp_path_factory.mktemp("image") / "image.binpb"
    files = [f"quire/protos/{file.name}" for file in sorted((ROOT / "protos").glob("*.proto"))]
    mapping = f"-Iquire/protos={ROOT / 'protos'}"
    options = ["--include_imports", "--include_source_info", f"--descriptor_set_out={path}"]
    # In a process of its own: the compiler and NIXL, which other tests load, abort in one process.
    run_command(sys.executable, "-m", "grpc_tools.protoc", mapping, *options, *files)
    return path


def buf(*arguments: object) -> str:
    """Return what buf has to say against it; empty if nothing."""
    command = [str(BUF), *map(str, arguments), "--config", str(ROOT / "buf.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode == 0) == (not done.stdout), done.stderr
    return done.stdout


def test_the_protos_are_in_style(image: Path) -> None:
    assert buf("lint", image) == ""


def test_nothing_of_the_contract_was_broken(image: Path) -> None:
    """If it was, on purpose: write protos/baseline.binpb anew, as CONTRIBUTING.md says, and tell users."""
    assert buf("breaking", image, "--against", BASELINE) == ""


def test_every_public_element_is_explained(image: Path) -> None:
    for file in FileDescriptorSet.FromString(image.read_bytes()).file:
        if not file.name.endswith(("inference.proto", "admin.proto")):
            continue
        explained = {tuple(each.path) for each in file.source_code_info.location if each.leading_comments}
        for at, message in enumerate(file.message_type):
            fields = {(4, at, 2, number) for number in range(len(message.field))}
            assert {(4, at), *fields} <= explained, message.name
        for at, service in enumerate(file.service):
            assert {(6, at), *((6, at, 2, number) for number in range(len(service.method)))} <= explained


def remove_a_field(file: FileDescriptorProto) -> None:
    del next(m for m in file.message_type if m.name == "Usage").field[0]


def renumber_a_field(file: FileDescriptorProto) -> None:
    next(m for m in file.message_type if m.name == "Usage").field[0].number = 99


def change_a_type(file: FileDescriptorProto) -> None:
    next(m for m in file.message_type if m.name == "Usage").field[0].type = FieldDescriptorProto.TYPE_STRING


def remove_a_method(file: FileDescriptorProto) -> None:
    del file.service[0].method[0]


@pytest.mark.parametrize("change", [remove_a_field, renumber_a_field, change_a_type, remove_a_method])
def test_a_break_is_found(image: Path, tmp_path: Path, change: Change) -> None:
    files = FileDescriptorSet.FromString(image.read_bytes())
    change(next(file for file in files.file if file.name.endswith("inference.proto")))
    broken = tmp_path / "broken.binpb"
    broken.write_bytes(files.SerializeToString())
    assert buf("breaking", broken, "--against", BASELINE)
