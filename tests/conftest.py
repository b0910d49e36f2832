"""Fixtures shared by the tests."""

import os
import shutil
from pathlib import Path

import pytest

if shutil.which("nvidia-smi") is None:  # read when Triton's kernels are declared
    os.environ.setdefault("TRITON_INTERPRET", "1")

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of reported faults and real rows beside the checkout, where it is present."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder 'shared' beside the checkout (cases and data)")
    return SHARED


@pytest.fixture(scope="session")
def fixtures():
    """Module of tiny models of transformers (needs torch)."""
    pytest.importorskip("torch")
    import tiny_torch

    return tiny_torch
