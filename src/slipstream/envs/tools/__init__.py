"""Tools: functions for the policy to call, of an environment, a file or a server of the Model Context Protocol."""
