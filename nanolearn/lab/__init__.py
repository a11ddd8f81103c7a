"""What notebooks share: parameters, plots, live curves, results."""
