"""The mutants of `make mutants`: a wrong edit that could be made by mistake, and the test that must then fail.

Where a file changes under one, write the same mistake anew; where that makes no sense any more, find another.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """
    Attributes:
        name: on the command line and in the table.
        file: below the repository's root.
        old: text that occurs in it exactly once.
        new: what stands there instead.
        breaks: what is wrong then, in a few words.
        test: pytest's name of one test, quick by itself.
    """

    name: str
    file: str
    old: str
    new: str
    breaks: str
    test: str


MUTANTS: tuple[Mutant, ...] = ()
