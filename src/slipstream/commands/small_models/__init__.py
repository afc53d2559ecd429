"""Small networks made here: with random weights, or like a large one for its compiled layers."""
