"""The required and the desired value of a figure."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Goal:
    """The required figure and the desired one."""

    owed: float
    aim: float
    # The ratio to the peer (higher is better), or our own figure (lower is better).
    of: Literal["ratio", "figure"] = "ratio"

    def met(self, figure: float) -> Literal["aim met", "owed met", "MISSED"]:
        for word, bound in (("aim met", self.aim), ("owed met", self.owed)):
            if figure >= bound if self.of == "ratio" else figure <= bound:
                return word
        return "MISSED"

    def __str__(self) -> str:
        return f"owed {self.owed:g}, aim {self.aim:g}"
