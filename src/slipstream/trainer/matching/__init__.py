"""The objective of rollout matching, and the boxes of a row of tokens."""
