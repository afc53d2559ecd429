"""Tools: functions that the policy may call, of an environment, a file or a server of the Model Context Protocol."""
