"""The import direction, read from the sources: base, tableau <- families <- registry <- solve <- depth <- models."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*ROOT.glob("solvers/**/*.py"), *ROOT.glob("odeformer/**/*.py")])


def imported(path: Path) -> set[str]:
    """The modules that a file imports, at the top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
    return names


def top_level(path: Path) -> set[str]:
    """The packages imported when the file is."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names


def test_there_are_sources_to_read():
    assert len(SOURCES) > 20


def test_solvers_never_imports_odeformer():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "solvers"):
            assert not any(name.split(".")[0] in ("odeformer", "benchmarks") for name in imported(path)), path


# plots, diagnostics and the command line study solvers themselves; models reach them through depth alone
STUDIES = {"depth.py", "commands", "plots", "presets.py", "diagnostics", "studio"}  # what may, directly in odeformer


def test_models_reach_solvers_through_depth_alone():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "odeformer") and path.relative_to(ROOT / "odeformer").parts[0] not in STUDIES:
            assert not any(name.split(".")[0] == "solvers" for name in imported(path)), path


def test_families_do_not_import_the_registry_or_the_loop():
    families = [path for path in (ROOT / "solvers").glob("*.py") if "METHODS" in path.read_text(encoding="utf-8")
                and path.name not in ("registry.py", "odeint.py")]
    assert len(families) >= 4
    for path in families:
        above = {"solvers", "solvers.registry", "solvers.solve"} & top_level_modules(path)
        assert not above, (path, above)


def top_level_modules(path: Path) -> set[str]:
    """The dotted modules imported when the file is."""
    return {node.module for node in ast.parse(path.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("heavy", ["torchdiffeq", "scipy", "matplotlib", "sklearn", "safetensors"])
def test_optional_and_heavy_packages_are_imported_where_they_are_used(heavy):
    allowed = {"matplotlib": {"plots"}}.get(heavy, set())
    for path in SOURCES:
        if path.parent.name not in allowed:
            assert heavy not in top_level(path), path


def test_importing_the_packages_loads_nothing_heavy():
    code = ("import sys, odeformer, solvers; from odeformer import Decoder; "
            "print([m for m in ('scipy', 'torchdiffeq', 'matplotlib', 'sklearn', 'pandas') if m in sys.modules])")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip() == "[]"


def test_help_answers_without_torch():
    code = ("import sys; from odeformer.cli import main\n"
            "try: main(['--help'])\nexcept SystemExit: pass\nprint('torch' in sys.modules)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert out.stdout.strip().endswith("False")
