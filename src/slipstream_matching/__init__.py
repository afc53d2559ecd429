"""Rollout matching for a detector that answers in text with coordinate tokens: pure functions.

The policy writes the objects of an image as JSON whose coordinates are tokens (`coordinates.py`, `answer.py`). A
rollout is parsed without repair (`parser.py`). Its objects are matched to the true ones (`matching.py`). The result is
the token sequence of one teacher-forced forward, with the region of each token (`row_targets.py`).

Guarantees: no state, no processes, no files; torch in `coordinate_losses.py` alone, and scipy only once something is to
be matched. What is wrong in the data raises `DataError`; what a rollout gets wrong is dropped and counted.
"""
