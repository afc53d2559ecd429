"""Memory in the plan: what everything takes, and how a device's memory is divided. Pure arithmetic, in bytes."""
