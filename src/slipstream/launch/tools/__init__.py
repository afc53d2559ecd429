"""What the commands do that start no training: evaluate, export, verify, chat, serve."""
