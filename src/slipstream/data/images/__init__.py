"""Images of conversations: read and checked (`reading`), placed in messages (`parts`), turned into tokens
(`processor`, and `families` with one for each model)."""
