"""Makes batches of groups of rollouts: slots, order, staleness, dynamic sampling."""
