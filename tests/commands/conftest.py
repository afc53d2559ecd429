from tests.cli.conftest import slipstream

__all__ = ["slipstream"]
