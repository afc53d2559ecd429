"""SFT in which the first token of an answer weighs more."""
