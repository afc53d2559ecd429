"""A server of the Model Context Protocol, on the official SDK."""

import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("shop")


@server.tool()
def price(article: str, count: int = 1) -> str:
    """What so many of an article cost."""
    if article == "crash":
        os._exit(3)
    return str({"apple": 2, "pear": 3}[article] * count)


@server.tool()
def variable(name: str) -> str:
    """An environment variable."""
    return os.environ.get(name, "")


if __name__ == "__main__":
    if "silent" in sys.argv:
        sys.stdin.read()
    server.run(transport="stdio")
