"""Map the top-level folders into the namespace ``quire`` and compile the protos."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory

from grpc_tools import protoc
from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = [
    "benchmarks",
    "cli",
    "client",
    "engine",
    "fairness",
    "kernels",
    "kvindex",
    "kvtransfer",
    "llm",
    "models",
    "observability",
    "protos",
    "routing",
    "rpc",
    "sampling",
    "services",
    "settings",
    "simulator",
    "tokenization",
]


class BuildPy(build_py):
    """Generate the gRPC stubs beside their protos, then build as usual."""

    def run(self) -> None:
        with TemporaryDirectory() as out:
            outputs = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
            files = sorted(map(str, Path("protos").glob("*.proto")))
            # The mapping makes the stubs import each other as quire.protos.*, with no patching.
            if protoc.main(["protoc", "-Iquire/protos=protos", *outputs, *files]):
                raise SystemExit("protoc failed")
            copytree(Path(out, "quire", "protos"), "protos", dirs_exist_ok=True)
        super().run()


# Any other folder in models is a model, and may contain code of its own.
found = find_namespace_packages(include=[*FOLDERS, *(f"{name}.*" for name in FOLDERS)], exclude=["models.*"])
found.append("models.training")
setup(
    packages=[f"quire.{name}" for name in found],
    package_dir={"quire": "."},
    cmdclass={"build_py": BuildPy},
)
