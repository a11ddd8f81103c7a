"""The tiny run of tests/train, for faults of whole runs."""

from tests.train.conftest import tiny as tiny
