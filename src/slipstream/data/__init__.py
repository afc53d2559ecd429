"""Conversations and their tokens: chat templates, files, and the order in which items are used."""
