"""How good a model is: takes a model, never a run."""
