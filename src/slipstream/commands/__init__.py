"""The commands that do not train: evaluate, export, verify, chat, serve."""
