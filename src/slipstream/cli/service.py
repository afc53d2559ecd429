"""The command `serve`: a service over this machine's queue."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.output import Json, print_json, tell
from slipstream.errors import ConfigError


def serve(
    *,
    host: Annotated[str, Parameter(help="Address to listen on; others than loopback need tokens.")] = "127.0.0.1",
    port: Annotated[int, Parameter(help="0: a free one.")] = 8700,
    new_token: Annotated[str | None, Parameter(help="Make and print a token for this user, and serve nothing.")] = None,
    json: Json = False,
) -> int:
    """Serve this machine's queue over HTTP, with a page for the browser (docs/service.md).

    Runs continue after the end of the service, and its next start finds them again. It runs the code of all its users as this Unix user.
    Commands use it with SLIPSTREAM_SERVICE=http://HOST:PORT, and their token in SLIPSTREAM_SERVICE_TOKEN.
    """
    from slipstream.service.store import Store

    store = Store()
    if new_token is not None:
        from slipstream.service.access import new_token as make

        token = make(store, new_token)
        print_json({"user": new_token, "token": token}) if json else tell(token)
        return 0
    try:
        from slipstream.service.api import serve as run
        from slipstream.service.index import DATABASE
    except ModuleNotFoundError as error:
        raise ConfigError(f"the service needs {error.name}: pip install 'slipstream[service]'") from None

    def announce(port: int, needs_token: bool) -> None:
        shown = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        if json:
            print_json({"url": shown, "needs_token": needs_token})
        else:
            tell(f"service: {shown}{' (with a token)' if needs_token else ''}", flush=True)

    run(store, os.environ.get(DATABASE, ""), host, port, announce)
    return 0
