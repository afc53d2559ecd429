"""Training data: chat templates, readers of conversations and tasks, and the order of sampling."""
