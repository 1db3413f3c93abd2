"""Tests are laid out like the package: the tests of `esm_turbo/x/y.py` are in `tests/x/test_y.py`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, TESTS = ROOT / "esm_turbo", ROOT / "tests"

# Modules without a test file of their own, and the file that tests them instead. A folder stands for its modules.
TESTED_IN = {
    # Seen through shards of all commands.
    "cli/commands/merge.py": "parallel/test_merge.py",
    "cli/commands/status.py": "parallel/test_merge.py",
    "cli/sharding.py": "parallel/test_merge.py",
    # Lazy imports of the public names.
    "__init__.py": "test_public_api.py",
    # What the models of all families share, seen through the models.
    "model/cache_owner.py": "test_modeling_esm_turbo.py",
    "model/cached_model.py": "test_modeling_esm_turbo.py",
    "model/family_encoder.py": "test_modeling_esm_turbo.py",
    "model/masked_lm.py": "test_modeling_esm_turbo.py",
    # What the pool of graphs captures, seen through the pool.
    "model/captured.py": "model/test_graph_pool.py",
    "model/chains.py": "test_modeling_esmc_turbo.py",
    "model/rotary.py": "test_modeling_esm_turbo.py",
    # Parts of a cache, seen through the cache.
    "kv": "test_kv_cache.py",
    # Kernels are launched by these modules, whose tests compare them with the reference.
    "ops/attention_plan.py": "ops/test_triton_attention.py",
    "ops/kernels/attention.py": "ops/test_triton_attention.py",
    "ops/kernels/copies.py": "ops/test_copies.py",
    "ops/kernels/encode.py": "ops/test_triton_encode.py",
    "ops/kernels/encoder.py": "model/test_packed_encoder.py",
    "ops/kernels/extension.py": "ops/test_decoded_attention.py",
    "ops/kernels/layer.py": "ops/test_triton_layer.py",
    "ops/kernels/linear.py": "ops/test_triton_encoder.py",
    "ops/kernels/operands.py": "ops/test_triton_layout.py",
    "ops/kernels/products.py": "ops/test_triton_attention.py",
    "ops/kernels/queries.py": "ops/test_triton_attention.py",
    "ops/kernels/shared.py": "ops/test_decoded_attention.py",
    "ops/reference.py": "ops/test_torch_ops.py",
    "ops/torch_encoder.py": "model/test_packed_encoder.py",
    "ops/compile_worker.py": "ops/test_compilation.py",
    "ops/slabs.py": "ops/test_triton_layout.py",
    "ops/variants.py": "ops/test_compilation.py",
    # Parts of the service, seen through its endpoints; jobs also in `serve/test_engine.py`.
    "serve/errors.py": "serve/test_app.py",
    "serve/jobs.py": "serve/test_app.py",
    "serve/limits.py": "serve/test_app.py",
    "serve/metrics.py": "serve/test_app.py",
    "serve/routes.py": "serve/test_app.py",
    "serve/schemas.py": "serve/test_app.py",
    "serve/service.py": "serve/test_app.py",
    # Parts of a store, seen through the store.
    "store": "test_context_store.py",
    "tasks/common/contexts.py": "test_context_store.py",
    # What the formats of one file share, seen through them.
    "tasks/embedding/one_file.py": "tasks/embedding/test_h5.py",
}

# Tests of more than one module. A folder stands for its tests.
ACROSS_MODULES = {
    "docs",
    "ops/test_triton_compile.py",
    "serve/test_page.py",
    "test_calibration_data.py",
    "test_families.py",
    "test_kv_cache_cutting.py",
    "test_kv_cache_dropping.py",
    "test_kv_cache_refinements.py",
    "test_layout.py",
    "test_lean_import.py",
    "test_mps_rules.py",
    "test_notebooks.py",
    "test_packaging.py",
    "test_project.py",
    "test_public_api.py",
}


def _test_file_of(module: str) -> str:
    """Path of a module's test file; that of a package is named after the folder."""
    path = Path(module)
    name = path.parent.name if path.name == "__init__.py" else path.stem
    return (path.parent / f"test_{name}.py").as_posix()


def modules() -> list[str]:
    """Modules that define a function or a class, relative to the package."""
    defining = []
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in tree.body):
            defining.append(path.relative_to(PACKAGE).as_posix())
    return defining


def with_folders(path: str) -> set[str]:
    """A path and all folders that it lies in."""
    return {path, *(parent.as_posix() for parent in Path(path).parents)}


@pytest.mark.parametrize("module", modules())
def test_every_module_has_a_test_file(module: str) -> None:
    own, listed = (TESTS / _test_file_of(module)).is_file(), TESTED_IN.keys() & with_folders(module)
    assert own or listed, f"esm_turbo/{module} needs tests/{_test_file_of(module)}"
    assert not (own and module in listed), f"esm_turbo/{module} has its own tests: remove it from TESTED_IN"


def test_listed_modules_and_their_tests_exist() -> None:
    assert [name for name in TESTED_IN if not (PACKAGE / name).exists()] == []
    assert [name for name in TESTED_IN.values() if not (TESTS / name).is_file()] == []
    assert set(TESTED_IN) <= set().union(*map(with_folders, modules()))


def test_every_test_file_has_a_module() -> None:
    mirrored = {_test_file_of(path.relative_to(PACKAGE).as_posix()) for path in PACKAGE.rglob("*.py")}
    mirrored |= {
        f"benchmarks/{_test_file_of(path.relative_to(ROOT / 'benchmarks').as_posix())}"
        for path in (ROOT / "benchmarks").rglob("*.py")
    }
    found = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")}
    assert sorted(path for path in found - mirrored if not ACROSS_MODULES & with_folders(path)) == []
    assert set().union(*map(with_folders, found - mirrored)) >= ACROSS_MODULES
