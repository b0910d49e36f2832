"""Fixtures shared by the tests."""

import sys
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reported faults and real rows beside the checkout, where it is present."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder 'shared' beside the checkout (cases and data)")
    return SHARED


@pytest.fixture(scope="session")
def fixtures(shared: Path):
    """Module of tiny tokenizers and models (needs torch)."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(shared / "cases"))
    try:
        import fixtures as module
    finally:
        sys.path.pop(0)
    return module
