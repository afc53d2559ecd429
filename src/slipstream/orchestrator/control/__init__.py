"""How the trainer commands the generating side: commands and answers, their executor, and callers to bring them
there, within the process or to another."""
