# SPDX-License-Identifier: Apache-2.0
"""Variable tracking: a chain of assignments in noise, after one solved example.

    VAR KQXWA = 48213 ... VAR BJTRE = VAR KQXWA ...
    Find all variables that are assigned the value 48213 -> KQXWA BJTRE ...

One chain of four hops (NVIDIA/RULER, `scripts/synthetic.yaml`, `variable_tracking.py`). The example
is of the same form, with names of three letters and about 500 tokens; the prompt goes on behind it.
Units of haystack are lines of noise.
"""

import random
from string import ascii_uppercase

from eval.ruler.forms import NOISE, VARIABLES
from eval.ruler.haystack import with_lines
from eval.ruler.length import Prompt
from eval.ruler.sources import Setting

HOPS = 4
LETTERS, EXAMPLE_LETTERS = 5, 3
EXAMPLE_TOKENS = 500
FEWEST_LINES = HOPS + 1
"""Lines of noise at least: one for each line of the chain."""


class Chain:
    """One chain of assignments, at drawn places."""

    def __init__(self, draw: random.Random, letters: int) -> None:
        """Draw names, value and places."""
        names: dict[str, None] = {}
        while len(names) < HOPS + 1:
            names["".join(draw.choices(ascii_uppercase, k=letters))] = None
        self.names = tuple(names)
        self.value = str(draw.randrange(10_000, 99_999))
        # RULER writes a blank after each assignment of a variable.
        self.lines = [f"VAR {self.names[0]} = {self.value}"] + [
            f"VAR {name} = VAR {before} "
            for before, name in zip(self.names, self.names[1:], strict=False)
        ]
        self.places = sorted(draw.random() for _ in self.lines)

    def prompt(self, units: int) -> Prompt:
        """Return the question with this many lines of noise."""
        context = with_lines([NOISE] * units, self.lines, self.places)
        words = {"query": self.value, "count": len(self.names)}
        template = VARIABLES.template.format(context=context, **words)
        return Prompt(template, VARIABLES.prefix.format(**words))


class VariableDraft:
    """A sample of the task."""

    least = FEWEST_LINES
    most = None

    def __init__(self, setting: Setting, draw: random.Random) -> None:
        """Draw the example and the chain."""
        self._noise = setting.tokens.of_part(NOISE + "\n")
        example = Chain(draw, EXAMPLE_LETTERS)
        bare = setting.tokens.of_part(example.prompt(0).text)
        lines = max(FEWEST_LINES, (EXAMPLE_TOKENS - bare) // self._noise)
        solved = " ".join(example.names)
        self._example = f"{example.prompt(lines).text} {solved}\n\n"
        self._chain = Chain(draw, LETTERS)
        self.outputs = self._chain.names
        self.answer = " ".join(self.outputs)  # the prefix ends with a blank
        self._bare = setting.tokens.of_part(self._example + self._chain.prompt(0).text)

    def estimate(self, units: int) -> float:
        """Return the estimated tokens with this many lines of noise."""
        return float(self._bare + units * self._noise)

    def prompt(self, units: int) -> Prompt:
        """Return the prompt with this many lines of noise."""
        asked = self._chain.prompt(units)
        return Prompt(self._example + asked.input, asked.prefix)
