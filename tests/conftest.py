"""Settings of all tests."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes is a matter of the machine, and nothing that a test should fail for.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a module of this source, with these entry points, one of an installed package for the test's duration."""

    def install(module, source, entry_points):
        (tmp_path / f"{module}.py").write_text(source)
        info = tmp_path / "theirs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install
