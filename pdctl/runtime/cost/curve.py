"""Seconds as a function of prompt tokens: fixed + linear + quadratic, none of them negative.

Computing a prompt costs a fixed part (HTTP, scheduling), a part per token (matrix products)
and one per pair of tokens (attention). Samples are gathered by length, half an octave each; of
each gathering the median counts, so that one slow request moves nothing, and the newest samples
alone are in it. The fit weighs relative errors. What the family misses at the lengths that were
measured is kept beside it and interpolated.
"""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left
from collections.abc import Iterable, Sequence

import msgspec

TERMS = 3
_ROUNDS = 3
_HUBER = 0.1
"""Relative error from which on a point counts less and less."""
_TRUST = 3
"""Of what the family misses at one length, a quarter is believed of one sample, three quarters of
three: c² / (c² + _TRUST)."""


class Point(msgspec.Struct, frozen=True):
    """`seconds` for `tokens`: the median of `count` samples."""

    tokens: float
    seconds: float
    count: int = 1


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """What a path needs by prompt length, seconds."""

    fixed_s: float
    linear_s: float
    """Per token."""
    quadratic_s: float
    """Per token squared."""
    points: tuple[Point, ...]
    """What it was fitted to, ascending."""
    misses: tuple[float, ...]
    """Natural logarithm of measured over fitted, at each point."""

    @property
    def longest(self) -> float:
        """Tokens of the longest prompt that was measured."""
        return self.points[-1].tokens

    def fitted(self, tokens: float) -> float:
        """By the family alone."""
        return self.fixed_s + tokens * (self.linear_s + tokens * self.quadratic_s)

    def at(self, tokens: float) -> float:
        """By the family, corrected by what it misses near this length."""
        return self.fitted(tokens) * math.exp(self._missed(tokens))

    def _missed(self, tokens: float) -> float:
        after = bisect_left(self.points, tokens, key=lambda point: point.tokens)
        if after == 0:
            return self.misses[0]
        if after == len(self.points):
            return self.misses[-1]
        low, high = self.points[after - 1].tokens, self.points[after].tokens
        share = math.log(tokens / low) / math.log(high / low)
        return self.misses[after - 1] * (1 - share) + self.misses[after] * share


def length_class(tokens: int) -> int:
    """Half octaves: 64 and 90 tokens are in neighbouring ones."""
    return round(2 * math.log2(max(1, tokens)))


def medians(samples: Iterable[tuple[int, float]]) -> list[Point]:
    """One point per class of length, ascending; `samples` are (tokens, seconds)."""
    classes: dict[int, list[tuple[int, float]]] = {}
    for tokens, seconds in samples:
        classes.setdefault(length_class(tokens), []).append((tokens, seconds))
    points = [
        Point(
            statistics.median(tokens for tokens, _ in found),
            statistics.median(seconds for _, seconds in found),
            len(found),
        )
        for found in classes.values()
    ]
    return sorted(points, key=lambda point: point.tokens)


def fit(points: Sequence[Point], terms: int = TERMS) -> Curve | None:
    """The curve through points of ascending tokens, None where there is none; seconds and tokens
    are above zero. One length gives a straight line through the origin, two a line, three or
    more as many terms as were asked for."""
    if not points:
        return None
    powers = (1,) if len(points) == 1 else tuple(range(min(terms, len(points))))
    weights = [math.sqrt(point.count) for point in points]
    coefficients = [0.0] * TERMS
    for _ in range(_ROUNDS):
        coefficients = _least_squares(points, weights, powers)
        errors = [abs(_valued(coefficients, p.tokens) / p.seconds - 1) for p in points]
        weights = [
            math.sqrt(p.count) * min(1.0, math.sqrt(_HUBER / max(error, 1e-12)))
            for p, error in zip(points, errors, strict=True)
        ]
    misses = [
        math.log(p.seconds / _valued(coefficients, p.tokens)) * p.count**2 / (p.count**2 + _TRUST)
        for p in points
    ]
    fixed_s, linear_s, quadratic_s = coefficients
    return Curve(
        fixed_s=fixed_s,
        linear_s=linear_s,
        quadratic_s=quadratic_s,
        points=tuple(points),
        misses=tuple(misses),
    )


def _valued(coefficients: Sequence[float], tokens: float) -> float:
    return sum(c * tokens**power for power, c in enumerate(coefficients))


def _least_squares(
    points: Sequence[Point], weights: Sequence[float], powers: Sequence[int]
) -> list[float]:
    """Coefficients, none negative, of the least weighted squares of relative errors: the best of
    all choices of powers whose own solution is not negative (they are seven at most)."""
    rows = [
        [weight * point.tokens**power / point.seconds for power in range(TERMS)]
        for point, weight in zip(points, weights, strict=True)
    ]
    best, least = [0.0] * TERMS, math.inf
    for size in range(len(powers), 0, -1):
        for chosen in itertools.combinations(powers, size):
            solved = _solved([[row[power] for power in chosen] for row in rows], weights)
            if solved is None or min(solved) < 0:
                continue
            errors = [
                sum(row[power] * c for power, c in zip(chosen, solved, strict=True)) - weight
                for row, weight in zip(rows, weights, strict=True)
            ]
            squares = sum(error * error for error in errors)
            if squares < least:
                least = squares
                best = [0.0] * TERMS
                for power, c in zip(chosen, solved, strict=True):
                    best[power] = c
        if size == len(powers) and least < math.inf:
            break
    return best


def _solved(rows: Sequence[Sequence[float]], right: Sequence[float]) -> list[float] | None:
    """Least squares by the normal equations, columns scaled; None where they are dependent."""
    width = len(rows[0])
    scales = [math.sqrt(sum(row[i] ** 2 for row in rows)) for i in range(width)]
    if min(scales) == 0:
        return None
    scaled = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    system = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * wanted for row, wanted in zip(scaled, right, strict=True))]
        for i in range(width)
    ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(system[row][i]))
        system[i], system[pivot] = system[pivot], system[i]
        if abs(system[i][i]) < 1e-12:
            return None
        for row in range(i + 1, width):
            factor = system[row][i] / system[i][i]
            system[row] = [a - factor * b for a, b in zip(system[row], system[i], strict=True)]
    found = [0.0] * width
    for i in reversed(range(width)):
        known = sum(system[i][j] * found[j] for j in range(i + 1, width))
        found[i] = (system[i][width] - known) / system[i][i]
    return [value / scale for value, scale in zip(found, scales, strict=True)]
