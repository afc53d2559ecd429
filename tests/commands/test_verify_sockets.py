"""Which engines `slipstream verify` asks."""

import pytest

from slipstream.commands.verify import _sockets
from slipstream.errors import ConfigError
from slipstream.runlog import RunLog


def test_all_engines_of_the_last_attempt_in_whatever_order_they_began(tmp_path):
    folder = tmp_path / "run"
    for attempt, order in enumerate([(2, 0, 1), (1, 0)]):
        with RunLog.create(folder, resume=attempt > 0) as log:
            if not attempt:
                with pytest.raises(ConfigError, match="does not say where its engine answers"):
                    _sockets(folder)
            for number in order:
                log.event("engine_socket", path=f"/{attempt}/{number}", replica=number)
        expected = [f"/{attempt}/{number}" for number in sorted(order)]
        assert [str(path) for path in _sockets(folder)] == expected
