"""nanolearn: a book of notebooks that teaches how a GPT is pre-trained, and the package that really pre-trains it."""
