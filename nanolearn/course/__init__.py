"""Graded problems: what they are, and the checks that judge an answer."""
