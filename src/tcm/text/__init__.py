"""Texts as a condition: the kind that a model's card holds, and the frozen encoders behind it."""
