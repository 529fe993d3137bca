"""The storm: random operations on a whole cache, every vector coded by the history of its token, every read verified.

`content` says what a vector holds, `world` knows what must be true, `operations` does something at random. To add an
operation, write one function in `operations`; to add a codec, kind or layout, one case in `test_storm`.
"""
