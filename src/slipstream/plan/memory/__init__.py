"""Memory in the plan: each part's need, and the division of a device's memory. Pure arithmetic, in bytes."""
