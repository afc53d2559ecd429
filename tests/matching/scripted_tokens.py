"""A small exact tokenizer for tests: the coordinate tokens, the end of the turn, and pieces of JSON as they come."""

import re

from slipstream_matching.coordinates import NUM_BINS, AnswerTokens, literal

END = "<|im_end|>"
FIRST_COORDINATE = 1000
END_ID = 3000
MERGED = (
    '{"',
    '"object_',
    '": {"desc": "',
    '", "bbox_2d": ["',
    '", "poly": [["',
    '", "',
    '"], ["',
    '"]}',
    '"]]}',
    '"]}}',
    '}, "',
    ", ",
    "}}",
)


class Pieces:
    """Ids of pieces; new ones are given as pieces are met, so that any way of cutting a text into tokens can be had."""

    def __init__(self, merged=MERGED):
        self.ids = {literal(bin_).encode(): FIRST_COORDINATE + bin_ for bin_ in range(NUM_BINS)} | {
            END.encode(): END_ID
        }
        self.bytes = {id_: piece for piece, id_ in self.ids.items()}
        words = "|".join(re.escape(text) for text in sorted(merged, key=len, reverse=True))
        # Words with the space or punctuation before them, as pretokenizers cut them.
        self.pattern = re.compile(
            rf'<\|coord_(?:0|[1-9]\d{{0,2}})\|>|<\|im_end\|>|{words}|[ "]?[^\W\d_]+|\d|.', re.DOTALL
        )

    def intern(self, piece):
        if piece not in self.ids:
            self.ids[piece] = 4000 + len(self.ids)
            self.bytes[self.ids[piece]] = piece
        return self.ids[piece]

    def encode(self, text):
        """As a tokenizer does: special tokens where their text is."""
        return [self.intern(found[0].encode()) for found in self.pattern.finditer(text)]

    def as_cut(self, *pieces):
        """The ids of pieces that a policy may have written in this way."""
        return [self.intern(piece if isinstance(piece, bytes) else piece.encode()) for piece in pieces]

    def text(self, ids):
        return b"".join(self.bytes[id_] for id_ in ids).decode()

    def tokens(self):
        coordinates = tuple(range(FIRST_COORDINATE, FIRST_COORDINATE + NUM_BINS))
        return AnswerTokens(self.encode, lambda id_: self.bytes[id_], coordinates, END_ID)
