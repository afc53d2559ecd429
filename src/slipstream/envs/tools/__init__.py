"""Tools: functions that the policy may call; their schemas, and their calls."""
