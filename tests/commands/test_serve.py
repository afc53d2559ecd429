"""A port that is kept until vLLM listens there."""

import socket

import pytest

from slipstream.commands.serve import held_port
from slipstream.errors import ConfigError


def test_nobody_else_gets_it_but_a_server_can_listen_there():
    with held_port("127.0.0.1", 0) as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as server:  # as vLLM makes its own
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            socket.create_connection(("127.0.0.1", port)).close()
            with pytest.raises(ConfigError, match="--port 0"), held_port("127.0.0.1", port):
                pass
