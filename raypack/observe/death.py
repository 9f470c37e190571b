"""Why an actor died, for people: Ray's text begins with what is the same for all deaths."""

from __future__ import annotations

import re

ENDED = re.compile(r"Worker exit detail: (.*?)\.(?= Some common causes|$)", re.MULTILINE)


def cause_of_death(text: str) -> str:
    """One line out of the text of a `RayActorError`: the exception of the constructor, or how the process ended."""
    lines = text.splitlines()
    frames = [number for number, line in enumerate(lines) if line.startswith("  File ")]
    if frames:
        told = [line for line in lines[frames[-1] + 1 :] if not line.startswith("    ")]
        return " ".join(" ".join(told).split())
    ended = ENDED.search(text)
    how = ended[1] if ended else lines[0].rstrip(".")
    return f"{how}; its log is in Ray's session directory (logs/), the kernel's says whether memory ran out"
