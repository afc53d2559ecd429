"""The interpreters that environments of `verifiers` run with in tests: `scripts/install.py` makes them."""

import os
from pathlib import Path

import pytest

REQUIRE = "SLIPSTREAM_REQUIRE_VERIFIERS"
ENVIRONMENTS = Path(__file__).parent / "verifiers_environments"
_FOLDER = Path(os.environ.get("SLIPSTREAM_VERIFIERS", Path(__file__).parents[2] / ".venv/verifiers"))


def interpreter(version):
    """The one with this version of verifiers, "0.3" or "0.4"; the test is skipped where there is none."""
    path = _FOLDER / version / "bin/python"
    if not path.exists() and REQUIRE not in os.environ:
        pytest.skip(f"{path} is not there: make it with scripts/install.py --for-tests")
    return str(path)
